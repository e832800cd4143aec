"""``hexa::moe_ffn_sources``: `hexa::moe_ffn` on weights that are packed, have low-rank additions (LoRA), or both.

A projection's weight is ``W + s C A`` with A (E, r, K) and C (E, N, r); W is dense, or packed as a format of `hexa_fx.formats`
says. The sum is never formed, a packed weight never unpacked as a whole, and for what is frozen nothing is computed or saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from hexa_fx.ops import library, reindex
from hexa_fx.ops.direct_function import DirectFunction
from hexa_fx.ops.main_grad import kept_operands
from hexa_fx.ops.moe_ffn import STATIC, WEIGHTS
from hexa_fx.ops.projection import (
    DENSE,
    Projection,
    Rows,
    a_gradient,
    added_gradient,
    c_gradient,
    experts_last,
    input_gradient,
    narrowed,
    narrowed_and_c_gradient,
    narrowed_gradient,
    project,
    side_by_side,
)
from hexa_fx.ops.rows import columns_of, flip
from hexa_fx.ops.sources_arguments import OPERANDS, SOURCES, MoeFfnSources, check
from hexa_fx.torch_private import _AutoDispatchBelowAutograd

_OPS = torch.ops.hexa
SOURCES_INPUTS = f"Tensor x, Tensor top_k_index, Tensor? top_k_weights, {WEIGHTS}, {SOURCES}, {STATIC}"
SOURCES_KEPT = "(Tensor y, Tensor h, Tensor u1, Tensor u3, Tensor u2, Tensor v, Tensor inv, Tensor offs)"

library.define(f"moe_ffn_sources({SOURCES_INPUTS}) -> Tensor")
library.define(f"moe_ffn_sources_forward({SOURCES_INPUTS}) -> {SOURCES_KEPT}")
library.define(
    "moe_ffn_sources_backward(Tensor dy, Tensor? x, Tensor? h, Tensor u1, Tensor u3, Tensor u2, Tensor v, Tensor inv, Tensor offs, "
    f"Tensor? top_k_weights, {WEIGHTS}, {SOURCES}, {STATIC}, SymInt top_k, bool[] needs) -> Tensor[]"
)


def _hidden(x: Tensor, first: Sequence[Projection], rows: Rows, u: Sequence[Tensor | None]) -> Tensor:
    """The pre-activation. u: the products with A of each first projection."""
    parts = [project(x, p, rows, each) for p, each in zip(first, u, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _activated(o: MoeFfnSources, rows: Rows, u: Sequence[Tensor | None], keep_h: bool) -> tuple[Tensor, Tensor]:
    """The pre-activation, without rows unless it is kept, and the activation."""
    if len(o.first) == 1 and o.first[0].format != DENSE:
        p, second = o.first[0], (None, None) if u[0] is None else o.first[0].added(u[0])
        packed = (o.x, p.weight, p.scales, p.format, p.bias, *rows, p.layout)
        both: tuple[Tensor, Tensor] = _OPS.esmm_act_packed(*packed, *o.steps, keep_h, *second)
        return both
    if any(p.format != DENSE for p in o.first):
        h = _hidden(o.x, o.first, rows, u)
        a: Tensor = _OPS.activate(h, *o.steps)
        return (h if keep_h else h.new_empty((0, h.shape[1]))), a
    operands, added = (o.x, o.w1, o.b1, o.w3, o.b3, *rows, o.layout1, *o.steps, keep_h), side_by_side(o.first, u)
    found: tuple[Tensor, Tensor] = (
        _OPS.esmm_act(*operands) if added is None else _OPS.esmm_act_low_rank(*operands, *added)
    )
    return found


def _run(o: MoeFfnSources, keep_h: bool) -> tuple[Tensor, ...]:
    """The result, what `training` adds to it: h, the products with A of w1, w3 and w2 (or None), and the routing."""
    top_k = o.top_k_index.shape[1]
    v, inv, offs = _OPS.reindex(o.top_k_index, o.w1.shape[0])
    rows = Rows(v, offs, top_k)
    u = [narrowed(o.x, p, rows) for p in o.first]
    h, a = _activated(o, rows, u, keep_h)
    u2 = narrowed(a, o.second, rows.own)
    y_rows = project(a, o.second, rows.own, u2)
    del a
    y = _OPS.combine(y_rows, o.top_k_weights, inv, offs, top_k)
    u1, u3 = (*u, None)[:2]
    # What there is none of has a tensor of its own: results of a custom operator may not share one.
    return y, h, *(h.new_empty((0, 0)) if each is None else each for each in (u1, u3, u2)), v, inv, offs


def inference(*args: Any) -> Tensor:
    """Kernel for any device."""
    return _run(MoeFfnSources(*args), keep_h=False)[0]


def training(*args: Any) -> tuple[Tensor, ...]:
    """Kernel for any device: the result, and what backward needs."""
    o = MoeFfnSources(*args)
    return _run(o, keep_h=not o.recompute_h)


def backward(
    dy: Tensor,
    x: Any,
    h: Tensor | list[Tensor] | None,
    u1: Tensor,
    u3: Tensor,
    u2: Tensor,
    v: Tensor,
    inv: Tensor,
    offs: Tensor,
    *rest: Any,
) -> list[Tensor]:
    """Kernel for any device: the gradients of the operands that ``needs`` marks. An h in a list is freed after its last use."""
    *others, top_k, marks = rest
    o, needs = MoeFfnSources(x, v, *others), dict(zip(OPERANDS, marks, strict=True))
    first, second, rows = o.first, o.second, Rows(v, offs, top_k)
    u = [each if p.a is not None else None for p, each in zip(first, (u1, u3))]
    h = h.pop() if isinstance(h, list) else h
    h = _hidden(x, first, rows, u) if o.recompute_h or h is None else h
    found: dict[str, Tensor | None] = {}
    t: Tensor | None
    if needs["c2"]:
        t, found["c2"] = narrowed_and_c_gradient(u2, dy, second, rows, o.top_k_weights)
    else:
        t = narrowed_gradient(dy, second, rows)
    dh, a_s, dweights = _activation_gradient(dy, h, t, o, rows)
    del h
    _second(found, needs, second, dy, a_s, t, o.top_k_weights, rows)
    del a_s
    if needs["top_k_weights"]:
        found["top_k_weights"] = _with_bias(dweights, o.b2, dy, inv, rows)
    parts = dh.chunk(2, 1) if len(first) == 2 else (dh,)
    dx: Tensor | None = None
    for number, projection, g, u_rows in zip("13", first, parts, u):
        t = _first(found, needs, number, projection, x, u_rows, g, rows)
        if needs["x"]:
            part = input_gradient(g, projection, rows.own, t)
            dx = part if dx is None else dx.add_(part)
    if dx is not None:
        found["x"] = _OPS.combine(dx, None, inv, offs, top_k)
    return [gradient for name in OPERANDS if needs[name] and (gradient := found[name]) is not None]


def _activation_gradient(
    dy: Tensor, h: Tensor, t: Tensor | None, o: MoeFfnSources, rows: Rows
) -> tuple[Tensor, Tensor, Tensor]:
    """dh, the activations times their routing weights, and the routing weights' gradients. t: dy's products with C."""
    second = o.second
    added, routed = added_gradient(second, t), (h, o.top_k_weights, *rows, flip(o.layout2), *o.steps)
    if second.format != DENSE:
        packed = (dy, o.w2, o.s2, second.format, *routed)
        found = _OPS.esmm_act_backward_packed(*packed, *(added or (None, None)))
    else:
        operands = (dy, o.w2, *routed)
        fused = _OPS.esmm_act_backward, _OPS.esmm_act_backward_low_rank
        found = fused[0](*operands) if added is None else fused[1](*operands, *added)
    dh, a_s, dweights = found
    return dh, a_s, dweights


def _second(
    found: dict[str, Tensor | None],
    needs: dict[str, bool],
    p: Projection,
    dy: Tensor,
    a_s: Tensor,
    t: Tensor | None,
    top_k_weights: Tensor | None,
    rows: Rows,
) -> None:
    """Gradients of the second projection besides that of C. a_s: (n, I), activations times routing weights."""
    if needs["a2"]:
        assert t is not None
        found["a2"] = a_gradient(a_s, t, p, rows.own)
    if needs["w2"]:
        found["w2"] = _OPS.estmm(a_s, dy, None, rows.v, rows.offs, rows.top_k, p.layout)
    if needs["b2"]:
        found["b2"] = _OPS.ess(dy, *rows, top_k_weights)


def _first(
    found: dict[str, Tensor | None],
    needs: dict[str, bool],
    number: str,
    p: Projection,
    x: Tensor | None,
    u: Tensor | None,
    g: Tensor,
    rows: Rows,
) -> Tensor | None:
    """Gradients of a first projection. Returns g's products with C where something needs them."""
    a, c, t = f"a{number}", f"c{number}", None
    wanted = needs["x"] or needs[a]
    if u is not None and needs[c] and wanted:
        t, found[c] = narrowed_and_c_gradient(u, g, p, rows.own)
    elif u is not None and needs[c]:
        found[c] = c_gradient(u, g, p, rows.own)
    elif wanted:
        t = narrowed_gradient(g, p, rows.own)
    if needs[a]:
        assert x is not None
        assert t is not None
        found[a] = a_gradient(x, t, p, rows)
    if needs[f"w{number}"]:
        found[f"w{number}"] = _OPS.estmm(x, g, rows.v, None, rows.offs, rows.top_k, p.layout)
    if needs[f"b{number}"]:
        found[f"b{number}"] = _OPS.ess(g, *rows.own, None)
    return t


def _with_bias(dweights: Tensor, b2: Tensor | None, dy: Tensor, inv: Tensor, rows: Rows) -> Tensor:
    """The routing weights' gradients with <dy, b2[e]> at every slot, as `hexa_fx.passes.lowering.lower` has it."""
    if b2 is None:
        return dweights
    dots = _OPS.esmm(dy, b2.unsqueeze(1), None, *rows, "nk")
    slots = _OPS.combine(dots, None, inv, rows.offs, 1)
    total: Tensor = dweights + slots.view_as(dweights).type_as(dweights)
    return total


class MoeFfnSourcesFunction(DirectFunction):
    """What it keeps besides weights: x if something needs it, h unless it is computed again, and the routing."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        with _AutoDispatchBelowAutograd():
            return MoeFfnSourcesFunction.kept(ctx, args, *_OPS.moe_ffn_sources_forward.default(*args))

    @staticmethod
    def kept(ctx: Any, args: tuple[Any, ...], y: Tensor, h: Tensor, *kept: Tensor) -> Tensor:
        """Keeps what backward needs of a forward's results, of which it returns the first."""
        o, wanted = MoeFfnSources(*args), ctx.needs_input_grad
        needs = [wanted[0], *wanted[2:15]]
        keep_x = o.recompute_h or any(need for name, need in zip(OPERANDS, needs) if name in ("w1", "w3", "a1", "a3"))
        routed = o.x if keep_x else None, None if o.recompute_h else h, *kept
        ctx.scales = tuple(map(len, (o.s1, o.s3, o.s2)))
        ctx.save_for_backward(*routed, *kept_operands(args[:15], o.recompute_h, wanted), *o.s1, *o.s3, *o.s2)
        ctx.static = (o.alphas, o.formats, args[20:], o.top_k_index.shape[1], needs)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        alphas, formats, static, top_k, needs = ctx.static
        x, h, *saved = ctx.saved_tensors
        plain = library.is_plain_tensor(grads[0])
        if plain and h is not None:
            h = [h]  # backward pops it and frees it after its last use
            ctx.maybe_clear_saved_tensors()  # unless the graph is retained
        count, left = len(saved) - sum(ctx.scales), iter(saved)
        tensors = [next(left) for _ in range(count)]
        scales = [[next(left) for _ in range(number)] for number in ctx.scales]
        run = run_backward if plain else _OPS.moe_ffn_sources_backward.default
        with _AutoDispatchBelowAutograd() if plain else nullcontext():  # else autograd refuses second derivatives
            found = iter(run(grads[0], x, h, *tensors, alphas, *scales, formats, *static, top_k, needs))
        dx, *others = [next(found) if need else None for need in needs]
        return dx, None, *others, *(None,) * 11


def fake(*args: Any) -> Tensor:
    """Shape and dtype of the result."""
    o = MoeFfnSources(*args)
    return o.x.new_empty((o.x.shape[0], columns_of(o.shaped(o.x).w2, o.layout2)))


def fake_forward(*args: Any) -> tuple[Tensor, ...]:
    """Shapes and dtypes of what `training` gives."""
    o = MoeFfnSources(*args)
    x, index, recompute = o.x, o.top_k_index, o.recompute_h
    n, width = index.shape[0] * index.shape[1], columns_of(o.shaped(x).w1, o.layout1)
    h = x.new_empty((0 if recompute else n, width if o.w3 is None else 2 * width))
    ranks = [None if a is None else a.shape[1] for a in (o.a1, o.a3, o.a2)]
    u = [x.new_empty((0, 0) if rank is None else (n, rank)) for rank in ranks]
    return fake(*args), h, *u, *reindex.fake(index, o.w1.shape[0])


def _fake_backward(dy: Tensor, *args: Any) -> list[Tensor]:
    *others, _, needs = args[8:]
    o = MoeFfnSources(dy, dy, *others)
    w1 = o.shaped(dy).w1
    like: tuple[Any, ...] = (dy.new_empty((dy.shape[0], w1.shape[2] if o.layout1 == "nk" else w1.shape[1])), *o[2:15])
    return [_fake_gradient(*each) for *each, need in zip(OPERANDS, like, needs, strict=True) if need]


def _fake_gradient(name: str, t: Tensor) -> Tensor:
    return torch.empty_like(t) if name[0] == "c" and experts_last(t) else t.new_empty(t.shape)


CAST = (0, *range(3, 15))
library.register_fake("moe_ffn_sources", fake, check)
library.register_kernel("moe_ffn_sources", "any", inference)
library.register_autocast("moe_ffn_sources", cast=CAST)
library.register_fake("moe_ffn_sources_forward", fake_forward, check)
library.register_kernel("moe_ffn_sources_forward", "any", training)
library.register_fake("moe_ffn_sources_backward", _fake_backward)
run_backward = library.register_kernel("moe_ffn_sources_backward", "any", backward)
library.refuse_double_backward("moe_ffn_sources_backward")
library.register_autograd_function("moe_ffn_sources", MoeFfnSourcesFunction.apply)
