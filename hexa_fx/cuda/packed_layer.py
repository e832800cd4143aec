"""``hexa::moe_ffn_sources`` on CUDA with few rows an expert: the activation goes into the product of packed first projections."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hexa_fx import registry
from hexa_fx.codegen.heuristics import row_bucket
from hexa_fx.cuda import packed
from hexa_fx.cuda.calls import falls_back
from hexa_fx.cuda.choosing import card_of, collection, on_forget
from hexa_fx.cuda.fallback import generic
from hexa_fx.cuda.packed import PackedProduct, four_bit
from hexa_fx.cuda.rows import combine, reindex
from hexa_fx.ops.fixed_order import is_fixed
from hexa_fx.ops.operands import Esmm, EsmmAct
from hexa_fx.ops.projection import Rows, narrowed, project
from hexa_fx.ops.sources_arguments import Arguments

_seen: set[tuple[object, ...]] = set()
on_forget(_seen.clear)


@falls_back("moe_ffn_sources_forward")
def moe_ffn_sources_forward(*args: Any) -> tuple[Tensor, ...]:
    """See hexa_fx.ops.moe_ffn_sources: operator by operator."""
    _see(Arguments(*args))
    found: tuple[Tensor, ...] = generic("moe_ffn_sources_forward")(*args)
    return found


def _see(o: Arguments) -> None:
    """At the first call of a layer, has all its kernels built beside it."""
    if collection() is not None:
        return
    kind = o.x.device.index, *o.kind
    if kind not in _seen:
        _seen.add(kind)
        registry.sources_requests()(o, card_of(o.x.device.index))


@falls_back("moe_ffn_sources")
def moe_ffn_sources(*args: Any) -> Tensor:
    """See hexa_fx.ops.moe_ffn_sources. With nothing added to packed weights, four launches."""
    _see(Arguments(*args))
    y = _few_rows(Arguments(*args))
    if y is None:
        y = generic("moe_ffn_sources")(*args)
    return y


def _few_rows(o: Arguments) -> Tensor | None:
    """The result; None where the general path has to compute it."""
    top_k, experts = o.top_k_index.shape[1], o.w1.shape[0]
    formats = [None if p.a is not None else four_bit(p.format, p.scales, p.layout) for p in (*o.first, o.second)]
    format = formats[0]
    if format is None or any(each is not format for each in formats[:-1]):
        return None
    if row_bucket(o.top_k_index.numel(), experts) > packed.MOST_BUCKET:
        return None
    v, inv, offs = reindex(o.top_k_index, experts)
    static: Any = top_k, o.layout1, o.activation, o.glu, tuple(o.params), False
    base = EsmmAct(o.x, o.w1, o.b1, o.w3, o.b3, v, offs, *static)
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
