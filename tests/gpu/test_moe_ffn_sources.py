"""The cases of tests/ops/test_moe_ffn_sources.py on a device, in 16 bits; nothing is read back while they run."""

from __future__ import annotations

import pytest
import torch

from hexa_fx.ir import FfnSpec
from tests.ops import test_moe_ffn_sources as cases

SIZES = [cases.RAGGED, (64, 48, 16)]
"""Rows that kernels read element by element, and rows of whole vectors: model size, inner size, rank."""


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spec", cases.SPECS, ids=str)
@pytest.mark.parametrize("adapted", cases.ADAPTED_PROJECTIONS)
def test_result_and_all_gradients(spec: FfnSpec, adapted: str, dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    cases.compare(cases.layer(spec, adapted, dtype=dtype, tokens=200, device="cuda", sizes=sizes), spec)


@pytest.mark.parametrize("spec", cases.SPECS, ids=str)
@pytest.mark.parametrize("frozen", cases.FROZEN, ids=str)
def test_gradients_with_frozen_bases(spec: FfnSpec, frozen: tuple[str, ...]) -> None:
    cases.compare(cases.layer(spec, dtype=torch.bfloat16, tokens=200, device="cuda", sizes=SIZES[1]), spec, frozen)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("routing", cases.ROUTINGS)
def test_ugly_routings(routing: str, sizes: tuple[int, int, int]) -> None:
    spec = cases.SPECS[0]
    given = cases.layer(spec, dtype=torch.bfloat16, device="cuda", sizes=sizes)
    cases.compare(cases.route(given, routing), spec)


def test_no_host_synchronisation() -> None:
    spec = cases.SPECS[0]
    given = cases.layer(spec, dtype=torch.bfloat16, tokens=200, device="cuda", sizes=SIZES[1])
    leaves = [
        given[name].requires_grad_() for name in ("x", "top_k_weights", *cases.FACTORS) if given[name] is not None
    ]

    def step() -> None:
        torch.autograd.grad(cases.run(given, spec).sum(), leaves)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
