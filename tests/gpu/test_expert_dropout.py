"""Dropout inside experts draws the original's random numbers on a GPU, too."""

import pytest
import torch

import hexa_fx
from tests.passes.test_expert_dropout import ROUGH, D, Mixture, outcome

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_seeds_give_equal_numbers(dtype: torch.dtype) -> None:
    block, x = Mixture("by slot").to("cuda", dtype), torch.randn(70, D, device="cuda", dtype=dtype)
    optimized = hexa_fx.optimize(block, x, ROUGH)
    rtol = 1e-3 if dtype == torch.float32 else 5e-2
    found, expected = outcome(optimized.train(), x), outcome(block.train(), x)
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=rtol, atol=rtol * float(two.abs().max()))
