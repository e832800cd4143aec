"""What code does to tokens before experts get them, how it adds up what they give, and in what it returns that."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import hexa_fx
from tests.detect.test_what_strangers_write import Mixture
from tests.zoo.agree import rewritten
from tests.zoo.variant import D, E, K


def _tokens(count: int) -> torch.Tensor:
    return torch.randn(count, D, dtype=torch.float64)


class InSegments(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.gate(x)
        order = index.flatten().argsort(stable=True)
        parts = x[order // K].split(torch.bincount(index.flatten(), minlength=E).tolist())
        given = torch.cat([expert(part) for expert, part in zip(self.experts, parts)])
        sorted_back = (given * weights.flatten()[order, None])[order.argsort()]
        return torch.segment_reduce(sorted_back, "sum", lengths=torch.full((len(x),), K))


def test_rewritten_and_equal() -> None:
    rewritten(InSegments().double(), _tokens(13), _tokens(13), _tokens(16), _tokens(1))


class Object:
    def __init__(self, out: torch.Tensor) -> None:
        self.out = out


class InAnObject(Mixture):
    def forward(self, x: torch.Tensor) -> Any:
        return Object(super().forward(x))


class BesideAnObject(Mixture):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), Object(x)


@dataclasses.dataclass
class Output:
    out: torch.Tensor


class InMore(Mixture):
    """Sets more on a result than its class declares."""

    def forward(self, x: torch.Tensor) -> Any:
        result = Output(super().forward(x))
        result.tokens = len(x)  # type: ignore[attr-defined]
        return result


class InTuple(tuple):  # type: ignore[type-arg]
    """A tuple of a class of its own."""


class InOwnTuple(Mixture):
    def forward(self, x: torch.Tensor) -> Any:
        return InTuple([super().forward(x)])


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (InAnObject, "Object, and what"),
        (BesideAnObject, "Object, and what"),
        (InMore, "Output, and what"),
        (InOwnTuple, "InTuple, a list or tuple of a class"),
    ],
)
def test_a_result_in_an_object_is_refused(kind: type[nn.Module], what: str) -> None:
    (report,) = hexa_fx.explain(kind().double(), _tokens(9)).blocks
    assert f"the block returns a {what}" in report.reason


class InRows(Mixture):
    """Cuts whatever it is given into rows of D numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.reshape(-1, D)).view(x.shape)


def test_inputs_whose_rows_hold_several_tokens() -> None:
    block = InRows().double()
    optimized = hexa_fx.optimize(block, torch.randn(2, 7, D, dtype=torch.float64))
    assert optimized.report.rewritten
    for width in (2 * D, D // 2):
        x = torch.randn(2, 4, width, dtype=torch.float64)
        torch.testing.assert_close(optimized(x), block(x))
