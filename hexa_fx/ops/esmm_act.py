"""``hexa::esmm_act``: the first projection with the activation folded into its epilogue."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hexa_fx.errors import InputError
from hexa_fx.ops import checks, library, tiles
from hexa_fx.ops.activations import check_activation
from hexa_fx.ops.esmm import projection_backward
from hexa_fx.ops.operands import EsmmAct, MoeFfn
from hexa_fx.ops.tiling import output, whole

library.define(
    "esmm_act(Tensor x, Tensor w1, Tensor? b1, Tensor? w3, Tensor? b3, Tensor? v, Tensor offs, SymInt top_k, "
    "str layout, str activation, str glu, float[] params, bool keep_h=True) -> (Tensor h, Tensor a)"
)


def esmm_act(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w3: Tensor | None,
    b3: Tensor | None,
    v: Tensor | None,
    offs: Tensor,
    top_k: int,
    layout: str,
    activation: str,
    glu: str,
    params: tuple[float, ...] = (),
    keep_h: bool = True,
) -> tuple[Tensor, Tensor]:
    """``h = esmm(x, W1, b1)`` and ``a = act(h)`` in one operator.

    Args:
        x: (T, K) gathered by v, or (n, K) in expert order when v is None.
        w1: (E, N, K) for layout ``nk``, (E, K, N) for ``kn``, with N = I, or 2I for glu ``concat`` and ``interleaved``.
        b1: (E, N) or None.
        w3: the up projection, shaped as w1, for glu ``split``; None otherwise.
        b3: its bias or None.
        v: (n,) int32 of `reindex`, or None.
        offs: (E+1,) int32 of `reindex`.
        top_k: slots a token; 1 when v is None.
        layout: ``nk`` or ``kn``.
        activation, glu, params: as in `activate`.
        keep_h: False returns h with zero rows, where nothing will need it (inference).

    Returns:
        h: (n, I), or (n, 2I) for a gated expert: gate and up in the order of the weight, gate then up for ``split``.
        a: (n, I).

    Raises:
        InputError: shapes, dtypes or devices do not fit together.
    """
    h, a = torch.ops.hexa.esmm_act(x, w1, b1, w3, b3, v, offs, top_k, layout, activation, glu, params, keep_h)
    return h, a


def check(*args: Any) -> None:
    """Checks shapes, dtypes and devices of the arguments."""
    o = EsmmAct(*args)
    checks.check_floating("esmm_act", ("x", "w1", "b1", "w3", "b3"), (o.x, o.w1, o.b1, o.w3, o.b3))
    checks.check_index("esmm_act", o.x, ("v", "offs"), (o.v, o.offs))
    experts, k, n = checks.check_weight("esmm_act", "w1", o.w1, o.layout, o.offs)
    checks.check_rows("esmm_act", "x", o.x, k, o.v, o.top_k)
    check_first_projection("esmm_act", o, experts, n)


def check_first_projection(op: str, o: EsmmAct | MoeFfn, experts: int, n: int) -> None:
    """The weights and biases of the first projection fit the activation and each other."""
    check_activation(o.activation, o.glu, o.params)
    checks.check_bias(op, "b1", o.b1, experts, n)
    if o.glu == "split":
        if o.w3 is None or o.w3.shape != o.w1.shape:
            seen = "missing" if o.w3 is None else checks.shape(o.w3)
            raise InputError(f"hexa::{op}: w3 is {seen}; with glu 'split' it is shaped as w1 {tuple(o.w1.shape)}")
        checks.check_bias(op, "b3", o.b3, experts, n)
        return
    if o.w3 is not None or o.b3 is not None:
        raise InputError(f"hexa::{op}: w3 and b3 belong to glu 'split', not to {o.glu!r}")
    if o.glu != "none" and n % 2:
        raise InputError(f"hexa::{op}: w1 is {checks.shape(o.w1)}: gate and up need an even width")


def esmm_act_cpu(*args: Any) -> tuple[Tensor, Tensor]:
    """CPU kernel."""
    o = EsmmAct(*args)
    tile = whole(o.v, o.offs, o.top_k, o.x)
    operands = (tile.operand(o.x, o.v), o.w1, o.b1, o.w3, o.b3, o.v is not None)
    a = tiles.esmm_act(tile, "h" if o.keep_h else None, *operands, o.layout, o.activation, o.glu, o.params)
    return output(tile.tiling, "h") if o.keep_h else o.x.new_empty((0, o.width)), tile.padded(a)


def fake(*args: Any) -> tuple[Tensor, Tensor]:
    """Empty results."""
    o = EsmmAct(*args)
    return o.x.new_empty((o.rows if o.keep_h else 0, o.width)), o.x.new_empty((o.rows, o.inner))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, w1, _, w3, _, v, offs, top_k, layout, activation, glu, params, keep_h = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, w1, w3, v, offs, output[0])
    ctx.static = (top_k, layout, activation, glu, params)
    if not keep_h:
        raise InputError("hexa::esmm_act: keep_h=False computes no gradient; use it under torch.no_grad()")


def _backward(ctx: Any, dh: Tensor | None, da: Tensor | None) -> tuple[Tensor | None, ...]:
    x, w1, w3, v, offs, h = ctx.saved_tensors
    top_k, layout, activation, glu, params = ctx.static
    if da is not None:
        from_a, _, _ = torch.ops.hexa.activate_backward(da, h, None, None, None, activation, glu, params)
        dh = from_a if dh is None else dh + from_a
    if dh is None:
        return (None,) * 13
    needs = ctx.needs_input_grad
    if w3 is None:
        dx, dw1, db1 = projection_backward(x, dh, w1, v, offs, top_k, layout, needs[:3])
        return dx, dw1, db1, *(None,) * 10
    dgate, dup = dh.chunk(2, dim=1)
    dx, dw1, db1 = projection_backward(x, dgate, w1, v, offs, top_k, layout, needs[:3])
    dx3, dw3, db3 = projection_backward(x, dup, w3, v, offs, top_k, layout, (needs[0], needs[3], needs[4]))
    dx = None if dx is None or dx3 is None else dx + dx3
    return dx, dw1, db1, dw3, db3, *(None,) * 8


library.register_fake("esmm_act", fake, check)
library.register_kernel("esmm_act", "cpu", esmm_act_cpu)
library.register_autograd("esmm_act", _backward, _setup_context)
library.register_autocast("esmm_act", cast=(0, 1, 2, 3, 4))
