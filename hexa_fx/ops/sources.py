"""Operators of rewritten graphs on weights that are no plain tensors: packed ones, ones with low-rank additions, and listed ones.

Listed ones are no tensors to torch's dispatcher, so their operators are called past it. Where something else has to see these
(a mode, a tracer, a tensor subclass), they get stacks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hexa_fx.errors import InputError
from hexa_fx.formats.adapted_weight import AdaptedWeight
from hexa_fx.formats.formed import Formed, PackedStack
from hexa_fx.formats.quantized_weight import QuantizedWeight
from hexa_fx.ops import library, main_grad, moe_ffn_autograd
from hexa_fx.ops.library import DirectFunction
from hexa_fx.ops.listed import Listed, dense, readable, tensors_of
from hexa_fx.ops.main_grad import ListedGradients
from hexa_fx.ops.products import esmm_cpu, esmm_gradients
from hexa_fx.ops.records import DENSE
from hexa_fx.ops.rows import accumulate_dtype, expert_rows, flip
from hexa_fx.ops.table import Esmm, EssAdd, EstmmAdd
from hexa_fx.ops.table_layers import MoeFfn, MoeFfnSources
from hexa_fx.ops.tiles import at_once
from hexa_fx.torch_private import (
    DisableTorchFunction,
    _AutoDispatchBelowAutograd,
    _get_current_function_mode_stack,
    _len_torch_function_stack,
    without_autocast,
)

_OPS = torch.ops.hexa

_PACKED, _SOURCES = (QuantizedWeight, PackedStack), (QuantizedWeight, Formed)
TAKE_SOURCES = ("moe_ffn", "moe_ffn_fixed", "moe_ffn_fp8")
"""Operators of rewritten graphs that take sources in place of weights."""


def takes_sources(target: Any) -> bool:
    """Whether a node's target is such an operator."""
    return any(target is getattr(_OPS, name).default for name in TAKE_SOURCES)


def is_source(weight: Any) -> bool:
    """Whether a weight is packed or has an addition."""
    return isinstance(weight, _SOURCES)


def operands(args: Sequence[Any]) -> MoeFfnSources:
    """Of `hexa::moe_ffn_sources`, from those of `hexa::moe_ffn` of which some weights are sources."""
    o = MoeFfn._make(args)
    layout1: str = o.layout1
    first, up, down = _source(o.w1, layout1), _source(o.w3, layout1), _source(o.w2, o.layout2)
    other = flip(layout1)
    if first.layout == other or (up.weight is not None and up.layout == other):
        layout1, first, up = other, first.read_as(other), up.read_as(other)
    given: dict[str, Any] = {"layout1": layout1, "layout2": down.layout}
    for number, each in {"1": first, "3": up, "2": down}.items():
        a, c = each.factors
        given |= {f"w{number}": each.weight, f"a{number}": a, f"c{number}": c, f"s{number}": each.scales}
    three = (first, up, down)
    return o.to(MoeFfnSources, **given, alphas=[each.scale for each in three], formats=[each.format for each in three])


class _Source(NamedTuple):
    """A weight as the operator takes it."""

    weight: Tensor | None
    scales: list[Tensor]
    format: str
    factors: tuple[Tensor | None, Tensor | None]
    scale: float
    layout: str

    def read_as(self, layout: str) -> _Source:
        """The same in another layout, in which only a dense weight can be read."""
        if self.layout == layout or self.weight is None:
            return self
        if self.format != DENSE:
            raise InputError("gate and up are packed along different dimensions; pack both alike")
        return self._replace(weight=self.weight.transpose(1, 2), layout=layout)


def _source(weight: Any, layout: str) -> _Source:
    base, scale = weight, 1.0
    factors: tuple[Tensor | None, Tensor | None] = (None, None)
    if isinstance(weight, AdaptedWeight):
        base, factors, scale = weight.weight, weight.factors(layout), weight.scale
    if not isinstance(base, _PACKED):
        return _Source(base, [], DENSE, factors, scale, layout)
    return _Source(
        base.packed, [*base.scales], base.format, factors, scale, flip(layout) if base.transposed else layout
    )


def esmm(x: Tensor, weight: Any, bias: Any, *rest: Any) -> Any:
    """`hexa::esmm` with a weight that is packed, listed or neither."""
    if type(weight) is Listed:
        return run("esmm", _esmm, x, weight, bias, *rest)
    if isinstance(weight, _PACKED):
        *rows, layout = rest
        layout = flip(layout) if weight.transposed else layout
        return _OPS.esmm_packed.default(x, weight.packed, weight.scales, weight.format, dense(bias), *rows, layout)
    return _OPS.esmm.default(x, weight, dense(bias), *rest)


def has_scaled_rows(weights: Sequence[Any]) -> bool:
    """Whether the rows of one of these weights are scaled."""
    adapted = [weight for weight in weights if type(weight) is AdaptedWeight]
    return any(weight.row_scale is not None for weight in adapted) if adapted else False


def moe_ffn(*args: Any) -> Tensor:
    """`hexa::moe_ffn` on weights whose rows are scaled, ``g * (W x)``: operator by operator, with the gradients of these."""
    o = MoeFfn._make(args)
    top_k, w1 = o.top_k_index.shape[1], o.w1
    v, inv, offs = _OPS.reindex.default(o.top_k_index, (w1.weight if isinstance(w1, AdaptedWeight) else w1).shape[0])
    first = [(w1, o.b1)] if o.w3 is None else [(w1, o.b1), (o.w3, o.b3)]
    h = torch.cat([_project(o.x, weight, bias, v, offs, top_k, o.layout1) for weight, bias in first], 1)
    a = _OPS.activate.default(h, o.activation, o.glu, o.params)
    y = _project(a, o.w2, o.b2, None, offs, 1, o.layout2)
    return _OPS.combine.default(y, o.top_k_weights, inv, offs, top_k)  # type: ignore[no-any-return]


def _project(
    x: Tensor, weight: Any, bias: Tensor | None, v: Tensor | None, offs: Tensor, top_k: int, layout: str
) -> Tensor:
    rows = v, offs, top_k
    if not isinstance(weight, AdaptedWeight):
        return esmm(x, weight, bias, *rows, layout)  # type: ignore[no-any-return]
    y: Tensor = esmm(x, weight.weight, bias if weight.row_scale is None else None, *rows, layout)
    if weight.row_scale is not None:
        y = y * expert_rows(weight.row_scale.to(y.dtype), offs, len(y))
        y = y if bias is None else y + expert_rows(dense(bias).to(y.dtype), offs, len(y))
    a, c = weight.factors(layout)
    u = esmm(x, a.to(x.dtype).contiguous(), None, *rows, "nk")
    return y + esmm(u, (c * weight.scale).to(u.dtype).contiguous(), None, None, offs, 1, "nk")  # type: ignore[no-any-return]


@torch.no_grad()
def row_norms(weight: Any, a: Tensor, c: Tensor) -> Tensor:
    """(E, N) norms of the rows of ``W + C A``, in float32 or float64; the sum is not formed.

    Args:
        weight: W (E, N, K), dense or packed, of which one expert is unpacked at a time.
        a, c: (E, r, K) and (E, N, r).
    """
    experts, rank, columns = a.shape
    dtype = accumulate_dtype(weight.dtype)
    if isinstance(weight, QuantizedWeight):
        own = torch.stack([weight.expert(number).to(dtype).square().sum(1) for number in range(experts)])
    elif type(weight) is Listed:
        own = weight.each(lambda matrix: torch.linalg.vector_norm(matrix, dim=1, dtype=dtype).square()).stack()
    else:
        own = torch.linalg.vector_norm(weight, dim=2, dtype=dtype).square()
    offs = torch.arange(0, experts * rank + 1, rank, dtype=torch.int32, device=a.device)
    with torch.autocast(a.device.type, enabled=False):
        products = esmm(a.to(weight.dtype).reshape(-1, columns), weight, None, None, offs, 1, "nk")
        wide, c = a.to(dtype), c.to(dtype)
        both = (products.view(experts, rank, -1).transpose(1, 2).to(dtype) * c).sum(2)
        square = own + 2 * both + ((c @ (wide @ wide.transpose(1, 2))) * c).sum(2)
    norms: Tensor = square.clamp_min(0).sqrt()
    return norms


def layer(name: str, *args: Any) -> Any:
    """A layer's operator, of which some weights and biases are listed."""
    return run(name, partial(moe_ffn_autograd.listed, moe_ffn_autograd.LAYERS[name]), *args)


def _esmm(*args: Any) -> Any:
    o = Esmm._make(args)
    o.check("esmm")
    return _Esmm.apply(*o, *tensors_of(o))


TAKE_PARTS = frozenset({"moe_ffn", "moe_ffn_fixed"})
"""Layers that take gate and up as two weights, so that the stack of each may be no copy."""


def _apart(args: tuple[Any, ...]) -> Any:
    o: Any = MoeFfn._make(args)
    if type(o.w1) is not Listed or len(o.w1.sizes) == 1:
        return o
    (w1, w3), (b1, b3) = o.w1.pieces(), (None, None) if o.b1 is None else o.b1.pieces()
    return o._replace(w1=w1, b1=b1, w3=w3, b3=b3, glu="split")


def _is_watched() -> bool:
    """Whether a mode is to see functions of torch. A default device is one that need not see ours."""
    return _len_torch_function_stack() > 0 and any(
        type(mode).__module__ != "torch.utils._device" for mode in _get_current_function_mode_stack()
    )


def run(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """``function`` where nothing has to see the operator, else this on stacks."""
    first, *_ = args
    if Listed not in map(type, args):
        return library.overload(name)(*args)
    eager = all(value.eager for value in args if type(value) is Listed)
    others = [value for value in args if type(value) is not Listed]
    if eager and library.is_eager(others, cuda=True):
        return function(*args)
    if not eager or _is_watched():
        return library.overload(name)(*map(dense, _apart(args) if name in TAKE_PARTS else args))
    if torch.is_autocast_enabled(device := first.device.type):
        return library.under_autocast(name, device, partial(run, name, function), args)
    with DisableTorchFunction(), without_autocast():
        return function(*args) if library.is_unseen(others, cuda=True) else library.overload(name)(*map(dense, args))


class _Esmm(DirectFunction):
    """esmm by its kernels. Behind the operands come the tensors of those that are listed: of the weight, and of a bias perhaps."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        o: Any = Esmm.split(args)[0]
        tensors, (needs, of_tensors) = o.weight.tensors, Esmm.split(ctx.needs_input_grad)
        ctx.needs, ctx.rows, ctx.layout = needs, o.top_k, o.layout
        ctx.of_weight, ctx.of_bias = of_tensors[: len(tensors)], of_tensors[len(tensors) :]
        ctx.weight, ctx.bias = o.weight.of([]), o.bias.of([]) if ctx.of_bias else None
        ctx.save_for_backward(o.x if any(ctx.of_weight) else None, o.v, o.offs, *tensors)
        with _AutoDispatchBelowAutograd():
            return library.kernel_for("esmm", "cuda")(*readable(o, "cuda")) if o.x.is_cuda else esmm_cpu(o)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, v, offs, *tensors) = grads, ctx.saved_tensors
        weight, plain = ctx.weight.of(tensors), library.is_plain_tensor(g)
        o = Esmm(x, weight, None, v, offs, ctx.rows, ctx.layout)
        needs = ctx.needs._replace(weight=any(ctx.of_weight), bias=ctx.needs.bias or any(ctx.of_bias))
        if g.is_cuda or not plain:
            with _AutoDispatchBelowAutograd() if plain else nullcontext():
                found = esmm_gradients(o if plain else o._replace(weight=weight.stack()), needs, g)
            given = [
                *main_grad.shares("weight", weight, ctx.of_weight, found["weight"]),
                *main_grad.shares("bias", ctx.bias, ctx.of_bias, found["bias"]),
            ]
            return *Esmm.by_argument(x=found["x"], bias=None if ctx.of_bias else found["bias"]), *given
        into: Any = ListedGradients("weight", weight, ctx.of_weight)
        into_bias: Any = ListedGradients("bias", ctx.bias, ctx.of_bias) if ctx.of_bias else None
        with _AutoDispatchBelowAutograd():
            needs = needs._replace(weight=False, bias=needs.bias and into_bias is None)
            found = esmm_gradients(o, needs, g)
            if any(ctx.of_weight):
                at_once("estmm_add", o.to(EstmmAdd, into=into, g=g, x_index=v))
            if any(ctx.of_bias):
                at_once("ess_add", EssAdd(into=into_bias, g=g, v=None, offs=offs, top_k=1, scale=None))
        given = [*into.results(), *([] if into_bias is None else into_bias.results())]
        return *Esmm.by_argument(x=found["x"], bias=found["bias"]), *given
