"""Results that the code keeps on modules: the rewritten block sets them too, or the block is left alone."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hexa_fx
from tests.detect.mixture import D, Mixture


class Block(Mixture):
    """`keep` says what is left on the module."""

    def __init__(self) -> None:
        super().__init__()
        self.aux_loss: torch.Tensor | None = None
        self.seen: object = None

    def keep(self, probs: torch.Tensor, out: torch.Tensor, last: torch.Tensor) -> None:
        if self.training:
            self.aux_loss = (probs.mean(0) ** 2).sum() + 0.1 * out.pow(2).mean()
            self.seen = (probs, [out.abs().sum()], {"from": "mixture", "of": f"{len(out)} tokens", "env": None})
        else:
            self.aux_loss = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probs, _, out, last = self.mix(x)
        self.keep(probs, out, last)
        return out


class KeepsTuples(Block):
    def __init__(self) -> None:
        super().__init__()
        self.named = (1, "mixture")

    def keep(self, probs: torch.Tensor, out: torch.Tensor, last: torch.Tensor) -> None:
        self.seen, self.named = (1, None), (1, "mixture")


def optimized(make: type[Block]) -> tuple[Block, Block]:
    torch.manual_seed(0)
    model = make().double()
    return model, hexa_fx.optimize(model, torch.randn(9, D, dtype=torch.float64))


def test_values_and_their_gradients():
    model, opt = optimized(Block)
    assert "moe_ffn" in opt.graphs[""].rewritten.code
    x = torch.randn(7, D, dtype=torch.float64)
    found = []
    for block in (model.train(), opt.train()):
        out = block(x)
        assert block.aux_loss is not None
        loss = block.aux_loss + out.sum() + block.seen[1][0]
        found.append([block.aux_loss, *torch.autograd.grad(loss, list(block.parameters()))])
        assert isinstance(block.seen, tuple)
        assert isinstance(block.seen[1], list)
        assert block.seen[2] == {"from": "mixture", "of": "7 tokens", "env": None}
    for ours, theirs in zip(*found):
        torch.testing.assert_close(ours, theirs)
    opt.eval()(x)
    assert opt.aux_loss is None
    assert isinstance(opt(x), torch.Tensor)


class Counts(Mixture):
    """Keeps a number that it adds to in every call; ``count``: what it does with it."""

    def __init__(self, count: Callable[[Any, torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.count, self.kept, self.last = count, 0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probs, _, out, _ = self.mix(x)
        scale = self.count(self, x, probs)
        return out if scale is None else out * scale


def calls(m: Any, x: torch.Tensor, probs: torch.Tensor) -> None:
    m.kept += 1


def tokens(m: Any, x: torch.Tensor, probs: torch.Tensor) -> None:
    m.kept = m.kept + x.shape[0] if m.training else m.kept


def numbers(m: Any, x: torch.Tensor, probs: torch.Tensor) -> None:
    m.kept += probs.max().item()


def tensors(m: Any, x: torch.Tensor, probs: torch.Tensor) -> None:
    m.kept = m.kept + probs.max()


def cooling(m: Any, x: torch.Tensor, probs: torch.Tensor) -> float:
    m.kept += 1
    return max(0.9, 1 - 0.02 * m.kept)


def now_and_then(m: Any, x: torch.Tensor, probs: torch.Tensor) -> None:
    m.kept += 1
    if m.kept % 3 == 0:
        m.last = probs.mean().item()


@pytest.mark.parametrize(
    "count", [calls, tokens, numbers, tensors, cooling, now_and_then], ids=lambda count: count.__name__
)
def test_a_number_that_a_block_adds_to(count: Callable[[Any, torch.Tensor, torch.Tensor], Any]) -> None:
    block = Counts(count).double()
    optimized = hexa_fx.optimize(copy.deepcopy(block), None)
    for number in (9, 4, 7, 5, 9, 3, 8):
        x = torch.randn(number, D, dtype=torch.float64)
        torch.testing.assert_close(optimized(x), block(x))
        torch.testing.assert_close((optimized.kept, optimized.last), (block.kept, block.last))
        assert type(optimized.kept) is type(block.kept)
    assert not optimized.report.blocks[0].calls.own, str(optimized.report)


class LeftByTraining(Mixture):
    """What a call in train mode leaves is a part of what a call in eval mode gives; ``resets``: which leaves nothing itself."""

    resets = False

    def __init__(self) -> None:
        super().__init__()
        self.load: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probs, _, out, _ = self.mix(x)
        result = out if self.training or self.load is None else out * self.load
        if self.training or self.resets:
            self.load = probs.mean(0).sum().detach() + 1 if self.training else None
        return result


class LeftAndReset(LeftByTraining):
    resets = True


@pytest.mark.parametrize("kind", [LeftByTraining, LeftAndReset])
def test_what_another_mode_left_is_a_condition(kind: type[LeftByTraining]) -> None:
    block, x = kind(), torch.randn(12, D)
    opt = hexa_fx.optimize(copy.deepcopy(block), x)
    assert opt.report.blocks[0].status == "rewritten"
    for training in (False, True, False, False, True, True, False):
        block.train(training)
        opt.train(training)
        torch.testing.assert_close(opt(x), block(x))
        torch.testing.assert_close(opt.load, block.load)


def test_tuples_of_plain_values_that_are_always_the_same():
    model, opt = optimized(KeepsTuples)
    assert opt.report.rewritten
    for each in (model, opt):
        del each.seen, each.named
        each(torch.randn(5, D, dtype=torch.float64))
    assert (opt.seen, opt.named) == (model.seen, model.named)
