"""Limits on tokens that no run of verification reaches are refused."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import hexa_fx
from tests.detect.mixture import D, E, K, Mixture
from tests.zoo.compare import operators_run


class Cut(Mixture):
    """Experts have room for some tokens."""

    room = 20000

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = self.router(x).softmax(-1).topk(K)
        return weights, ids

    def kept(self, token: torch.Tensor) -> Any:
        return token[: self.room]

    def result(self, y: torch.Tensor, rows: int) -> torch.Tensor:
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.choose(x)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(ids == number)
            token, slot = self.kept(token), self.kept(slot)
            out.index_add_(0, token, self.result(expert(x[token]), len(token)) * weights[token, slot, None])
        return out


def cutting(**members: Any) -> type[Cut]:
    return type("Cutting", (Cut,), members)


def whole(self: nn.Module, token: torch.Tensor) -> torch.Tensor:
    return token


def set_to_zero(self: Cut, y: torch.Tensor, rows: int) -> torch.Tensor:
    y[self.room :] = 0
    return y


class AboveABuffer(Cut):
    room = 300

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("most", torch.tensor(300))

    def kept(self, token: torch.Tensor) -> Any:
        return token if len(token) <= self.most else token[:0]


class Bound(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clamp(-16384, 16384.0)


class Bounded(Cut):
    """What bounds numbers is no limit on tokens."""

    kept = whole

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, 8), Bound(), nn.Linear(8, D)) for _ in range(E))


class ByPlace(Cut):
    """No router can be made to choose otherwise."""

    room = 600

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.arange(len(x))[:, None] % E
        return torch.ones_like(ids, dtype=x.dtype), ids


class ByThreshold(ByPlace):
    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.bucketize(self.router(x)[:, :1].detach(), torch.tensor([-0.3, 0.0, 0.3]))
        return torch.ones_like(ids, dtype=x.dtype), ids


NOT_TRIED = {
    "cut": Cut,
    "left": cutting(
        kept=lambda self, token: token[: min(len(token), self.room)] if len(token) < 2 * self.room else token[:0]
    ),
    "first part": cutting(kept=lambda self, token: token.split(self.room)[0]),
    "scaled": cutting(kept=whole, result=lambda self, y, rows: y * (2e4 / max(rows, 2e4))),
    "by place": ByPlace,
    "by threshold": ByThreshold,
}


@pytest.mark.parametrize("block", NOT_TRIED.values(), ids=NOT_TRIED)
def test_limits_that_are_not_tried_are_refused(block: type[Cut]) -> None:
    (report,) = hexa_fx.explain(block().eval(), torch.randn(21, D)).blocks
    assert report.status == "refused"
    assert "the code cuts lists of tokens, or compares how many there are" in report.reason
    assert report.location is not None


TRIED = {
    "last ones": cutting(room=300, kept=lambda self, token: token[-self.room :]),
    "between places": cutting(room=300, kept=lambda self, token: token.tensor_split([self.room])[0]),
    "too many": cutting(
        room=300, kept=lambda self, token: token[left:] if (left := len(token) - self.room) > 0 else token
    ),
    "above a buffer": AboveABuffer,
    "above a float": cutting(room=300, kept=lambda self, token: token if len(token) <= 300.5 else token[:0]),
    "set to zero": cutting(room=300, kept=whole, result=set_to_zero),
}


@pytest.mark.parametrize("block", TRIED.values(), ids=TRIED)
def test_more_tokens_are_tried_than_they_say(block: type[Cut]) -> None:
    """They are so large that verification has no other reason to try as many."""
    model = block()
    wide = nn.ModuleList(nn.Sequential(nn.Linear(D, 2048), nn.GELU(), nn.Linear(2048, D)) for _ in range(E))
    model.experts = wide
    optimized = hexa_fx.optimize(copy.deepcopy(model), torch.randn(21, D))
    tokens = torch.randn(1, D).expand(2 * model.room + 5, D).contiguous()
    with torch.no_grad():
        torch.testing.assert_close(optimized(tokens), model(tokens))


def test_bounds_of_features_are_no_limits() -> None:
    optimized = hexa_fx.optimize(Bounded(), torch.randn(21, D))
    with torch.no_grad():
        assert operators_run(optimized, (torch.randn(17000, D),))


def test_limits_that_were_tried_are_none() -> None:
    model = Cut()
    model.room = 100
    optimized = hexa_fx.optimize(model, torch.randn(21, D))
    assert operators_run(optimized, (torch.randn(500, D),))
