"""Registers the CUDA kernels of the ``hexa::`` operators, which `hexa_fx.ops` asks for through `hexa_fx.registry`.

That neither touches CUDA nor imports a compiler: the kernels' modules are imported when the first CUDA tensor arrives.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

from hexa_fx.cuda.modes import runs_torch_only

Load = Callable[[], ModuleType]


def rows() -> ModuleType:
    """The kernels that read and write rows."""
    from hexa_fx.cuda import rows

    return rows


def gemm() -> ModuleType:
    """The kernels of products."""
    from hexa_fx.cuda import gemm

    return gemm


def packed_layer() -> ModuleType:
    """A layer with packed weights."""
    from hexa_fx.cuda import packed_layer

    return packed_layer


def unpack() -> ModuleType:
    """Products with packed weights."""
    from hexa_fx.cuda import unpack

    return unpack


def layer() -> ModuleType:
    """The operators of a whole layer."""
    from hexa_fx.cuda import layer

    return layer


KERNELS: dict[str, Load] = {
    "reindex": rows,
    "combine": rows,
    "ess": rows,
    "activate": rows,
    "activate_backward": rows,
    "esmm": gemm,
    "esmm_packed": unpack,
    "esmm_act": gemm,
    "esmm_act_backward": gemm,
    "esmm_low_rank": gemm,
    "esmm_act_low_rank": gemm,
    "esmm_act_backward_low_rank": gemm,
    "estmm": gemm,
    "esfk": gemm,
    "estmm_add": gemm,
    "ess_add": rows,
    "esfk_add": gemm,
    "moe_ffn_sources": packed_layer,
}
"""By operator: what imports the module that holds its kernel under the operator's name."""


@cache
def register() -> None:
    """Registers this package's kernels as the CUDA implementation of their operators, once per process."""
    from hexa_fx.ops import library, moe_ffn_autograd  # hexa_fx.ops calls this function

    def by_torch(name: str) -> Callable[..., Any]:
        return lambda *args: library.kernel_for(name, "any")(*args)

    for name, load in KERNELS.items():
        library.register_kernel(name, "cuda", _lazy(name, load, by_torch(name)))
    for name in ("moe_ffn", "moe_ffn_forward", "moe_ffn_backward"):
        moe_ffn_autograd.register_on_cuda(name, _lazy(name, layer, lambda general, *args: general(*args)))


def _lazy(name: str, load: Load, by_torch: Callable[..., Any]) -> Callable[..., Any]:
    found: list[Callable[..., Any]] = []

    def kernel(*args: Any) -> Any:
        if runs_torch_only():
            return by_torch(*args)
        if not found:
            found.append(getattr(load(), name))
        return found[0](*args)

    kernel.__name__ = name
    return kernel
