"""The kernels that a layer launches in FP8 block compute besides those of its exact form; as `hexa_fx.cuda.kernel_set`.

None of them depends on a number of tokens. Reindexing, combining and sums over rows are those of the exact form.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hexa_fx.codegen.spec import KernelSpec
from hexa_fx.cuda import fp8, fp8_rows
from hexa_fx.cuda.choosing import Card, collect
from hexa_fx.cuda.kernel_set import FfnLayer
from hexa_fx.formats.fp8_scaling import BLOCK, ELEMENT, group_count, padded
from hexa_fx.ops.activations import inner_width
from hexa_fx.ops.rows import columns_of

_TOKENS = 4096
_UP: Any = fp8.esmm_act_fp8
_PRODUCT: Any = fp8.esmm_fp8
_QUANTISE: Any = fp8_rows.quantize_weight_fp8
_FIRST = ("w1", "b1", "w3", "b3")

Quantised = tuple[Tensor, Tensor]


def fp8_kernel_set(layer: FfnLayer, card: Card, training: bool = True) -> tuple[KernelSpec, ...]:
    """Every such kernel; none on a card that FP8 products do not run on. Needs no device, no compiler and no data.

    Args:
        layer: see `hexa_fx.cuda.kernel_set.layer_of`.
        card: what kernels are chosen for.
        training: also those of forward and backward of training.
    """
    if card.arch != 90 or card.family_arch != 90:
        return ()
    with collect(card) as specs:
        _forward(layer, False)
        if training:
            _forward(layer, True)
            _backward(layer)
    return tuple(dict.fromkeys(specs))


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _rows(count: int, width: int) -> Quantised:
    return _empty(count, padded(width), dtype=ELEMENT), _empty(count, padded(width) // BLOCK)


def _weight(layer: FfnLayer, columns: int, depth: int) -> Quantised:
    high, wide = padded(columns), padded(depth)
    return _empty(layer.experts, high, wide, dtype=ELEMENT), _empty(layer.experts, high // BLOCK, wide // BLOCK)


def _groups(layer: FfnLayer, width: int) -> Quantised:
    count = group_count(_TOKENS * layer.top_k, layer.experts)
    return _empty(count, padded(width), BLOCK, dtype=ELEMENT), _empty(count, padded(width))


def _sizes(layer: FfnLayer) -> tuple[int, int, int]:
    """D, I', and H'."""
    inner = padded(inner_width(columns_of(layer.w1, layer.spec.layout1), layer.spec.glu))
    return columns_of(layer.w2, layer.spec.layout2), inner, inner * (1 if layer.spec.glu == "none" else 2)


def _routing(layer: FfnLayer) -> tuple[Tensor, Tensor]:
    return _empty(_TOKENS * layer.top_k, dtype=torch.int32), _empty(layer.experts + 1, dtype=torch.int32)


def _forward(layer: FfnLayer, training: bool) -> None:
    spec, (hidden, inner, width), (v, offs) = layer.spec, _sizes(layer), _routing(layer)
    dtype, gated = layer.w1.dtype, spec.glu != "none"
    first, second = _weight(layer, width, hidden), _weight(layer, hidden, inner)
    for made, w, w3, layout, glu in (
        (first, layer.w1, layer.w3, spec.layout1, spec.glu),
        (second, layer.w2, None, spec.layout2, "none"),
    ):
        turned = tuple(t.transpose(1, 2).contiguous() for t in made) if training else (None, None)
        _QUANTISE(*made, *turned, w, w3, layout, glu)
    x = fp8_rows.quantize_rows_fp8(_empty(_TOKENS, hidden, dtype=dtype))
    bias = _empty(layer.experts, width) if layer.b1 is not None or layer.b3 is not None else None
    step = (spec.activation, gated, tuple(spec.params))
    _, _, *a = _UP(*x, *first, bias, v, offs, layer.top_k, *step, training and not spec.recompute_h)
    if training and spec.recompute_h:
        _UP(*x, *first, bias, v, offs, layer.top_k, *step, True)
    bias = None if layer.b2 is None else _empty(layer.experts, padded(hidden))
    _PRODUCT(*a, *second, bias, offs, hidden, dtype)


def _backward(layer: FfnLayer) -> None:
    spec, (hidden, inner, width), (v, offs) = layer.spec, _sizes(layer), _routing(layer)
    n, dtype, wanted = _TOKENS * layer.top_k, layer.w1.dtype, layer.grads
    needs = "x" in wanted, bool(wanted.intersection(_FIRST)), "w2" in wanted, "top_k_weights" in wanted
    step = (spec.activation, spec.glu != "none", tuple(spec.params), needs)
    operands = (*_rows(_TOKENS, hidden), *_weight(layer, inner, hidden), *_rows(n, width), None)
    fp8.esmm_act_backward_fp8(*operands, v, offs, layer.top_k, *step)
    for shared in (False, True):
        fp8_rows.quantize_columns_fp8(_empty(_TOKENS, hidden, dtype=dtype), v, offs, layer.top_k, shared)
    for name, w, layout in (("w1", layer.w1, spec.layout1), ("w2", layer.w2, spec.layout2)):
        if name in wanted:
            add = name in layer.added
            rows, columns = padded(w.shape[1]), padded(w.shape[2])
            out = _empty(*w.shape, dtype=torch.float32 if add else dtype)
            fp8.estmm_fp8(out, *_groups(layer, rows), *_groups(layer, columns), offs, layout == "nk", add)
    if wanted.intersection(("b1", "b3")) and (layer.b1 is not None or layer.b3 is not None):
        fp8_rows.ess_fp8(*_groups(layer, width), offs)
    if "x" in wanted:
        _PRODUCT(*_rows(n, width), *_weight(layer, hidden, width), None, offs, hidden, dtype)
