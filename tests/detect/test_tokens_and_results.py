"""What code does to tokens before experts get them, how it adds up what they give, and in what it returns that."""

import copy
import dataclasses
import types
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

import hexa_fx
from tests.detect.test_what_strangers_write import Mixture
from tests.zoo.agree import rewritten
from tests.zoo.compare import operators_run
from tests.zoo.variant import D, E, K


def _tokens(count: int) -> torch.Tensor:
    return torch.randn(count, D, dtype=torch.float64)


class Padded(Mixture):
    """Tokens up to a multiple of sixteen."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.pad(x, (0, 0, 0, -len(x) % 16)))[: len(x)]


class InSegments(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.gate(x)
        order = index.flatten().argsort(stable=True)
        parts = x[order // K].split(torch.bincount(index.flatten(), minlength=E).tolist())
        given = torch.cat([expert(part) for expert, part in zip(self.experts, parts)])
        sorted_back = (given * weights.flatten()[order, None])[order.argsort()]
        return torch.segment_reduce(sorted_back, "sum", lengths=torch.full((len(x),), K))


@pytest.mark.parametrize("kind", [Padded, InSegments])
def test_rewritten_and_equal(kind: type[nn.Module]) -> None:
    rewritten(kind().double(), _tokens(13), _tokens(13), _tokens(16), _tokens(1))


class InNamespaces(Mixture):
    def forward(self, x: torch.Tensor) -> Any:
        out, logits = super().forward(x), types.SimpleNamespace(gate=self.gate(x)[0], tokens=x.shape[0])
        return types.SimpleNamespace(out=out, inner=[logits])


def test_results_in_namespaces() -> None:
    block, x = InNamespaces().double(), _tokens(9)
    optimized = hexa_fx.optimize(block, x)
    assert operators_run(optimized, (x,)), optimized.report
    one, two = block(x[:5]), optimized(x[:5])
    assert (type(two), two.inner[0].tokens) == (types.SimpleNamespace, 5)
    for given, expected in ((two.out, one.out), (two.inner[0].gate, one.inner[0].gate)):
        torch.testing.assert_close(given, expected)
        parameters = block.gate.weight.weight, optimized.gate.weight.weight
        gradients = [torch.autograd.grad(y.square().sum(), p) for y, p in zip((expected, given), parameters)]
        torch.testing.assert_close(*gradients)


@dataclasses.dataclass
class Output:
    out: torch.Tensor
    loss: torch.Tensor
    doubled: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.loss, self.doubled = self.loss + 1, 2 * self.loss


class MappedOutput(OrderedDict):  # type: ignore[type-arg]
    """As transformers' ModelOutput."""


class InTuple(tuple):  # type: ignore[type-arg]
    """A tuple of a class of its own."""


@dataclasses.dataclass(frozen=True)
class Frozen:
    out: torch.Tensor
    loss: torch.Tensor


@pytest.mark.parametrize("kind", [Output, MappedOutput, Frozen, types.SimpleNamespace], ids=lambda kind: kind.__name__)
def test_what_is_set_on_a_result_beside_what_its_class_declares(kind: Any) -> None:
    class InThis(Mixture):
        def forward(self, x: torch.Tensor) -> Any:
            weights, ids = self.gate(x)
            out = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                token, slot = torch.where(ids == number)
                out.index_add_(0, token, (expert(x[token]) * weights[token, slot, None]).to(out.dtype))
            result = kind(out=out, loss=weights.sum())
            object.__setattr__(result, "tokens", len(x))
            object.__setattr__(result, "weights", weights)
            return InTuple([result, x.shape])

    torch.manual_seed(0)
    block, x = InThis(), _tokens(9).float()
    optimized = hexa_fx.optimize(block, x)
    for cast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            assert operators_run(optimized, (x,)), optimized.report
            found, expected = optimized(x[:5]), block(x[:5])
        (one, _), (two, size) = expected, found
        assert (type(found), size, type(size)) == (InTuple, (5, D), torch.Size)
        assert (type(two), two.tokens, vars(two).keys()) == (kind, 5, vars(one).keys())
        close = {"atol": 2e-2, "rtol": 2e-2} if cast else {}
        torch.testing.assert_close({**vars(two)}, {**vars(one)}, **close)
    copied = copy.deepcopy(optimized)
    copied(x)
    assert (copied.forward.ran, len(copied.forward.specialisations)) == (
        1,
        2,
    )  # of a class without a name of its own, too


class Object:
    def __init__(self, out: torch.Tensor) -> None:
        self.out = out


class InAnObject(Mixture):
    def forward(self, x: torch.Tensor) -> Any:
        return Object(super().forward(x))


class BesideAnObject(Mixture):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), Object(x)


@pytest.mark.parametrize("kind", [InAnObject, BesideAnObject])
def test_a_result_in_an_object_is_refused(kind: type[nn.Module]) -> None:
    (report,) = hexa_fx.explain(kind().double(), _tokens(9)).blocks
    assert "the block returns a Object, and what such an object holds is not followed" in report.reason


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
