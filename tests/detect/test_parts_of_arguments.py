"""Tensors in a tuple, list or dict: given as one argument, or by a router, which may later give more than it did."""

import copy
import pickle
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import hexa_fx
from tests.detect.mixture import D, E, K, Mixture
from tests.zoo.compare import compare, operators_run

CONFIG = hexa_fx.HexaConfig(own_code_when_small=False)


class Batch(NamedTuple):
    hidden: torch.Tensor
    mask: torch.Tensor | None
    scale: float = 1.0


class Given(Mixture):
    """``parts`` gives tokens, a mask (or None) and a factor of what the block is given."""

    def __init__(self, parts: Callable[[Any], tuple[torch.Tensor, Any, Any]]) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, batch: Any) -> tuple[torch.Tensor, Any]:
        hidden, mask, scale = self.parts(batch)
        weights, ids = self.router(hidden).softmax(-1).topk(2)
        weights = weights if mask is None else weights * mask[:, None]
        return self.chosen(hidden, weights, ids) * scale, mask


KINDS: dict[str, tuple[Callable[..., Any], Callable[[Any], tuple[Any, Any, Any]]]] = {
    "tuple": (lambda x, mask, scale: (x, mask, scale), lambda batch: batch),
    "list": (lambda x, mask, scale: [x, mask, scale], lambda batch: (batch[0], batch[1], batch[-1])),
    "dict": (
        lambda x, mask, scale: {"x": x, "mask": mask, "scale": scale},
        lambda batch: (batch["x"], batch.get("mask"), batch["scale"]),
    ),
    "named tuple": (Batch, lambda batch: (batch.hidden, batch.mask, batch.scale)),
    "nested": (
        lambda x, mask, scale: {"of": (x, [mask]), "more": {"scale": scale}},
        lambda batch: (batch["of"][0], batch["of"][1][0], batch["more"]["scale"]),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [True, False])
def test_they_are_rewritten(kind: str, given: bool) -> None:
    """A number among them is a condition, as is whether there is a mask."""
    make, parts = KINDS[kind]

    def batch(rows: int, masked: bool = True, scale: Any = 2.0) -> Any:
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, D, dtype=torch.float64, generator=generator)
        return make(x, (x[:, 0] > 0).double() if masked else None, scale)

    block = Given(parts).double()
    opt = hexa_fx.optimize(copy.deepcopy(block), (batch(9),) if given else None, CONFIG)
    scaled = [batch(7, scale=torch.tensor(scale, dtype=torch.float64)) for scale in (0.5, 2.5)]
    for each in (batch(9), batch(9), batch(14), batch(1), *scaled):
        assert compare(block, opt, (each,)).within(1e-12)
        assert operators_run(opt, (each,))
    for each in (batch(9, masked=False), batch(9, scale=-1.0), batch(9)):
        for _ in range(2):
            assert compare(block, opt, (each,)).within(1e-12)
    assert operators_run(opt, (batch(9),))


@pytest.mark.parametrize(
    "other", [lambda x, m: [x, m], lambda x, m: (x,), lambda x, m: (x, m, m), lambda x, m: x[None]]
)
def test_another_form_is_another_kind(other: Callable[..., Any]) -> None:
    x = torch.randn(9, D, dtype=torch.float64)
    mask = (x[:, 0] > 0).double()

    def parts(batch: Any) -> tuple[Any, Any, Any]:
        return batch[0], batch[1] if len(batch) > 1 else None, float(isinstance(batch, list)) + len(batch)

    block = Given(parts).double()
    opt = hexa_fx.optimize(copy.deepcopy(block), ((x, mask),), CONFIG)
    for given in ((x, mask), other(x, mask), (x, mask), other(x, mask)):
        torch.testing.assert_close(opt(given)[0], block(given)[0])


def test_one_that_is_changed_is_left() -> None:
    def parts(batch: Any) -> tuple[Any, Any, Any]:
        batch["seen"] = True
        return batch["x"], None, 1.0

    report = hexa_fx.explain(Given(parts).double(), ({"x": torch.randn(9, D, dtype=torch.float64)},))
    assert "the code changes the argument 'batch' in place" in report.blocks[0].reason


def test_names_that_cannot_be_told_apart_are_refused() -> None:
    x = torch.randn(9, D, dtype=torch.float64)
    block = Given(lambda batch: (batch["a"][0], None, batch["a__0"])).double()
    report = hexa_fx.explain(block, ({"a": (x,), "a__0": torch.tensor(2.0)},))
    assert "have names that cannot be told apart" in report.blocks[0].reason


class Back(Given):
    def forward(self, batch: Any) -> Any:
        return super().forward(batch)[0], {"batch": batch}


class Kept(Given):
    def forward(self, batch: Any) -> Any:
        self.last = batch
        return super().forward(batch)


@pytest.mark.parametrize("made", [Back, Kept])
@pytest.mark.parametrize("form", [list, tuple])
def test_a_list_that_is_given_back_or_kept_is_that_list(made: type, form: type) -> None:
    """Whoever holds it may change it; nobody can change a tuple."""
    x = torch.randn(9, D, dtype=torch.float64)
    given = form([x, (x[:, 0] > 0).double()])
    report = hexa_fx.explain(made(lambda batch: (batch[0], batch[1], 1.0)).double(), (given,))
    assert ("gives back or keeps a list or dict that it was given" in report.blocks[0].reason) == (form is list)


CLASSES: set[type] = {OrderedDict, dict}
"""Classes in a set, which copies of a block have to know again."""

Pair = namedtuple("Pair", ["weights", "ids"])


AS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "tuple": lambda weights, ids: (weights, ids),
    "list": lambda weights, ids: [weights, ids],
    "named tuple": Pair,
    "dict": lambda weights, ids: {"weights": weights, "ids": ids},
    "ordered dict": lambda weights, ids: OrderedDict(weights=weights, ids=ids),
}


class Router(nn.Module):
    """Counts its calls; ``decides``: on its tokens, in a way that hardly ever matters."""

    def __init__(self, kind: str, decides: bool) -> None:
        super().__init__()
        self.kind, self.decides, self.calls, self.also = kind, decides, 0, False
        self.gate = nn.Linear(D, E)

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        weights, ids = self.gate(x).softmax(-1).topk(K, -1)
        if self.decides and (x[:1, :3] == 7.25).sum().item() == 3:
            weights = 2 * weights
        result = AS[self.kind](weights, ids)
        if not self.also:
            return result
        return {**result, "loss": weights.sum()} if isinstance(result, dict) else (*result, weights.sum())


class Routes(Mixture):
    def __init__(self, kind: str, decides: bool = False) -> None:
        super().__init__()
        self.router = Router(kind, decides)  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.router(x)
        if isinstance(result, (tuple, list)):
            weights, ids, *more = result
        elif type(result) in CLASSES:
            weights, ids, more = result["weights"], result["ids"], [result[key] for key in result if key == "loss"]
        out = self.chosen(x, weights, ids)
        return out + more[0] if more else out


def _x(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, D, dtype=torch.float64, generator=torch.Generator().manual_seed(tokens))


def _optimized(*how: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    block = Routes(*how).double()
    optimized = hexa_fx.optimize(block, _x(9))
    return block, copy.deepcopy(optimized)  # of which the router counts for itself


@pytest.mark.parametrize("kind", AS)
def test_whatever_a_router_gives_its_results_in(kind: str) -> None:
    block, optimized = _optimized(kind)
    assert optimized.report.rewritten, str(optimized.report)
    before = optimized.router.calls
    for again in (optimized, pickle.loads(pickle.dumps(optimized))):
        again(_x(7))  # which is analysed, if it was loaded
        assert operators_run(again, (_x(7),))
        found = compare(block, again, (_x(7),), train=True)
        assert found.within(1e-10), found
    assert optimized.router.calls > before


@pytest.mark.parametrize("kind", ["tuple", "list", "dict"])
def test_a_router_that_gives_more_than_it_did(kind: str) -> None:
    block, optimized = _optimized(kind)
    for also in (False, True):
        block.router.also = optimized.router.also = also
        calls = optimized.router.calls
        torch.testing.assert_close(optimized(_x(7)), block(_x(7)))
        assert optimized.router.calls == calls + 1
