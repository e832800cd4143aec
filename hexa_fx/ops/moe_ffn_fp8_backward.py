"""The backward of `hexa::moe_ffn_fp8`, on the operators of `hexa_fx.ops.fp8`."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from hexa_fx.formats.fp8_scaling import BLOCK
from hexa_fx.ops.fp8_arguments import first, first_bias, kernel, second, steps
from hexa_fx.ops.rows import routed_rows
from hexa_fx.ops.table_layers import OPERANDS, PARAMETERS
from hexa_fx.ops.table_layers_fp8 import MoeFfnFp8Backward

_OPS = torch.ops.hexa

Rows = tuple[Tensor, Tensor]
"""Elements and their scales."""
Groups = tuple[Tensor, Tensor]
"""Rows transposed in groups, and their scales."""
Found = dict[str, Tensor | None]
"""Gradients by operand; None for what was added to a buffer."""
_FIRST = ("w1", "b1", "w3", "b3")


def backward(*args: Any) -> list[Tensor]:
    """Kernel for any device: gradients of the operands that ``needs`` marks. An h in a list is freed after its last use.

    Buffers to add gradients to may follow, one or None for each operand after x. These gradients are not among the results.
    """
    o, buffers = MoeFfnFp8Backward.split(args)
    dy, v, inv, offs, top_k = o.dy, o.v, o.inv, o.offs, o.top_k
    needs, into = dict(zip(OPERANDS, o.needs, strict=True)), dict(zip_longest(("top_k_weights", *PARAMETERS), buffers))
    x = None if o.xq is None or o.xs is None else (o.xq, o.xs)
    h, hs = o.h, o.hs
    if h is None:
        assert x is not None
        h, hs = _hidden(x, o)
    found: Found = {}
    wanted = needs["x"], any(needs[name] for name in _FIRST), needs["w2"], needs["top_k_weights"]
    dh, dhs, *columns, dots = kernel("esmm_act_backward_fp8", dy)(
        *kernel("quantize_rows_fp8", dy)(dy, False),
        *second(o, transposed=True, forward=False).transposed,
        *(h.pop() if isinstance(h, list) else h, hs, o.top_k_weights, v, offs, top_k, *steps(o), wanted),
    )
    del h
    of_dh, of_a = columns[:2], columns[2:]
    del columns
    if needs["w2"]:
        of_dy = kernel("quantize_columns_fp8", dy)(dy, v, offs, top_k)
        out = _out(o.w2, into["w2"])
        _product(out, of_dy, tuple(of_a), o.layout2, offs, into["w2"] is not None)
        found["w2"] = None if into["w2"] is not None else out
        del of_dy
    del of_a
    if needs["b2"]:
        found["b2"] = _added(_OPS.ess(dy, v, offs, top_k, o.top_k_weights), o.b2, into["b2"])
    if needs["top_k_weights"]:
        found["top_k_weights"] = _routing_gradient(dots, o)
    if wanted[1]:
        found |= _first_projection(tuple(of_dh), x, o, needs, into)
    del of_dh
    if needs["x"]:
        weight = first(o, transposed=True, forward=False).transposed
        rows = kernel("esmm_fp8", dy)(dh, dhs, *weight, None, offs)
        found["x"] = kernel("combine_fp8", dy)(*rows, None, inv, offs, top_k, o.input_size, dy.dtype)
    return [gradient for name in OPERANDS if needs[name] and (gradient := found[name]) is not None]


def _hidden(x: Rows, o: MoeFfnFp8Backward) -> Rows:
    """The pre-activation, computed again."""
    w, ws, *_ = first(o, transposed=True, forward=False)
    h, hs, _, _ = kernel("esmm_act_fp8", o.v)(*x, w, ws, first_bias(o), o.v, o.offs, o.top_k, *steps(o), True)
    return h, hs


def _first_projection(
    of_dh: Groups, x: Rows | None, o: MoeFfnFp8Backward, needs: dict[str, bool], into: dict[str, Tensor | None]
) -> Found:
    """Gradients of the weights and biases of the first projection, as far as they are needed."""
    found: Found = {}
    if needs["w1"] or needs["w3"]:
        assert x is not None
        of_x = kernel("group_rows_fp8", o.v)(*x, o.v, o.offs, o.top_k)
        outs = {n: _out(w, into[n]) for n, w in (("w1", o.w1), ("w3", o.w3)) if w is not None and needs[n]}
        for name, out, part in _parts(outs, of_dh, o):
            _product(out, part, of_x, o.layout1, o.offs, into[name] is not None)
        found |= {name: None if into[name] is not None else out for name, out in outs.items()}
    if needs["b1"] or needs["b3"]:
        sums = kernel("ess_fp8", o.v)(*of_dh, o.offs)
        halves = [half[:, : o.inner] for half in sums.chunk(1 if o.glu == "none" else 2, 1)]
        if o.glu == "concat":
            halves = [torch.cat(halves, 1)]
        elif o.glu == "interleaved":
            halves = [torch.stack(halves, 2).flatten(1)]
        for name, bias, gradient in zip(("b1", "b3"), (o.b1, o.b3), halves):
            found |= {name: _added(gradient, bias, into[name])} if needs[name] else {}
    return found


def _parts(outs: dict[str, Tensor], of_dh: Groups, o: MoeFfnFp8Backward) -> list[tuple[str, Tensor, Groups]]:
    """The products that make the gradients of the first projection: the operand, where in its gradient, columns of dh."""
    q, s = of_dh
    if o.glu == "none" or (o.glu == "concat" and o.inner % BLOCK == 0):
        return [("w1", outs["w1"], of_dh)]
    width = q.shape[1] // 2
    halves = [(q[:, begin : begin + width], s[:, begin : begin + width]) for begin in (0, width)]
    if o.glu == "split":
        return [(name, outs[name], half) for name, half in zip(("w1", "w3"), halves) if name in outs]
    dim = 1 if o.layout1 == "nk" else 2
    pair = (2, -1) if o.glu == "concat" else (-1, 2)
    places = outs["w1"].unflatten(dim, pair).unbind(dim + pair.index(2))
    return [("w1", place, half) for place, half in zip(places, halves)]


def _product(out: Tensor, outputs: Groups, inputs: Groups, layout: str, offs: Tensor, add: bool) -> None:
    """A weight's gradient, of the gradients of the projection's outputs and of its inputs, 128 of which share a scale."""
    pair = (*outputs, *inputs) if layout == "nk" else (*inputs, *outputs)
    kernel("estmm_fp8", out)(out, *pair, offs, layout == "nk", add)


def _out(weight: Tensor, buffer: Tensor | None) -> Tensor:
    return torch.empty_like(weight, memory_format=torch.contiguous_format) if buffer is None else buffer


def _added(gradient: Tensor, bias: Tensor | None, buffer: Tensor | None) -> Tensor | None:
    """A bias's gradient in its dtype, unless it was added to a buffer."""
    if buffer is not None:
        buffer.add_(gradient)
        return None
    assert bias is not None
    return gradient.to(bias.dtype).contiguous()


def _routing_gradient(dots: Tensor, o: MoeFfnFp8Backward) -> Tensor:
    """The routing weights' gradient (T, k) of every row's dots, (n, .); with <dy, b2[e]> where there is a bias."""
    assert o.top_k_weights is not None
    total = dots.sum(1)
    if o.b2 is not None:
        column = o.b2.to(o.dy.dtype).unsqueeze(1)
        total += _OPS.esmm(o.dy, column, None, o.v, o.offs, o.top_k, "nk").squeeze(1)
    slots = torch.where(routed_rows(o.offs, total.shape[0]).squeeze(1), total, 0).index_select(0, o.inv)
    return slots.view(o.top_k_weights.shape).to(o.top_k_weights.dtype)
