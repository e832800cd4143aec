"""The cases of tests/ops/test_fixed_order.py on a device: a token's bits in any batch, at sizes that take several tiles."""

import pytest
import torch

from hexa_fx.ir import FfnSpec
from hexa_fx.ops import direct
from tests.ops import test_fixed_order as cases

SIZES = [(48, 33, 150), (256, 192, 1500)]
"""Rows that kernels read element by element, and rows of whole vectors: model size, inner size, tokens."""


@pytest.mark.parametrize(("model", "inner", "tokens"), SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("spec", cases.SPECS, ids=str)
def test_bits_are_the_same_in_any_batch(spec: FfnSpec, dtype: torch.dtype, model: int, inner: int, tokens: int) -> None:
    layouts = (spec.layout1, spec.layout2)
    given = cases.operands(dtype, model, inner, tokens, spec.glu, layouts, device="cuda")
    cases.assert_same_bits(*given, spec)


@pytest.mark.parametrize("tokens", [150, 1500])
@pytest.mark.parametrize("spec", cases.SPECS[::3], ids=str)
@pytest.mark.parametrize(("format", "rank"), cases.SOURCES)
def test_packed_and_adapted_weights(format: str | None, rank: int, spec: FfnSpec, tokens: int) -> None:
    layouts = (spec.layout1, spec.layout2)
    given = cases.operands(torch.bfloat16, 256, 192, tokens, spec.glu, layouts, device="cuda")
    cases.assert_same_bits(*cases.with_sources(given, format, rank), spec, direct.moe_ffn_fixed)


@pytest.mark.parametrize("routing", cases.ROUTINGS)
def test_ugly_routings(routing: str) -> None:
    given = cases.route(routing, *cases.operands(torch.bfloat16, 256, 192, device="cuda"))
    found = cases.run(*given, cases.SPECS[0])
    expected = cases.run(*given, cases.SPECS[0], torch.ops.hexa.moe_ffn)
    assert (found - expected).float().norm() <= 1e-2 * expected.float().norm()


def test_a_nan_stays_with_its_token() -> None:
    cases.assert_nan_stays(*cases.operands(torch.bfloat16, 256, 192, device="cuda"))
