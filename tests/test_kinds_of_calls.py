"""Calls of one block that its code tells apart: by mode, by gradients, and by what becomes of its input afterwards."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hexa_fx
from tests.detect.mixture import D, E, Mixture
from tests.zoo.common import looped
from tests.zoo.compare import compare, operators_run
from tests.zoo.variant import weight

I = 10  # noqa: E741
CONFIG = hexa_fx.HexaConfig(own_code_when_small=False)


def tokens(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(2, 9, D, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)


class ChoosesInTraining(nn.Module):
    """Experts by ids in train mode, and all of them, weighted by a matrix with zeros, in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = weight(E, D, I), weight(E, I, D)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if not self.training:
            every = torch.bmm(F.silu(torch.bmm(x.expand(E, -1, -1), self.up)), self.down)
            return (every * weights.T[..., None]).sum(0)
        out = torch.zeros_like(x)
        for number in range(E):
            token, _ = torch.where(ids == number)
            rows = F.silu(x[token] @ self.up[number]) @ self.down[number]
            out.index_add_(0, token, rows * weights[token, number, None])
        return out


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(D, E), ChoosesInTraining()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        scores = self.router(flat)
        top, ids = scores.topk(2)
        weights = torch.zeros_like(scores).scatter(1, ids, top.softmax(-1))
        return self.experts(flat, ids, weights).view(x.shape)


class Layers(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def pair(model: nn.Module, *inputs: torch.Tensor) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model, hexa_fx.optimize(copy.deepcopy(model), *inputs, config=CONFIG)


@pytest.mark.parametrize("given", [True, False], ids=["example", "first call"])
@pytest.mark.parametrize("first", [True, False], ids=["train", "eval"])
def test_experts_that_choose_in_one_mode_run_operators_in_both(
    first: bool, given: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is said of experts while the module around them is still to be tried."""
    model = Layers(Around).double().train(first)
    model, opt = pair(model, *([tokens()] if given else []))
    for mode in (first, not first, first):  # the second call of a kind is the first that may run on the module around
        for _ in range(2):
            torch.testing.assert_close(opt.train(mode)(tokens()), model.train(mode)(tokens()))
    assert not any("runs its original forward" in line for line in caplog.messages)
    for mode in (True, False):
        assert operators_run(opt.train(mode), (tokens(),)), opt.report
        assert compare(model, opt, (tokens(),), train=mode).within(1e-10)
    hexa_fx.undo_(opt)
    assert not any("forward" in vars(module) for module in opt.modules())


class AsksForGradients(Mixture):
    def __init__(self, asked: str) -> None:
        super().__init__()
        self.asked = asked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, _, out, _ = self.mix(x)
        asked = {"input": x.requires_grad, "scores": scores.requires_grad, "mode": torch.is_grad_enabled()}[self.asked]
        self.loss = scores.logsumexp(-1).mean() if asked else None
        return out


@pytest.mark.parametrize("asked", ["input", "scores", "mode"])
def test_what_a_block_does_if_gradients_are_wanted(asked: str) -> None:
    model, opt = pair(nn.Sequential(nn.Linear(D, D), AsksForGradients(asked)).double(), tokens().flatten(0, 1))
    modes = (torch.enable_grad, torch.no_grad, torch.inference_mode, torch.enable_grad, torch.no_grad)
    for x in (tokens().flatten(0, 1), tokens()[0, :2]):  # few tokens are analysed on others
        for mode in modes:
            with mode():
                torch.testing.assert_close(opt(x), model(x))
                assert (opt[1].loss is None) == (model[1].loss is None)
    calls = opt.report.blocks[0].calls
    assert (calls.rewritten, calls.own) == (2 * len(modes), {}), opt.report


@pytest.mark.parametrize("asked", ["input", "mode"])
def test_a_first_call_of_few_tokens_wants_gradients(asked: str) -> None:
    model, opt = pair(nn.Sequential(nn.Linear(D, D), AsksForGradients(asked)).double())
    x = tokens()[0, :2]
    for _ in range(2):
        torch.testing.assert_close(opt(x), model(x))
    assert opt.report.blocks[0].calls.rewritten == 2, opt.report


class Plain(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x)[2]


class WrittenAfter(nn.Module):
    def __init__(self, write: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.moe, self.norm, self.write = nn.Linear(D, D), Plain(), nn.LayerNorm(D), write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x).reshape(-1, D)
        out = self.moe(x)
        self.write(x, out)
        return self.norm(x + out)


@pytest.mark.parametrize("given", [True, False], ids=["example", "first call"])
@pytest.mark.parametrize("write", [torch.Tensor.add_, torch.Tensor.copy_, lambda x, _: x.view(-1).mul_(0.5)])
def test_an_input_may_be_written_to_after_the_call(write: Callable[..., Any], given: bool) -> None:
    model = WrittenAfter(write).double()
    model.moe.router.requires_grad_(False)  # else its own code keeps the input too
    model, opt = pair(model, *([tokens()] if given else []))
    assert operators_run(opt, (tokens(),), gradients=True)
    assert compare(model, opt, (tokens(),)).within(1e-10)


def test_a_report_says_that_experts_were_exchanged() -> None:
    _, opt = pair(Layers(lambda: nn.Sequential(Plain())), tokens(torch.float32).flatten(0, 1))
    assert "own code now" not in opt.report.summary()
    opt.layers[1] = nn.Linear(D, D)
    assert "1 of them runs its own code now" in opt.report.summary()
    assert "no part of the model any more" in str(opt.report)


class LossInTraining(nn.Module):
    """Draws noise and gives a loss in train mode, and None in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.calls = nn.Linear(D, E), 0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        self.calls += 1
        scores = self.gate(x)
        loss = scores.square().mean() if self.training else None
        scores = scores + torch.randn_like(scores) if self.training else scores
        weights, ids = scores.softmax(-1).topk(2)
        return weights, ids, loss


class WithLoss(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.router = LossInTraining()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        flat = x.reshape(-1, D)
        weights, ids, loss = self.router(flat)
        return looped(flat, weights, ids, self.experts).view(x.shape), loss


def test_what_a_router_gives_tells_modes_apart_as_often_as_they_change(caplog: pytest.LogCaptureFixture) -> None:
    model, opt = pair(WithLoss().double().eval(), tokens())
    for turn in range(2 * CONFIG.specialisations + 4):
        before = opt.router.calls
        opt.train(turn % 2 == 1)(tokens())
        assert opt.router.calls == before + 1, "it is called once, and answers what it gave"
    (calls,) = (block.calls for block in opt.report.blocks)
    assert (calls.rewritten, calls.kinds, calls.own) == (turn + 1, 2, {})
    assert not caplog.messages
    for training in (False, True, False, True):
        assert compare(model, opt, (tokens(),), train=training).within(1e-10)


class ChangesBefore(WithLoss):
    """Draws, counts or writes before its router is called, so that a call cannot be begun anew behind the router."""

    def __init__(self, change: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.change = change
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return super().forward(self.change(self, x))


CHANGES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "noise": lambda block, x: x * (1 + 0.1 * torch.randn_like(x)),
    "a count": lambda block, x: x * block.steps.add_(1),
    "its input": lambda block, x: x.mul_(1.5),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_router_that_cannot_be_asked_is_called_in_the_mode_that_it_was_recorded_in(change: str) -> None:
    model, opt = pair(ChangesBefore(CHANGES[change]).double().eval(), tokens())
    for training in (False, True, True, False, True):
        assert compare(model, opt, (tokens(),), train=training).within(1e-10)
        assert operators_run(opt, (tokens(),))
    (calls,) = (block.calls for block in opt.report.blocks)
    assert (calls.kinds, calls.own) == (2, {})
