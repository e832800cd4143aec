"""``hexa::moe_ffn_sources`` on CUDA with few rows an expert: the activation goes into the product of packed first projections."""

from __future__ import annotations

from torch import Tensor

from hexa_fx.codegen.heuristics import row_bucket
from hexa_fx.cuda import packed
from hexa_fx.cuda.fallback import generic
from hexa_fx.cuda.packed import PackedProduct, streamed
from hexa_fx.cuda.rows import combine, reindex
from hexa_fx.ops.fixed_order import is_fixed
from hexa_fx.ops.projection import Rows, narrowed, project
from hexa_fx.ops.table import Esmm, EsmmAct
from hexa_fx.ops.table_layers import MoeFfnSources


def moe_ffn_sources(o: MoeFfnSources) -> Tensor:
    """See hexa_fx.ops.moe_ffn_sources. With nothing added to packed weights, four launches."""
    y = _few_rows(o)
    if y is None:
        y = generic("moe_ffn_sources")(*o)
    return y


def _few_rows(o: MoeFfnSources) -> Tensor | None:
    """The result; None where the general path has to compute it."""
    top_k, experts = o.top_k_index.shape[1], o.w1.shape[0]
    formats = [None if p.a is not None else streamed(p.format, p.scales, p.layout) for p in (*o.first, o.second)]
    format = formats[0]
    if format is None or any(each is not format for each in formats[:-1]):
        return None
    if row_bucket(o.top_k_index.numel(), experts) > packed.MOST_BUCKET:
        return None
    v, inv, offs = reindex(o.top_k_index, experts)
    base = o.to(EsmmAct, v=v, offs=offs, top_k=top_k, layout=o.layout1, params=tuple(o.params), keep_h=False)
    first = PackedProduct(base, o.s1[0], None if o.w3 is None else o.s3[0], format)
    if is_fixed() or packed.unsupported(first) or (o.w3 is not None and (o.b1 is None) != (o.b3 is None)):
        return None
    _, a = packed.esmm_act(first)
    down = Esmm(a, o.w2, o.b2, None, offs, 1, "nk").plain
    second = None if formats[-1] is None else PackedProduct(down, o.s2[0], None, formats[-1])
    if second is None or packed.unsupported(second):
        rows = Rows(None, offs, 1)
        y = project(a, o.second, rows, narrowed(a, o.second, rows))
    else:
        y = packed.esmm(second)
    return combine(y, o.top_k_weights, inv, offs, top_k)  # type: ignore[no-any-return]
