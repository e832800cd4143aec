"""The operators of rewritten graphs, called past torch's dispatcher where nothing else needs to see them.

The dispatcher takes as long to reach a Python kernel as a small layer takes to run. Under a compiler, a mode or autocast, with a
tensor subclass or on another device, these functions call the operators themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from hexa_fx.ops import library, moe_ffn_autograd, sources
from hexa_fx.ops import moe_ffn_fp8 as moe_ffn_fp8_layer
from hexa_fx.ops.fixed_order import fixed_order
from hexa_fx.ops.listed import Listed
from hexa_fx.ops.products import esmm_cpu
from hexa_fx.ops.reindex import combine_cpu, reindex_cpu
from hexa_fx.ops.table import Combine, Esmm, Reindex
from hexa_fx.ops.table_fp8 import MoeFfnFp8Forward
from hexa_fx.ops.table_layers import MoeFfn
from hexa_fx.torch_private import _AutoDispatchBelowAutograd

_OPS = torch.ops.hexa
_LAYERS = moe_ffn_autograd.LAYERS


def _layer(name: str, args: tuple[Any, ...]) -> Any:
    if library.is_eager(args, cuda=True):
        return moe_ffn_autograd.plain(_LAYERS[name], args)
    if any(map(sources.is_source, args)):
        if sources.has_scaled_rows(args):
            with fixed_order() if name == "moe_ffn_fixed" else nullcontext():
                return sources.moe_ffn(*args)
        name, args = name.replace("moe_ffn", "moe_ffn_sources"), tuple(sources.operands(args))
        if library.is_eager(args, cuda=True):
            return moe_ffn_autograd.plain(_LAYERS[name], args)
    return sources.layer(name, *args) if Listed in map(type, args) else library.overload(name)(*args)


def moe_ffn(*args: Any) -> Any:
    """``hexa::moe_ffn``."""
    return _layer("moe_ffn", args)


def moe_ffn_fixed(*args: Any) -> Any:
    """``hexa::moe_ffn_fixed``."""
    return _layer("moe_ffn_fixed", args)


def moe_ffn_fp8(*args: Any) -> Any:
    """``hexa::moe_ffn_fp8``."""
    if library.is_eager(args, cuda=True):
        return moe_ffn_fp8_layer.plain(*args)
    if any(map(sources.is_source, args)):
        o = MoeFfnFp8Forward._make(args)
        found = moe_ffn_fp8_layer.from_sources(o)
        if found is None:
            return moe_ffn(*o.to(MoeFfn))
        if library.is_eager((*found,), cuda=True):
            return moe_ffn_fp8_layer.on_packed(found)
        return _OPS.moe_ffn_fp8.default(*found)
    return sources.run("moe_ffn_fp8", moe_ffn_fp8_layer.plain, *args)


def reindex(*args: Any) -> Any:
    """``hexa::reindex``."""
    if not library.is_eager(args):
        return _OPS.reindex.default(*args)
    Reindex._make(args).check("reindex")
    return reindex_cpu(*args)


def esmm(*args: Any) -> Any:
    """``hexa::esmm``."""
    if not library.is_eager(args):
        return sources.esmm(*args)
    Esmm._make(args).check("esmm")
    return _Esmm.apply(*args)


def combine(*args: Any) -> Any:
    """``hexa::combine``."""
    if not library.is_eager(args):
        return _OPS.combine.default(*args)
    Combine._make(args).check("combine")
    return _Combine.apply(*args)


def _differentiable(name: str, run: Callable[[Any], Tensor]) -> type[library.DirectFunction]:
    """An operator by its kernel. Its gradients on plain tensors are made of kernels too."""
    formula = library.FORMULAS[name]

    class Direct(library.DirectFunction):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Tensor:
            formula.keep(ctx, args)
            with _AutoDispatchBelowAutograd():
                return run(formula.record._make(args))

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            kept = formula.kept(ctx)  # a checkpoint computes them again, with autograd
            with _AutoDispatchBelowAutograd() if library.is_plain_tensor(grads[0]) else nullcontext():
                return formula.record.by_argument(**formula.gradients(*kept, *grads))  # type: ignore[no-any-return]

    return Direct


_Esmm = _differentiable("esmm", esmm_cpu)
_Combine = _differentiable("combine", lambda o: combine_cpu(*o))

DIRECT: dict[Any, Callable[..., Any]] = {
    _OPS.moe_ffn.default: moe_ffn,
    _OPS.moe_ffn_fixed.default: moe_ffn_fixed,
    _OPS.moe_ffn_fp8.default: moe_ffn_fp8,
    _OPS.reindex.default: reindex,
    _OPS.esmm.default: esmm,
    _OPS.combine.default: combine,
}
"""The function that stands for an operator."""

TAKE_LISTS = frozenset({_OPS.moe_ffn.default, _OPS.moe_ffn_fixed.default, _OPS.moe_ffn_fp8.default, _OPS.esmm.default})
"""Those whose weights and biases may be listed."""
