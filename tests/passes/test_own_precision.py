"""In 16 bits a cast that the rewrite loses changes the dtype of the result; where all is float64 it cannot be seen."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hexa_fx
from hexa_fx.isolation.outcome import Outcome
from hexa_fx.passes.rewrite.region import RegionEmitter
from hexa_fx.passes.verify.comparison import lost_precision

D, EXPERTS = 12, 5


class NormedExpert(nn.Module):
    """Ends in float32 whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 16), nn.Linear(16, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(F.silu(self.up(x))).float()
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)


class Mixture(nn.Module):
    """Weights are float32 too; only the sum is in the tokens' dtype, or in float32 if `wide`."""

    def __init__(self, wide: bool = False, residual: bool = False) -> None:
        super().__init__()
        self.router = nn.Linear(D, EXPERTS)
        self.experts = nn.ModuleList(NormedExpert() for _ in range(EXPERTS))
        self.wide, self.residual = wide, residual

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).float().softmax(-1).topk(2, -1)
        out = x.clone() if self.residual else torch.zeros_like(x)
        out = out.float() if self.wide else out
        for number, expert in enumerate(self.experts):
            token, slot = (ids == number).nonzero(as_tuple=True)
            out.index_add_(0, token, (expert(x[token]) * weights[token, slot, None]).to(out.dtype))
        return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_the_result_has_the_dtype_of_the_original(dtype: torch.dtype, wide: bool, residual: bool) -> None:
    block, x = Mixture(wide, residual).to(dtype), torch.randn(9, D, dtype=dtype)
    optimized = hexa_fx.optimize(block, (x,))
    assert [found.status for found in optimized.report.blocks] == ["rewritten"]
    expected, y = block(x), optimized(x)
    assert y.dtype == expected.dtype == (torch.float32 if wide else dtype)
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)


class InPlace(Mixture):
    """Adds to what a cast gave: a copy in 16 bits (and, of float64, in float32), where the tokens stay as they are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).float().softmax(-1).topk(2, -1)
        out = x.to(torch.float32) if self.wide else x.float()
        for number, expert in enumerate(self.experts):
            token, slot = (ids == number).nonzero(as_tuple=True)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out.to(x.dtype) + x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("wide", [False, True])
def test_writes_to_a_copy_that_a_cast_made(dtype: torch.dtype, wide: bool) -> None:
    block, x = InPlace(wide).to(dtype), torch.randn(9, D, dtype=dtype)
    optimized = hexa_fx.optimize(block, (x,))
    assert [found.status for found in optimized.report.blocks] == ["rewritten"]
    torch.testing.assert_close(optimized(x), block(x), rtol=2e-2, atol=2e-2)


def test_writes_to_the_tokens_themselves_are_left_alone() -> None:
    """In float32 the cast gives the tokens, which the experts then change one after the other."""
    block, x = InPlace(), torch.randn(9, D)
    optimized = hexa_fx.optimize(block, (x.clone(),))
    (found,) = optimized.report.blocks
    assert found.status == "refused"
    assert "added to the tensor that the tokens are read from" in found.reason
    torch.testing.assert_close(optimized(x.clone()), block(x.clone()))


def test_a_lost_cast_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RegionEmitter, "_dtype", lambda emitter: torch.bfloat16)
    torch.manual_seed(0)
    block, x = Mixture().to(torch.bfloat16), torch.randn(9, D, dtype=torch.bfloat16)
    (found,) = hexa_fx.optimize(block, (x,)).report.blocks
    assert found.status == "refused"
    assert (
        "the example in its own precision: output 0: torch.float32 (9, 12), not torch.bfloat16 (9, 12)" in found.reason
    )


class Rounded(Mixture):
    """Rounds its tokens on the way, as code that emulates a smaller format does."""

    def __init__(self, to: torch.dtype, inside: bool) -> None:
        super().__init__()
        self.to_, self.inside = to, inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2, -1)
        tokens, out = x if self.inside else x.to(self.to_).to(x.dtype), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = (ids == number).nonzero(as_tuple=True)
            rows = tokens[token]
            rows = rows.to(self.to_).to(x.dtype) if self.inside else rows
            out.index_add_(0, token, expert(rows) * weights[token, slot, None])
        return out


@pytest.mark.parametrize(
    ("to", "inside"),
    [(torch.float8_e4m3fn, False), (torch.float8_e4m3fn, True), (torch.float16, False), (torch.bfloat16, True)],
)
def test_numbers_that_are_rounded_on_the_way(to: torch.dtype, inside: bool) -> None:
    """In float64 a cast to 16 bits and back cannot be seen; one to 8 bits is kept."""
    block, x = Rounded(to, inside), torch.randn(9, D)
    optimized = hexa_fx.optimize(block, x)
    torch.testing.assert_close(optimized(x), block(x))
    assert bool(optimized.report.rewritten) == (to == torch.float8_e4m3fn)
    assert ("rounds to fewer bits" in str(optimized.report)) == (to != torch.float8_e4m3fn)


class Cancelling(nn.Module):
    """Experts in pairs that nearly cancel, multiplied one token at a time, not one expert at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.up, self.down = nn.Linear(D, 2), *(nn.Parameter(torch.randn(4, D, D)) for _ in range(2))
        with torch.no_grad():
            for weight, sign in ((self.up, 1), (self.down, -1)):
                weight[1::2] = sign * weight[::2] * (1 + 1e-4 * torch.randn(2, D, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = 2 * self.router(x).argmax(-1, keepdim=True)
        ids = torch.cat((ids, ids + 1), -1)
        inner = torch.einsum("td,tkdi->tki", x, self.up[ids]).relu()
        return torch.einsum("tki,tkid,tk->td", inner, self.down[ids], torch.full_like(ids, 1, dtype=x.dtype))


def test_numbers_that_cancel_are_not_taken_for_rounded() -> None:
    block, x = Cancelling(), torch.randn(9, D)
    optimized = hexa_fx.optimize(block, x)
    assert (optimized(x) - block(x)).abs().max() > 2e-5 * block(x).abs().max()
    assert optimized.report.rewritten, optimized.report


@pytest.mark.parametrize(("dtype", "said"), [(torch.float32, True), (torch.bfloat16, False)])
def test_results_are_judged_by_their_distance_from_exact_ones(dtype: torch.dtype, said: bool) -> None:
    """One that is off by far more than the other has rounded; without exact results nothing is said."""

    def lost(one: float, two: float, has_exact: bool = True) -> str:
        exact, first, second = (Outcome({"y": torch.full((3,), 1 + by).double()}, {}, {}) for by in (0.0, one, two))
        first, second = (replace(o, values={"y": o.values["y"].to(dtype)}) for o in (first, second))
        return lost_precision(first, second, lambda: exact if has_exact else None, [torch.zeros(1, dtype=dtype)])

    assert bool(lost(2**-9, 0.0)) == bool(lost(0.0, 2**-9)) == said
    assert not lost(2**-9, -(2**-9))
    assert not lost(1e-6, 0.0)
    assert not lost(2**-9, 0.0, has_exact=False)


class OtherDtype(nn.Module):
    """Experts of another dtype than their tokens.

    Args:
        cast: what is cast in each call: ``tokens``, or ``weights`` as their tokens are; ``apart`` is tokens for the first product,
            weights for the second.
    """

    def __init__(self, cast: str, tokens: torch.dtype, experts: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.cast = nn.Linear(D, EXPERTS, dtype=tokens), cast
        self.up = nn.Parameter(torch.randn(EXPERTS, 16, D).div(4).to(experts))
        self.down = nn.Parameter(torch.randn(EXPERTS, D, 16).div(4).to(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        up = self.up.type_as(x) if self.cast == "weights" else self.up
        for number in range(EXPERTS):
            token, slot = (ids == number).nonzero(as_tuple=True)
            inner = F.silu(F.linear(x[token].to(up.dtype), up[number]))
            inner = inner.to(x.dtype) if self.cast == "apart" else inner
            rows = F.linear(inner, self.down[number].type_as(inner))
            out.index_add_(0, token, rows.to(x.dtype) * weights[token, slot, None])
        return out


FEW, MANY = 3e-2, 1e-5


@pytest.mark.parametrize(
    ("cast", "tokens", "experts", "precision"),
    [
        ("tokens", torch.float32, torch.bfloat16, FEW),
        ("tokens", torch.float32, torch.float16, FEW),
        ("tokens", torch.bfloat16, torch.float32, FEW),
        ("weights", torch.bfloat16, torch.float32, FEW),
        ("weights", torch.float32, torch.bfloat16, MANY),
        ("weights", torch.float32, torch.float32, MANY),
    ],
)
def test_casts_for_products(cast: str, tokens: torch.dtype, experts: torch.dtype, precision: float) -> None:
    """They multiply in the dtype that the code has them in."""
    block, x = OtherDtype(cast, tokens, experts), torch.randn(40, D, dtype=tokens)
    optimized = hexa_fx.optimize(block, x)
    assert [found.status for found in optimized.report.blocks] == ["rewritten"]
    results = []
    for each in (block, optimized):
        given = x.clone().requires_grad_()
        y = each(given)
        results.append((y, *torch.autograd.grad(y.square().sum(), (given, *each.parameters()))))
    for expected, found in zip(*results):
        assert found.dtype == expected.dtype
        scale = expected.abs().max().item()
        torch.testing.assert_close(found, expected, rtol=0.0, atol=max(precision, 1e-2 * (found.itemsize < 4)) * scale)
    block.float(), optimized.float()  # a call of another kind
    torch.testing.assert_close(optimized(x.float()), block(x.float()))
    assert not optimized.report.blocks[0].forward.own


def test_products_of_several_dtypes_are_left_alone() -> None:
    block, x = OtherDtype("apart", torch.float32, torch.bfloat16), torch.randn(40, D)
    (found,) = hexa_fx.optimize(block, x).report.blocks
    assert found.status == "refused"
    assert "casts between the dtypes of its tensors in a way that is not followed" in found.reason
    assert found.advice.startswith("Hold the experts' parameters in the dtype")


class Biased(OtherDtype):
    """Casts weights of a dtype each for its tokens, and adds biases that it casts, or leaves as they are if they are ``wide``."""

    def __init__(self, tokens: torch.dtype, up: torch.dtype, down: torch.dtype, bias: torch.dtype, wide: bool) -> None:
        super().__init__("weights", tokens, up)
        self.down, self.wide = nn.Parameter(self.down.detach().to(down)), wide
        self.bias = nn.Parameter(torch.randn(EXPERTS, 16).to(bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for number in range(EXPERTS):
            token, slot = (ids == number).nonzero(as_tuple=True)
            bias = self.bias[number] if self.wide else self.bias[number].to(x.dtype)
            inner = (F.linear(x[token], self.up[number].to(x.dtype)) + bias).relu()
            rows = F.linear(inner.to(x.dtype), self.down[number].type_as(x))
            out.index_add_(0, token, rows * weights[token, slot, None])
        return out


LONG, SHORT = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("tokens", "up", "down", "bias", "wide", "status"),
    [
        (LONG, LONG, SHORT, SHORT, False, "rewritten"),
        (LONG, SHORT, LONG, SHORT, True, "rewritten"),
        (SHORT, LONG, SHORT, LONG, False, "rewritten"),
        (SHORT, SHORT, SHORT, LONG, True, "refused"),  # sums in float32, of products in bf16
    ],
)
def test_each_parameter_has_a_dtype_of_its_own(
    tokens: torch.dtype, up: torch.dtype, down: torch.dtype, bias: torch.dtype, wide: bool, status: str
) -> None:
    block, x = Biased(tokens, up, down, bias, wide), torch.randn(40, D, dtype=tokens)
    optimized = hexa_fx.optimize(block, x)
    assert [found.status for found in optimized.report.blocks] == [status]
    assert ("the code casts between the dtypes" in optimized.report.blocks[0].reason) == (status == "refused")
    limit = MANY if tokens == LONG else FEW
    torch.testing.assert_close(optimized(x), block(x), rtol=limit, atol=limit)


class CastingExpert(NormedExpert):
    """Takes its tokens in its own dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.up(x.to(self.up.weight.dtype)))).to(x.dtype)


def test_experts_of_several_dtypes_are_left_alone() -> None:
    """They are not said to be rewritten, to run their own code in every call."""
    block = Mixture()
    block.experts = nn.ModuleList(CastingExpert().to((torch.float32, torch.bfloat16)[n % 2]) for n in range(EXPERTS))
    (found,) = hexa_fx.optimize(block, torch.randn(9, D)).report.blocks
    assert found.status == "refused"
    assert "have different dtypes" in found.reason
