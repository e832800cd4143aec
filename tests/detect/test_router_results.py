"""Routers that give dicts, and those that later give more than they did."""

import copy
import pickle
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hexa_fx
from tests.detect.mixture import D, E, K, Mixture
from tests.zoo.compare import compare, operators_run

KINDS: set[type] = {OrderedDict, dict}
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
        elif type(result) in KINDS:
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
