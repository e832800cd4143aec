"""Legal calls of every operator, small, by its name: what a check accepts, and what there is to spoil."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from hexa_fx.formats import format_of

E, T, K, D, INNER, R = 4, 10, 2, 128, 256, 3
n = T * K
F32, I32, E4M3 = torch.float32, torch.int32, torch.float8_e4m3fn
FORMAT = "nf4"
Call = tuple[str, tuple[Any, ...]]


def floats(*shape: int) -> Tensor:
    return torch.randn(shape)


def elements(*shape: int) -> Tensor:
    return torch.randn(shape).to(E4M3)


def weight(layout: str, outputs: int, inputs: int) -> Tensor:
    return floats(E, outputs, inputs) if layout == "nk" else floats(E, inputs, outputs)


def packed(layout: str, outputs: int, inputs: int) -> tuple[Tensor, list[Tensor], str]:
    codes, *scales = format_of(FORMAT).pack_all(weight(layout, outputs, inputs))
    return codes, scales, FORMAT


def routing() -> tuple[Tensor, Tensor, Tensor]:
    v, inv, offs = torch.ops.hexa.reindex(torch.arange(n).view(T, K) % E, E)
    return v, inv, offs


def calls() -> Iterator[Call]:
    """In both layouts, with and without gathered rows, biases, gates and gate and up."""
    torch.manual_seed(0)
    v, inv, offs = routing()
    index, gates = torch.arange(n).view(T, K) % E, torch.rand(T, K)
    yield "reindex", (index, E)
    yield "scaled_transpose", (floats(6, 8), torch.float64, 0.5)
    for w in (gates, None):
        yield "combine", (floats(n, D), w, inv, offs, K)
    for layout, gathered in product(("nk", "kn"), (True, False)):
        yield from _products(layout, gathered, v, offs, gates)
    for glu in ("none", "concat", "split"):
        yield from _layers(glu, "nk" if glu == "none" else "kn", index, gates, v, inv, offs)
    yield from _fp8(v, inv, offs, gates)


def _products(layout: str, gathered: bool, v: Tensor, offs: Tensor, gates: Tensor) -> Iterator[Call]:
    rows = (v, offs, K, layout) if gathered else (None, offs, 1, layout)
    x, bias = floats(T if gathered else n, D), floats(E, INNER) if gathered else None
    u, c, w = floats(n, R), weight(layout, INNER, R), weight(layout, INNER, D)
    yield "esmm", (x, w, bias, *rows)
    yield "esmm_low_rank", (x, w, bias, *rows, u, c)
    yield "esmm_packed", (x, *packed(layout, INNER, D), bias, *rows)
    yield "esmm_packed_low_rank", (x, *packed(layout, INNER, D), bias, *rows, u, c)
    index = v if gathered else None
    yield "ess", (floats(T if gathered else n, D), index, offs, rows[2], gates if gathered else None)
    yield "ess_add", (floats(E, D), floats(T if gathered else n, D), index, offs, rows[2], gates if gathered else None)
    grads = (x, floats(n, INNER), index, None, offs, rows[2], layout)
    yield "estmm", grads
    yield "estmm_add", (weight(layout, INNER, D), *grads)
    yield "estmm", (floats(n, INNER), floats(T, D), None, v, offs, K, layout)
    both = (x, floats(n, INNER), w, index, offs, rows[2], layout)
    yield "esfk", (*both, gathered)
    yield "esfk_add", (weight(layout, INNER, D), floats(E, INNER) if gathered else None, *both)
    factor = weight("kn" if layout == "nk" else "nk", D, R) if gathered else None
    last = layout == "kn"
    more = (gates if gathered else None, index, offs, rows[2], layout, F32, 2.0, last)
    yield "low_rank_gradients", (x, u, None if factor is None else weight(layout, R, D), *more)
    for glu in ("none", "concat", "interleaved", "split"):
        yield from _activated(glu, layout, x, rows, v, offs, gates if gathered else None)


def _activated(
    glu: str, layout: str, x: Tensor, rows: tuple[Any, ...], v: Tensor, offs: Tensor, gates: Tensor | None
) -> Iterator[Call]:
    split, keep = glu == "split", gates is not None
    width = INNER if glu in ("none", "split") else 2 * INNER
    steps, u, c = ("silu", glu, []), floats(n, R), weight(layout, width, R)
    w3, b3 = (weight(layout, width, D), floats(E, width)) if split else (None, None)
    act = (x, weight(layout, width, D), floats(E, width), w3, b3, *rows, *steps)
    yield "esmm_act", (*act, keep)
    yield "esmm_act_low_rank", (*act, keep, u, c, weight(layout, width, R) if split else None)
    if not split:
        yield "esmm_act_packed", (x, *packed(layout, width, D), floats(E, width), *rows, *steps, keep, u, c)
        yield "esmm_act_packed", (x, *packed(layout, width, D), None, *rows, *steps, keep, None, None)
    h = floats(n, INNER if glu == "none" else 2 * INNER)
    yield "activate", (h, *steps)
    yield "activate_backward", (floats(n, INNER), h, gates, v, offs, *steps)
    back = (h, gates, v, offs, K, layout, *steps)
    yield "esmm_act_backward", (floats(T, D), weight(layout, INNER, D), *back)
    yield "esmm_act_backward_low_rank", (floats(T, D), weight(layout, INNER, D), *back, u, weight(layout, INNER, R))
    yield "esmm_act_backward_packed", (floats(T, D), *packed(layout, INNER, D), *back, u, weight(layout, INNER, R))
    yield "esmm_act_backward_packed", (floats(T, D), *packed(layout, INNER, D), *back, None, None)


def _layers(
    glu: str, layout: str, index: Tensor, gates: Tensor, v: Tensor, inv: Tensor, offs: Tensor
) -> Iterator[Call]:
    split, width = glu == "split", 2 * INNER if glu == "concat" else INNER
    w3, b3 = (weight(layout, width, D), floats(E, width)) if split else (None, None)
    weights = (gates, weight(layout, width, D), floats(E, width), w3, b3, weight("nk", D, INNER), floats(E, D))
    static, routed = ("silu", glu, [], layout, "nk", split), (v, inv, offs)
    for name in ("moe_ffn", "moe_ffn_forward", "moe_ffn_fixed", "moe_ffn_fixed_forward"):
        yield name, (floats(T, D), index, *weights, *static)
    needs = [True, True, *(w is not None for w in weights[1:])]
    hidden = width * (2 if split else 1)
    kept = (floats(T, D), floats(T, D), None if split else floats(n, hidden))
    yield "moe_ffn_backward", (*kept, *routed, *weights, K, *static, needs)
    up = (floats(E, R, D), floats(E, width, R)) if split else (None, None)
    factors = (floats(E, R, D), floats(E, width, R), *up, floats(E, 5, INNER), floats(E, D, 5))
    dense = (*factors, [1.0, 2.0, 0.5], [], [], [], ["dense"] * 3)
    down, scales, format = packed("nk", D, INNER)
    mixed = (*factors, [1.0, 2.0, 0.5], [], [], scales, ["dense", "dense", format])
    for name in ("moe_ffn_sources", "moe_ffn_sources_forward"):
        for fixed in ("", "_fixed"):
            full = name.replace("sources", f"sources{fixed}")
            yield full, (floats(T, D), index, *weights, *dense, *static)
            yield full, (floats(T, D), index, *weights[:5], down, weights[6], *mixed, *static)
    u = [floats(n, R), floats(n, R) if split else floats(0, 0), floats(n, 5)]
    marks = [*needs, *(factor is not None for factor in factors)]
    yield "moe_ffn_sources_backward", (*kept, *u, *routed, *weights, *dense, *static, K, marks)
    yield "moe_ffn_fp8", (floats(T, D), index, *weights, *static, False)
    yield "moe_ffn_fp8_forward", (floats(T, D), index, *weights, *static, False)
    q, s = torch.ops.hexa.quantize_rows_fp8(floats(T, D), True)
    h, hs = torch.ops.hexa.quantize_rows_fp8(floats(n, hidden), False)
    eight = (floats(T, D), q, s, *((None, None) if split else (h, hs)), *routed)
    yield "moe_ffn_fp8_backward", (*eight, *weights, *static, False, K, needs)


def _fp8(v: Tensor, inv: Tensor, offs: Tensor, gates: Tensor) -> Iterator[Call]:
    quantise = torch.ops.hexa
    x, dy = (quantise.quantize_rows_fp8(floats(T, D), True) for _ in range(2))
    yield "quantize_rows_fp8", (floats(T, 100), False)
    yield "quantize_columns_fp8", (floats(T, 100), v, offs, K)
    yield "quantize_columns_fp8", (floats(n, 100), None, offs, 1)
    yield "group_rows_fp8", (*x, v, offs, K)
    for layout, glu in (("nk", "none"), ("kn", "split"), ("nk", "concat")):
        sizes = (E, INNER if glu == "none" else 2 * INNER, D)
        buffers = [
            elements(*sizes),
            floats(E, sizes[1] // 128, 1),
            elements(E, D, sizes[1]),
            floats(E, 1, sizes[1] // 128),
        ]
        w, w3 = (
            weight(layout, 2 * INNER if glu == "concat" else INNER, D),
            weight(layout, INNER, D) if glu == "split" else None,
        )
        yield "quantize_weight_fp8", (*buffers, w, w3, layout, glu)
    w1, w2 = (elements(E, 2 * INNER, D), floats(E, 4, 1)), (elements(E, D, INNER), floats(E, 1, 2))
    yield "esmm_act_fp8", (*x, *w1, floats(E, 2 * INNER), v, offs, K, "silu", True, [], True)
    a = quantise.quantize_rows_fp8(floats(n, INNER), False)
    yield "esmm_fp8", (*a, *w2, floats(E, D), offs)
    y = torch.ops.hexa.esmm_fp8(*a, *w2, None, offs)
    yield "combine_fp8", (*y, gates, inv, offs, K, 100, torch.bfloat16)
    h = quantise.quantize_rows_fp8(floats(n, 2 * INNER), False)
    back = (elements(E, INNER, D), floats(E, 2, 1))
    yield "esmm_act_backward_fp8", (*dy, *back, *h, gates, v, offs, K, "silu", True, [], [True] * 4)
    of_x, of_g = (quantise.quantize_columns_fp8(floats(n, width), None, offs, 1) for width in (INNER, D))
    yield "estmm_fp8", (floats(E, INNER, D), *of_x, *of_g, offs, False, False)
    yield "ess_fp8", (*of_g, offs)
