"""Counts and ends of sorted rows that are made up fit the rows that are made up with them."""

import pytest
import torch
from torch import nn

import hexa_fx
from hexa_fx.passes.inputs.fresh_inputs import FreshInputs
from hexa_fx.passes.inputs.routing_override import ROUTINGS

E = 4
COUNTS = torch.tensor([5, 0, 7, 4])


@pytest.mark.parametrize("given", [COUNTS, COUNTS.cumsum(0), nn.functional.pad(COUNTS.cumsum(0), (1, 0)).int()])
def test_counts_fit_the_rows(given: torch.Tensor) -> None:
    inputs = FreshInputs((torch.randn(16, 6), given), {}, E)
    for routing in (None, *ROUTINGS):
        for rows in (16, 3):
            (x, made), _ = inputs.at(1, rows, torch.float64, routing)
            counts = made if given is COUNTS else made[-E:].diff(prepend=made.new_zeros(1))
            assert made.dtype == given.dtype
            assert int(counts.sum()) == len(x) == rows
            assert int(counts.min()) >= 0
    (x, made), _ = inputs.with_fresh_tokens((2, 5))
    assert int(made.sum() if given is COUNTS else made[-1]) == len(x) == 10


class Experts(nn.Module):
    """Casts for `torch._grouped_mm`, around weights of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(E, 16, 24) / 4), nn.Parameter(torch.randn(E, 24, 16) / 4)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ends = counts.cumsum(0, dtype=torch.int32)
        inside = torch._grouped_mm(rows.bfloat16(), self.up.bfloat16(), offs=ends).relu()
        return torch._grouped_mm(inside, self.down.bfloat16(), offs=ends).type_as(rows)


class BySorting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(16, E, bias=False), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(2, -1)
        order = ids.view(-1).argsort(stable=True)
        rows = self.experts(x[order // 2], torch.bincount(ids.view(-1), minlength=E))
        return torch.zeros_like(x).index_add(0, order // 2, rows * weights.view(-1)[order][:, None])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_of_their_own_get_counts_of_their_rows(dtype: torch.dtype) -> None:
    block, x = BySorting().to(dtype), torch.randn(24, 16).to(dtype)
    optimized = hexa_fx.optimize(block, x)
    assert optimized.report.rewritten, optimized.report
    torch.testing.assert_close(optimized(x), block(x), rtol=2e-2, atol=2e-2)


def test_inputs_lie_in_memory_and_want_gradients_as_the_example_does() -> None:
    """Code that views a transposed input, as CLIP's blocks do, runs on no other."""
    example = torch.randn(6, 5, 8).transpose(0, 1).requires_grad_()
    inputs = FreshInputs((example,), {}, None)
    found = inputs.example(torch.float64), inputs.at(3, 4, torch.float64), inputs.with_fresh_tokens((3, 4))
    for made in found:
        assert made is not None
        ((x,), _) = made
        assert x.transpose(0, 1).is_contiguous()
        assert x.requires_grad
