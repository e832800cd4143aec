"""Registers the CUDA kernels of the ``hexa::`` operators, which `hexa_fx.ops` asks for through `hexa_fx.registry`.

That neither touches CUDA nor imports a compiler: the kernels' modules are imported when the first CUDA tensor arrives.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from hexa_fx.cuda.modes import runs_torch_only

_ROWS = ("reindex", "combine", "ess", "ess_add", "activate", "activate_backward", "scaled_transpose")
_PRODUCTS = (
    *("esmm", "esmm_act", "esmm_act_backward", "estmm", "estmm_add", "esfk", "esfk_add"),
    *("esmm_low_rank", "esmm_act_low_rank", "esmm_act_backward_low_rank"),
)
_LOW_RANK = ("low_rank_gradients",)
_FP8_ROWS = (
    "quantize_rows_fp8",
    "quantize_columns_fp8",
    "group_rows_fp8",
    "quantize_weight_fp8",
    "ess_fp8",
    "combine_fp8",
)
_FP8 = ("esmm_act_fp8", "esmm_fp8", "esmm_act_backward_fp8", "estmm_fp8")
_LAYERS = ("moe_ffn", "moe_ffn_forward", "moe_ffn_backward")
_SOURCES = ("moe_ffn_sources", "moe_ffn_sources_forward")
_PACKED = ("esmm_packed", "esmm_packed_low_rank", "esmm_act_packed", "esmm_act_backward_packed")
KERNELS = (*_ROWS, *_PRODUCTS, *_LOW_RANK, *_FP8_ROWS, *_FP8, *_PACKED, *_SOURCES)
"""The operators that have kernels, which run in the function of their name (`kernel`)."""


@cache
def kernel(name: str) -> Callable[..., Any]:
    """What runs ``hexa::<name>``. Imports it and all others."""
    from hexa_fx.cuda import fp8, fp8_rows, gemm, layer, low_rank, packed_rows, rows, sources_requests

    modules = {
        rows: _ROWS,
        gemm: _PRODUCTS,
        low_rank: _LOW_RANK,
        fp8: _FP8,
        fp8_rows: _FP8_ROWS,
        packed_rows: _PACKED,
        sources_requests: _SOURCES,
        layer: _LAYERS,
    }
    found: Callable[..., Any] = next(getattr(module, name) for module, names in modules.items() if name in names)
    return found


@cache
def register() -> None:
    """Registers this package's kernels as the CUDA implementation of their operators, once per process."""
    from hexa_fx.ops import library, moe_ffn_autograd, moe_ffn_fp8  # hexa_fx.ops calls this function

    def by_torch(name: str) -> Callable[..., Any]:
        return lambda *args: library.kernel_for(name, "any")(*args)

    for name in KERNELS:
        library.register_kernel(name, "cuda", _lazy(name, by_torch(name)))
    moe_ffn_fp8.why_not_on["cuda"] = _why_not_fp8
    for name in _LAYERS:
        moe_ffn_autograd.register_on_cuda(name, _lazy(name, lambda general, *args: general(*args)))


def _why_not_fp8(arguments: Any) -> str:
    from hexa_fx.cuda.fp8 import why_not

    return why_not(arguments)


def _lazy(name: str, by_torch: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return (by_torch if runs_torch_only() else kernel(name))(*args)

    run.__name__ = name
    return run
