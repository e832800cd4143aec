"""``hexa::moe_ffn_sources``: `hexa::moe_ffn` on weights with low-rank additions, as adapters (LoRA) make them.

A projection's weight is ``W + s C A`` with A (E, r, K) and C (E, N, r). The sum is never formed, and what is frozen has no
gradient, no kernel for one, and nothing saved for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _any_requires_grad, _AutoDispatchBelowAutograd

from hexa_fx.errors import InputError
from hexa_fx.ops import checks, library
from hexa_fx.ops.direct_function import DirectFunction
from hexa_fx.ops.moe_ffn import STATIC, WEIGHTS
from hexa_fx.ops.moe_ffn import check as check_moe_ffn
from hexa_fx.ops.projection import Projection, Rows, factor_gradients, input_gradient, project
from hexa_fx.ops.rows import columns_of

_OPS = torch.ops.hexa
_FACTORS = "Tensor? a1, Tensor? c1, Tensor? a3, Tensor? c3, Tensor? a2, Tensor? c2, float[] scales"
_INPUTS = f"Tensor x, Tensor top_k_index, Tensor? top_k_weights, {WEIGHTS}, {_FACTORS}, {STATIC}"
OPERANDS = ("x", "top_k_weights", "w1", "b1", "w3", "b3", "w2", "b2", "a1", "c1", "a3", "c3", "a2", "c2")
"""The differentiable operands, in the order of the schema."""

library.define(f"moe_ffn_sources({_INPUTS}) -> Tensor")
library.define(
    f"moe_ffn_sources_forward({_INPUTS}) -> (Tensor y, Tensor h, Tensor u1, Tensor u3, Tensor v, Tensor inv, Tensor offs)"
)
library.define(
    "moe_ffn_sources_backward(Tensor dy, Tensor? x, Tensor? h, Tensor u1, Tensor u3, Tensor v, Tensor inv, Tensor offs, "
    f"Tensor? top_k_weights, {WEIGHTS}, {_FACTORS}, SymInt top_k, {STATIC}, bool[] needs) -> Tensor[]"
)


class Experts(NamedTuple):
    """The weights as they are computed with.

    Args:
        first: the first projection, and that of up for glu ``split``.
        second: the second projection.
        activation, glu, params: as in `FfnSpec`.
    """

    first: tuple[Projection, ...]
    second: Projection
    activation: str
    glu: str
    params: Sequence[float]


def experts_of(weights: Sequence[Any], factors: Sequence[Any], static: Sequence[Any]) -> Experts:
    """The experts of the operator's arguments: six weights, six factors and their scales, five constants."""
    w1, b1, w3, b3, w2, b2 = weights
    a1, c1, a3, c3, a2, c2, scales = factors
    activation, glu, params, layout1, layout2 = static[:5]
    first: tuple[Projection, ...] = (Projection(w1, b1, a1, c1, scales[0], layout1),)
    if w3 is not None:
        first = (*first, Projection(w3, b3, a3, c3, scales[1], layout1))
    return Experts(first, Projection(w2, b2, a2, c2, scales[2], layout2), activation, glu, params)


def check(*args: Any) -> None:
    """Checks shapes, dtypes and devices of the arguments."""
    op, (x, weights, factors) = "moe_ffn_sources", (args[0], args[3:9], args[9:15])
    check_moe_ffn(*args[:9], *args[16:])
    if len(args[15]) != 3:
        raise InputError(f"hexa::{op}: scales has {len(args[15])} numbers; expected three, for w1, w3 and w2")
    checks.check_floating(op, ("x", *OPERANDS[8:]), (x, *factors))
    for number, (weight, layout) in enumerate(((weights[0], args[19]), (weights[2], args[19]), (weights[4], args[20]))):
        a, c = factors[2 * number : 2 * number + 2]
        if (a is None) != (c is None) or (a is not None and weight is None):
            raise InputError(f"hexa::{op}: a low-rank addition needs both of its factors, and a weight")
        if a is None or c is None:
            continue
        experts, k, n = checks.check_weight(op, "weight", weight, layout)
        if a.shape != (experts, a.shape[1], k) or c.shape != (experts, n, a.shape[1]):
            raise InputError(
                f"hexa::{op}: the factors are {checks.shape(a)} and {checks.shape(c)}; expected ({experts}, r, {k}) and "
                f"({experts}, {n}, r)"
            )


def _hidden(x: Tensor, experts: Experts, rows: Rows) -> tuple[Tensor, list[Tensor | None]]:
    """The pre-activation, and the products with A of each first projection."""
    found = [project(x, projection, rows) for projection in experts.first]
    parts = [h for h, _ in found]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)), [u for _, u in found]


def _run(args: Sequence[Any]) -> tuple[Tensor, Tensor, list[Tensor | None], tuple[Tensor, Tensor, Tensor]]:
    x, top_k_index, top_k_weights = args[:3]
    experts, top_k = experts_of(args[3:9], args[9:16], args[16:]), top_k_index.shape[1]
    v, inv, offs = _OPS.reindex(top_k_index, args[3].shape[0])
    rows = Rows(v, offs, top_k)
    h, u = _hidden(x, experts, rows)
    a = _OPS.activate(h, experts.activation, experts.glu, experts.params)
    y_rows, _ = project(a, experts.second, rows.own)
    return _OPS.combine(y_rows, top_k_weights, inv, offs, top_k), h, u, (v, inv, offs)


def inference(*args: Any) -> Tensor:
    """Kernel for any device."""
    return _run(args)[0]


def training(*args: Any) -> tuple[Tensor, ...]:
    """Kernel for any device: the result, and what backward needs."""
    y, h, u, routing = _run(args)
    keeps = not args[21]
    kept = [h.new_empty((0, 0)) if each is None or not keeps else each for each in (*u, None)[:2]]
    return y, (h if keeps else h.new_empty((0, h.shape[1]))), *kept, *routing


def backward(
    dy: Tensor,
    x: Tensor | None,
    h: Tensor | None,
    u1: Tensor,
    u3: Tensor,
    v: Tensor,
    inv: Tensor,
    offs: Tensor,
    *rest: Any,
) -> list[Tensor]:
    """Kernel for any device: the gradients of the operands that ``needs`` marks."""
    top_k_weights, weights, factors, top_k, static = rest[0], rest[1:7], rest[7:14], rest[14], rest[15:21]
    needs = dict(zip(OPERANDS, rest[21], strict=True))
    experts, rows = experts_of(weights, factors, static), Rows(v, offs, top_k)
    u: list[Tensor | None] = [u1, u3]
    if static[5] or h is None:
        assert x is not None
        h, u = _hidden(x, experts, rows)
    found: dict[str, Tensor | None] = {}
    da, t = input_gradient(dy, experts.second, rows)
    activation = (experts.activation, experts.glu, experts.params)
    dh, a_s, dweights = _OPS.activate_backward(da, h, top_k_weights, v, offs, *activation)
    del da, h
    _second(found, needs, experts.second, dy, a_s, t, top_k_weights, rows)
    if needs["top_k_weights"]:
        found["top_k_weights"] = _with_bias(dweights, weights[5], dy, inv, rows)
    parts = [part.contiguous() for part in dh.chunk(2, 1)] if len(experts.first) == 2 else [dh]
    dx: Tensor | None = None
    wanted = needs["x"] or any(needs[name] for name in ("a1", "a3"))
    for number, projection, g, u_rows in zip("13", experts.first, parts, u):
        part, t = input_gradient(g, projection, rows.own) if wanted else (None, None)
        dx = part if dx is None or part is None else dx.add_(part)
        _first(found, needs, number, projection, x, u_rows, g, t, rows)
    if needs["x"] and dx is not None:
        found["x"] = _OPS.combine(dx, None, inv, offs, top_k)
    return [gradient for name in OPERANDS if needs[name] and (gradient := found[name]) is not None]


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
    """Gradients of the second projection. a_s: (n, I), the activations times their routing weights."""
    if p.a is not None and (needs["a2"] or needs["c2"]):
        u = _OPS.esmm(a_s, p.a, None, *rows.own, "nk") if needs["c2"] else None
        found["a2"], found["c2"] = factor_gradients(a_s, u, dy, t, p, rows.own, rows, (needs["a2"], needs["c2"]))
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
    t: Tensor | None,
    rows: Rows,
) -> None:
    """Gradients of a first projection."""
    a, c = f"a{number}", f"c{number}"
    if p.a is not None and (needs[a] or needs[c]):
        rows_of_x = x if x is not None else g  # not read where only C's gradient is wanted
        found[a], found[c] = factor_gradients(rows_of_x, u, g, t, p, rows, rows.own, (needs[a], needs[c]))
    if needs[f"w{number}"]:
        found[f"w{number}"] = _OPS.estmm(x, g, rows.v, None, rows.offs, rows.top_k, p.layout)
    if needs[f"b{number}"]:
        found[f"b{number}"] = _OPS.ess(g, *rows.own, None)


def _with_bias(dweights: Tensor, b2: Tensor | None, dy: Tensor, inv: Tensor, rows: Rows) -> Tensor:
    """The routing weights' gradients with <dy, b2[e]> at every slot, as `hexa_fx.passes.lowering.lower` has it."""
    if b2 is None:
        return dweights
    dots = _OPS.esmm(dy, b2.unsqueeze(1), None, *rows, "nk")
    slots = _OPS.combine(dots, None, inv, rows.offs, 1)
    total: Tensor = dweights + slots.view_as(dweights).type_as(dweights)
    return total


class _Function(DirectFunction):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        with _AutoDispatchBelowAutograd():
            y, h, *kept = _OPS.moe_ffn_sources_forward.default(*args)
        wanted = ctx.needs_input_grad
        needs = [wanted[0], *wanted[2:15]]
        recompute = args[21]
        keep_x = recompute or any(need for name, need in zip(OPERANDS, needs) if name in ("w1", "w3", "a1", "a3"))
        ctx.save_for_backward(args[0] if keep_x else None, None if recompute else h, *kept, *args[2:15])
        ctx.static = (args[15], args[1].shape[1], *args[16:], needs)
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.static[-1]
        found = iter(_OPS.moe_ffn_sources_backward.default(grads[0], *ctx.saved_tensors, *ctx.static))
        dx, *others = [next(found) if need else None for need in needs]
        return dx, None, *others, None, *(None,) * 6


def _autograd(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
    if is_grad_enabled() and _any_requires_grad(*args):
        return _Function.apply(*args)
    with _AutoDispatchBelowAutograd():
        return _OPS.moe_ffn_sources.default.redispatch(keyset & torch._C._after_autograd_keyset, *args)


def _fake(*args: Any) -> Tensor:
    x, w2, layout2 = args[0], args[7], args[20]
    y: Tensor = x.new_empty((x.shape[0], columns_of(w2, layout2)))
    return y


def _fake_forward(*args: Any) -> tuple[Tensor, ...]:
    x, index, w1, w3, a1, a3, layout1, recompute = (
        args[0],
        args[1],
        args[3],
        args[5],
        args[9],
        args[11],
        args[19],
        args[21],
    )
    n, width = index.shape[0] * index.shape[1], columns_of(w1, layout1)
    h = x.new_empty((0 if recompute else n, width if w3 is None else 2 * width))
    none = a1 is None or recompute, w3 is None or a3 is None or recompute
    u = [x.new_empty((0, 0) if absent else (n, a.shape[1])) for absent, a in zip(none, (a1, a3))]
    routing = torch.empty(n, dtype=torch.int32, device=x.device)
    offs = torch.empty(w1.shape[0] + 1, dtype=torch.int32, device=x.device)
    return _fake(*args), h, *u, routing, torch.empty_like(routing), offs


def _fake_backward(dy: Tensor, *args: Any) -> list[Tensor]:
    weights, layout1, needs = args[7:21], args[25], args[28]
    w1 = weights[1]
    like = (dy.new_empty((dy.shape[0], w1.shape[2] if layout1 == "nk" else w1.shape[1])), *weights[:13])
    return [t.new_empty(t.shape) for t, need in zip(like, needs, strict=True) if need]


_CAST = (0, *range(3, 15))
library.register_fake("moe_ffn_sources", _fake, check)
library.register_kernel("moe_ffn_sources", "any", inference)
library.register_autocast("moe_ffn_sources", cast=_CAST)
library.register_fake("moe_ffn_sources_forward", _fake_forward, check)
library.register_kernel("moe_ffn_sources_forward", "any", training)
library.register_fake("moe_ffn_sources_backward", _fake_backward)
library.register_kernel("moe_ffn_sources_backward", "any", backward)
library.refuse_double_backward("moe_ffn_sources_backward")
library.register_autograd_kernel("moe_ffn_sources", _autograd)
