"""Registers the CUDA kernels of the ``hexa::`` operators. Importing `hexa_fx.ops` calls `register` by name.

That neither touches CUDA nor imports a compiler: the kernels' modules are imported when the first CUDA tensor arrives.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

_ROWS, _GEMM, _LAYER = "hexa_fx.cuda.rows", "hexa_fx.cuda.gemm", "hexa_fx.cuda.layer"

KERNELS: dict[str, tuple[str, str]] = {
    "reindex": (_ROWS, "hexa_fx.ops.reindex:check"),
    "combine": (_ROWS, "hexa_fx.ops.combine:check"),
    "ess": (_ROWS, "hexa_fx.ops.ess:check"),
    "activate": (_ROWS, "hexa_fx.ops.activate:check"),
    "activate_backward": (_ROWS, "hexa_fx.ops.activate:check_backward"),
    "esmm": (_GEMM, "hexa_fx.ops.esmm:check"),
    "esmm_act": (_GEMM, "hexa_fx.ops.esmm_act:check"),
    "esmm_act_backward": (_GEMM, "hexa_fx.ops.esmm_act_backward:check"),
    "estmm": (_GEMM, "hexa_fx.ops.estmm:check"),
    "esfk": (_GEMM, "hexa_fx.ops.esfk:check"),
    "estmm_add": (_GEMM, "hexa_fx.ops.adding:check_estmm"),
    "ess_add": (_ROWS, "hexa_fx.ops.adding:check_ess"),
    "esfk_add": (_GEMM, "hexa_fx.ops.adding:check_esfk"),
}
"""Operator -> the module that holds its kernel under the operator's name, and the check of its arguments."""


@cache
def register() -> None:
    """Registers this package's kernels as the CUDA implementation of their operators, once per process."""
    from hexa_fx.ops import library, moe_ffn_autograd  # hexa_fx.ops imports this module by name

    for name, (module, check) in KERNELS.items():
        library.register_kernel(name, "cuda", _lazy(name, module), _resolve(check))
    for name in ("moe_ffn", "moe_ffn_forward", "moe_ffn_backward"):
        moe_ffn_autograd.register_on_cuda(name, _lazy(name, _LAYER))


def _resolve(name: str) -> Callable[..., None]:
    module, function = name.split(":")
    found: Callable[..., None] = getattr(importlib.import_module(module), function)
    return found


def _lazy(name: str, module: str) -> Callable[..., Any]:
    found: list[Callable[..., Any]] = []

    def kernel(*args: Any) -> Any:
        if not found:
            found.append(getattr(importlib.import_module(module), name))
        return found[0](*args)

    kernel.__name__ = name
    return kernel
