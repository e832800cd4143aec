"""reindex, combine, ess, ess_add, activate, activate_backward, scaled_transpose: bandwidth-bound, static grids, no host read.

Arguments and results are those of the operators' own docstrings (hexa_fx.ops).
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hexa_fx.codegen.family_rows import COMBINE_THREADS, ID_NAMES, TRANSPOSE_SIDE, UNROLLED_TOP_K, reindex_warps
from hexa_fx.codegen.spec import KernelSpec, Option
from hexa_fx.config import checked_mode
from hexa_fx.cuda.calls import KERNELS, cuda_kernel
from hexa_fx.cuda.choosing import cached_choice, described_card
from hexa_fx.cuda.fallback import Unsupported
from hexa_fx.cuda.operands import DTYPES, aligned, constants_of, contiguous, dense_rows
from hexa_fx.cuda.planning import CannotPlan, Operand, is_same_memory, launch, planning_of
from hexa_fx.formats.format import ceil_div
from hexa_fx.ops.reindex import out_of_range
from hexa_fx.ops.rows import accumulate_dtype, row_count
from hexa_fx.ops.table import Activate, ActivateBackward, Activated, Combine, Ess, EssAdd, Reindex
from hexa_fx.ops.table_variants import ScaledTranspose

log = logging.getLogger(__name__)

ID_TYPES = dict(zip((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8), ID_NAMES, strict=True))
SEGMENT_ROWS = 256
"""Rows of one expert that one block of ess sums."""

ONE_BLOCK_SLOTS = 4096
"""Slots that reindex sorts in one launch."""
_BLOCK_SLOTS = 2048
_MAX_BLOCKS = 64


def reindex(top_k_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """A stable counting sort: one launch up to 4096 slots, two beyond."""
    if ids_are_checked():
        _check_ids(top_k_index, num_experts)
    return _reindex(top_k_index, num_experts)


@cuda_kernel("reindex")
def _reindex(o: Reindex) -> tuple[Tensor, Tensor, Tensor]:
    arch, ids, num_experts = planning_of(o.top_k_index).card.arch, o.top_k_index.contiguous(), o.num_experts
    n, warps = ids.numel(), reindex_warps(num_experts, arch)
    if not warps:
        raise Unsupported(f"{num_experts} experts: the tallies of one warp do not fit in shared memory")
    spec = KernelSpec("reindex", "reindex_place", arch)
    spec = spec.with_options(id=ID_TYPES[ids.dtype], warps=warps, experts=num_experts)
    blocks = 1 if n <= ONE_BLOCK_SLOTS else min(_MAX_BLOCKS, ceil_div(n, _BLOCK_SLOTS))
    chunk = ceil_div(ceil_div(max(n, 1), blocks * warps), 32) * 32
    v, inv, offs = o.results()
    counts = ids.new_empty((blocks, num_experts + 1), dtype=torch.int32) if blocks > 1 else None
    # few slots need no counting
    for each in (replace(spec, op="reindex_count"), spec) if blocks > 1 else (spec,):
        fields = {"ids": ids, "counts": counts, "v": v, "inv": inv, "offs": offs}
        launch(ids, each, (blocks, 1, 1), **fields, n=n, experts=num_experts, chunk=chunk)
    return v, inv, offs


KERNELS["reindex"] = reindex


@cached_choice
def ids_are_checked() -> bool:
    """Whether every call's ids are read and checked."""
    return checked_mode()


def _check_ids(top_k_index: Tensor, num_experts: int) -> None:
    if isinstance(top_k_index, Operand):
        raise CannotPlan("ids are checked in every call")
    if described_card() is not None or not top_k_index.numel() or torch.cuda.is_current_stream_capturing():
        return
    low, high = (int(v) for v in torch.aminmax(top_k_index))
    if low < 0 or high > num_experts:
        raise out_of_range(low, high, num_experts)


@cuda_kernel("combine")
def combine(o: Combine) -> Tensor:
    """One block a token, sixteen bytes a thread; all k rows of a chunk are in flight at once."""
    y, weights, out = dense_rows(o.y), contiguous(o.top_k_weights), o.results()
    tokens, width = out.shape
    spec = combine_spec("combine", out, weights, o.top_k, max(1, ceil_div(width, 8)), aligned(y, out))
    pointers = {"y": y, "weights": weights, "inv": o.inv, "routed": _routed(o.offs), "out": out}
    sizes = {"y_stride": y.stride()[0], "out_stride": width, "width": width, "top_k": o.top_k}
    launch(y, spec, (tokens if width else 0, 1, 1), **pointers, **sizes)
    return out


def combine_spec(family: str, out: Tensor, weights: Tensor | None, top_k: int, chunks: int, fit: bool) -> KernelSpec:
    """The kernel of ``family`` that sums rows of so many chunks to ``out``; see `rows_spec`."""
    unrolled = top_k if top_k in UNROLLED_TOP_K and out.dtype != torch.float64 else 0
    # The block that wastes the fewest threads, and the largest of equals.
    threads = min(COMBINE_THREADS, key=lambda t: (ceil_div(chunks, t) * t, -t))
    return rows_spec(family, "combine", out, weights, fit, top_k=unrolled, threads=threads)


def rows_spec(
    family: str,
    op: str,
    x: Tensor,
    weights: Tensor | None = None,
    fit: bool = True,
    fields: Any = (),
    **options: Option,
) -> KernelSpec:
    """A kernel for rows like x, with routing weights or without. ``fit``: all rows begin at multiples of 16 bytes."""
    static = {"dtype": DTYPES[x.dtype], "scale": weights is not None, "aligned": fit, **dict(fields)}
    options["weights"] = "f32" if weights is None else DTYPES[weights.dtype].name
    return KernelSpec(family, op, planning_of(x).card.arch, **static, options=tuple(sorted(options.items())))


@cuda_kernel("ess")
def ess(o: Ess) -> Tensor:
    """Sums segments of rows, then the segments of every expert; deterministic."""
    out: Tensor = o.results()
    _sum_rows(o, out, False)
    return out


@cuda_kernel("ess_add")
def ess_add(o: EssAdd) -> None:
    """As `ess`, added to what ``into`` holds."""
    if o.into.dtype != accumulate_dtype(o.into.dtype):
        planning_of(o.into).run(Tensor.add_, o.into, ess(*o.to(Ess)))
        return
    held = o.into if o.into.is_contiguous() else substitute(o.into)
    _sum_rows(o, held, True)
    settle(o.into, held)


def substitute(into: Tensor) -> Tensor:
    """Zeros for a kernel to add to, where no kernel supports the strides of a gradient buffer. Logged once; see `settle`."""
    _say_once(tuple(into.shape), into.stride())
    return into.new_zeros(into.shape)


def settle(into: Tensor | None, held: Tensor | None) -> None:
    """Adds a `substitute` to the buffer that it stood in for."""
    if into is not None and held is not None and not is_same_memory(into, held):
        planning_of(into).run(Tensor.add_, into, held)


@cache
def _say_once(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    log.warning(
        "no kernel supports a gradient buffer %s with strides %s; torch adds to it from a second buffer", shape, strides
    )


def _sum_rows(o: Ess, out: Tensor, accumulate: bool) -> None:
    g, scale, v, offs = dense_rows(o.g), contiguous(o.scale), o.v, o.offs
    n, experts, width = row_count(g, v), offs.shape[0] - 1, g.shape[1]
    segments = n // SEGMENT_ROWS + min(experts, n)
    partial = g.new_empty((segments, width), dtype=accumulate_dtype(g.dtype))
    fields: dict[str, Any] = {"g": g, "v": v, "offs": offs, "scale": scale, "partial": partial, "out": out}
    fields |= {"g_stride": g.stride()[0], "experts": experts, "width": width, "top_k": o.top_k}
    columns = ceil_div(width, 256)
    static = {"bm": SEGMENT_ROWS, "gather": v is not None}
    first = rows_spec("ess", "ess_partial", g, scale, aligned(g), static)
    last = rows_spec("ess", "ess_finish", g, fields={"bm": SEGMENT_ROWS})
    launch(g, first, (columns, segments, 1), **fields)
    launch(g, last.adding() if accumulate else last, (columns, experts, 1), **fields)


@cuda_kernel("activate")
def activate(o: Activate) -> Tensor:
    """Each thread computes eight columns."""
    a = o.results()
    _launch_activation("activate", o, h=dense_rows(o.h), a=a)
    return a


@cuda_kernel("activate_backward")
def activate_backward(o: ActivateBackward) -> tuple[Tensor, Tensor, Tensor]:
    """One pass over da and h: dh, the scaled a, and the routing weight's gradient as a reduction over the row."""
    h, da, weights, (dh, a, dweights) = dense_rows(o.h), dense_rows(o.da), contiguous(o.top_k_weights), o.results()
    assert weights is None or (o.v is not None and o.offs is not None)
    routed = None if weights is None or o.offs is None else _routed(o.offs)
    results = {"a": a, "dh": dh, "dweights": dweights}
    _launch_activation("activate_backward", o, h=h, da=da, weights=weights, v=o.v, routed=routed, **results)
    return dh, a, dweights


def _launch_activation(op: str, o: Activated, h: Tensor, a: Tensor, **more: Tensor | None) -> None:
    """Of the pre-activation; more: other pointers of the kernel."""
    da, weights, dh = more.get("da"), more.get("weights"), more.get("dh")
    n, width = a.shape
    chunks = ceil_div(width, 8)
    # As many warps as leave the fewest lanes idle, and the most of equals.
    warps = min((1, 2, 4), key=lambda w: (ceil_div(chunks, 32 * w) * w, -w))
    static = {"activation": o.activation, "glu": "concat" if o.glu == "split" else o.glu}  # h is laid out alike
    spec = rows_spec("activate", op, h, weights, aligned(h, da, a, dh), static, warps_per_row=warps)
    sizes = {"h_stride": h.stride()[0], "da_stride": 0 if da is None else da.stride()[0], "rows": n, "width": width}
    blocks = ceil_div(n, 4 // warps) if width or weights is not None else 0
    launch(h, spec, (blocks, 1, 1), h=h, a=a, **more, **sizes, act=constants_of(o.activation, o.params))


@cuda_kernel("scaled_transpose")
def scaled_transpose(o: ScaledTranspose) -> Tensor:
    """Tiles of 64 x 64, through shared memory."""
    x, out = o.x, o.results()
    rows, columns = x.shape
    tiles, name = ceil_div(columns, TRANSPOSE_SIDE), "scaled_transpose"
    spec = KernelSpec(name, name, planning_of(x).card.arch, dtype=DTYPES[x.dtype], out_dtype=DTYPES[o.dtype])
    fields = {"x": x, "out": out, "rows": rows, "columns": columns, "scale": o.scale, "column_tiles": tiles}
    launch(x, spec, (tiles * ceil_div(rows, TRANSPOSE_SIDE), 1, 1), **fields)
    return out


def _routed(offs: Tensor) -> Tensor:
    """The last offset, which is the number of rows that have an expert."""
    return offs[-1:]
