"""Registers the CUDA kernels of the ``hexa::`` operators.

`register` touches no CUDA and imports no compiler: the kernels' modules come with the first CUDA tensor.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

from hexa_fx.ops import library
from hexa_fx.ops.activate import check as check_activate
from hexa_fx.ops.activate import check_backward as check_activate_backward
from hexa_fx.ops.combine import check as check_combine
from hexa_fx.ops.esfk import check as check_esfk
from hexa_fx.ops.esmm import check as check_esmm
from hexa_fx.ops.esmm_act import check as check_esmm_act
from hexa_fx.ops.esmm_act_backward import check as check_esmm_act_backward
from hexa_fx.ops.ess import check as check_ess
from hexa_fx.ops.estmm import check as check_estmm
from hexa_fx.ops.reindex import check as check_reindex

_ROWS, _GEMM = "hexa_fx.runtime.cuda_rows", "hexa_fx.runtime.cuda_gemm"

_KERNELS: dict[str, tuple[str, Callable[..., None]]] = {
    "reindex": (_ROWS, check_reindex),
    "combine": (_ROWS, check_combine),
    "ess": (_ROWS, check_ess),
    "activate": (_ROWS, check_activate),
    "activate_backward": (_ROWS, check_activate_backward),
    "esmm": (_GEMM, check_esmm),
    "esmm_act": (_GEMM, check_esmm_act),
    "esmm_act_backward": (_GEMM, check_esmm_act_backward),
    "estmm": (_GEMM, check_estmm),
    "esfk": (_GEMM, check_esfk),
}


@cache
def register() -> None:
    """Makes the kernels of this package the CUDA implementation of their operators, once a process."""
    for name, (module, check) in _KERNELS.items():
        library.register_kernel(name, "cuda", _lazy(name, module), check)


def _lazy(name: str, module: str) -> Callable[..., Any]:
    found: list[Callable[..., Any]] = []

    def kernel(*args: Any) -> Any:
        if not found:
            found.append(getattr(importlib.import_module(module), name))
        return found[0](*args)

    kernel.__name__ = name
    return kernel
