"""The operators of rewritten graphs, called past torch's dispatcher where nothing else needs to see them.

The dispatcher takes as long to reach a Python kernel as a small layer takes to run. Under a compiler, a mode or autocast, with a
tensor subclass or on another device, these functions call the operators themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hexa_fx.ops import direct_rows, library, moe_ffn_autograd, row_scaled, sources
from hexa_fx.ops import moe_ffn_fp8 as moe_ffn_fp8_layer
from hexa_fx.ops.fixed_order import fixed_order

_OPS = torch.ops.hexa
_LAYERS = moe_ffn_autograd.LAYERS
_MOE_FFN = _LAYERS["moe_ffn"]


def moe_ffn(*args: Any) -> Any:
    """``hexa::moe_ffn``."""
    if library.is_eager(args, cuda=True):
        return moe_ffn_autograd.plain(_MOE_FFN, args)
    return _layer("moe_ffn", "moe_ffn_sources", args)


def _layer(name: str, with_sources: str, args: tuple[Any, ...]) -> Any:
    if any(map(sources.is_source, args)):
        if row_scaled.has_any(args):
            return row_scaled.moe_ffn(*args)
        name, args = with_sources, tuple(sources.operands(args))
        if library.is_eager(args, cuda=True):
            return moe_ffn_autograd.plain(_LAYERS[name], args)
    return library.overload(name)(*args)


def moe_ffn_fixed(*args: Any) -> Any:
    """``hexa::moe_ffn_fixed``."""
    if row_scaled.has_any(args):
        with fixed_order():
            return row_scaled.moe_ffn(*args)
    if library.is_eager(args, cuda=True):
        return moe_ffn_autograd.plain(_LAYERS["moe_ffn_fixed"], args)
    return _layer("moe_ffn_fixed", "moe_ffn_sources_fixed", args)


def moe_ffn_fp8(*args: Any) -> Any:
    """``hexa::moe_ffn_fp8``."""
    return (moe_ffn_fp8_layer.with_sources if any(map(sources.is_source, args)) else _OPS.moe_ffn_fp8.default)(*args)


def reindex(*args: Any) -> Any:
    """``hexa::reindex``."""
    return (direct_rows.reindex if library.is_eager(args) else _OPS.reindex.default)(*args)


def esmm(*args: Any) -> Any:
    """``hexa::esmm``."""
    return (direct_rows.esmm if library.is_eager(args) else sources.esmm)(*args)


def combine(*args: Any) -> Any:
    """``hexa::combine``."""
    return (direct_rows.combine if library.is_eager(args) else _OPS.combine.default)(*args)


DIRECT: dict[Any, Callable[..., Any]] = {
    _OPS.moe_ffn.default: moe_ffn,
    _OPS.moe_ffn_fixed.default: moe_ffn_fixed,
    _OPS.moe_ffn_fp8.default: moe_ffn_fp8,
    _OPS.reindex.default: reindex,
    _OPS.esmm.default: esmm,
    _OPS.combine.default: combine,
}
"""The function that stands for an operator."""
