"""``hexa::moe_ffn_sources`` on CUDA with few rows an expert: the activation goes into the product of packed first projections."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hexa_fx.codegen.heuristics import row_bucket
from hexa_fx.cuda import packed
from hexa_fx.cuda.packed import PackedProduct, Streamed, streamed
from hexa_fx.cuda.rows import combine, reindex
from hexa_fx.ops import library, projection
from hexa_fx.ops.fixed_order import is_fixed
from hexa_fx.ops.records import DENSE
from hexa_fx.ops.table import EsmmAct, routing_of
from hexa_fx.ops.table_layers import MoeFfnSources


def has_few_rows(o: MoeFfnSources) -> bool:
    """Whether a call has so few rows an expert that packed weights are only streamed, and nothing is added to the first ones."""
    few = row_bucket(o.top_k_index.numel(), o.experts) <= packed.MOST_BUCKET
    return few and not is_fixed() and o.a1 is None and o.a3 is None and _first_format(o) is not None


def few_rows(o: MoeFfnSources) -> Tensor | None:
    """The result on operands, of four launches; None where the general path has to compute it."""
    format, alike = _first_format(o), o.w3 is None or (o.b1 is None) == (o.b3 is None)
    if format is None or not has_few_rows(o) or not alike:
        return None
    top_k = o.top_k
    v, _, offs = routing_of(o.top_k_index, o.experts)
    base = o.to(EsmmAct, v=v, offs=offs, top_k=top_k, layout=o.layout1, params=tuple(o.params), keep_h=False)
    first = PackedProduct(base, o.s1[0], None if o.w3 is None else o.s3[0], format)
    if packed.unsupported(first):
        return None
    v, inv, offs = reindex(o.top_k_index, o.experts)
    _, a = packed.esmm_act(first._replace(base=base._replace(v=v, offs=offs)))
    return combine(_down(o, a, None, offs, 1), o.top_k_weights, inv, offs, top_k)  # type: ignore[no-any-return]


def _down(o: MoeFfnSources, a: Tensor, *rows: Any) -> Tensor:
    """The second projection of rows in expert order."""
    name, added = "esmm", tuple[Any, ...]()
    weight: tuple[Any, ...] = (o.w2,)
    if o.formats[2] != DENSE:
        name, weight = "esmm_packed", (o.w2, o.s2, o.formats[2])
    if o.a2 is not None:
        u = projection.narrowed.on("cuda")(a, o.a2, *rows)
        added, name = (u, projection.left.on("cuda")(u, o.c2, o.alphas[2], o.layout2)), f"{name}_low_rank"
    return library.kernel_for(name, "cuda")(a, *weight, o.b2, *rows, o.layout2, *added)  # type: ignore[no-any-return]


def _first_format(o: MoeFfnSources) -> Streamed | None:
    """The format of the first projections, if kernels know it."""
    format = streamed(o.formats[0], o.s1, o.layout1)
    up = format if o.w3 is None else streamed(o.formats[1], o.s3, o.layout1)
    return format if up is format else None
