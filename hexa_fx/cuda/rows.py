"""reindex, combine, ess, ess_add, activate and activate_backward on CUDA: bandwidth-bound kernels, static grids, no host read.

Arguments and results are those of the operators' own docstrings (hexa_fx.ops).
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hexa_fx.codegen.families import get_family
from hexa_fx.codegen.family_reindex import reindex_warps
from hexa_fx.codegen.family_rows import COMBINE_THREADS, UNROLLED_TOP_K
from hexa_fx.codegen.spec import Glu, KernelSpec
from hexa_fx.config import checked_mode
from hexa_fx.cuda.arguments import Inside, numbers_of
from hexa_fx.cuda.choosing import cached_choice, card_of, collection, described
from hexa_fx.cuda.fallback import Unsupported, cuda_kernel
from hexa_fx.cuda.launch import Kernel, kernel_of, launch
from hexa_fx.cuda.operands import DTYPES, aligned, ceil_div, constants_of, dense_rows
from hexa_fx.errors import InputError
from hexa_fx.ops.operands import ActivateBackward
from hexa_fx.ops.rows import row_count

log = logging.getLogger(__name__)

ID_TYPES = {
    torch.int64: "long long",
    torch.int32: "int",
    torch.int16: "short",
    torch.int8: "signed char",
    torch.uint8: "unsigned char",
}
SEGMENT_ROWS = 256
"""Rows of one expert that one block of ess sums."""

_REINDEX, _COMBINE, _ESS, _ACTIVATE = (
    numbers_of(get_family(name).args) for name in ("reindex", "combine", "ess", "activate")
)
ONE_BLOCK_SLOTS = 4096
"""Slots that reindex sorts in one launch."""
_BLOCK_SLOTS = 2048
_MAX_BLOCKS = 64


@cuda_kernel("reindex")
def reindex(top_k_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """A stable counting sort: one launch up to 4096 slots, two beyond."""
    if _checked() and described() is None:
        _check_ids(top_k_index, num_experts)
    ids = top_k_index.contiguous()
    device, n = ids.device.index, ids.numel()
    count, place, grid, sizes = _reindex_launch(card_of(device).arch, ids.dtype, n, num_experts)
    v = torch.empty(n, dtype=torch.int32, device=ids.device)
    inv, offs = torch.empty_like(v), v.new_empty(num_experts + 1)
    counts = None if count is None else v.new_empty((grid[0], num_experts + 1))
    args = (((ids, counts, v, inv, offs), _REINDEX.pack(*sizes)),)
    if count is not None:
        launch(count, device, grid, args)
    launch(place, device, grid, args)
    if collection() is not None:  # torch's operators may index by them
        for index in (v, inv, offs):
            index.zero_()
    return v, inv, offs


@cached_choice
def _checked() -> bool:
    return checked_mode()


@cached_choice
def _reindex_launch(
    arch: int, dtype: torch.dtype, n: int, experts: int
) -> tuple[Kernel | None, Kernel, tuple[int, int, int], tuple[int, int, int, int]]:
    """Counting and placing kernel, their grid, and the numbers among their arguments. Few slots need no counting."""
    warps = reindex_warps(experts, arch)
    if not warps:
        raise Unsupported(f"{experts} experts: the tallies of one warp do not fit in shared memory")
    spec = KernelSpec("reindex", "reindex_place", arch).with_options(id=ID_TYPES[dtype], warps=warps, experts=experts)
    blocks = 1 if n <= ONE_BLOCK_SLOTS else min(_MAX_BLOCKS, ceil_div(n, _BLOCK_SLOTS))
    chunk = ceil_div(ceil_div(max(n, 1), blocks * warps), 32) * 32
    count = kernel_of(replace(spec, op="reindex_count")) if blocks > 1 else None
    return count, kernel_of(spec), (blocks, 1, 1), (n, experts, chunk, 0)


def _check_ids(top_k_index: Tensor, num_experts: int) -> None:
    if not top_k_index.numel() or torch.cuda.is_current_stream_capturing():
        return
    low, high = (int(v) for v in torch.aminmax(top_k_index))
    if low < 0 or high > num_experts:
        raise InputError(
            f"hexa::reindex: expert ids run from {low} to {high}; expected 0 to {num_experts - 1}, or {num_experts} for "
            "a slot that contributes nothing"
        )


@cuda_kernel("combine")
def combine(y: Tensor, top_k_weights: Tensor | None, inv: Tensor, offs: Tensor, top_k: int) -> Tensor:
    """One block a token, sixteen bytes a thread; all k rows of a chunk are in flight at once."""
    y = dense_rows(y)
    tokens, width, device = inv.shape[0] // top_k, y.shape[1], y.device.index
    out = y.new_empty((tokens, width))
    weights = None if top_k_weights is None else top_k_weights.contiguous()
    w_dtype = None if weights is None else weights.dtype
    kernel = _combine_kernel(card_of(device).arch, y.dtype, w_dtype, top_k, width, aligned(y, out))
    pointers = (y, weights, inv, _routed(offs), out)
    args = ((pointers, _COMBINE.pack(y.stride()[0], width, width, top_k)),)
    launch(kernel, device, (tokens if width else 0, 1, 1), args)
    return out


@cuda_kernel("ess")
def ess(g: Tensor, v: Tensor | None, offs: Tensor, top_k: int, scale: Tensor | None) -> Tensor:
    """Sums segments of rows, then the segments of every expert; deterministic."""
    out = g.new_empty((offs.shape[0] - 1, g.shape[1]))
    _sum_rows(out, False, g, v, offs, top_k, scale)
    return out


@cuda_kernel("ess_add")
def ess_add(into: Tensor, g: Tensor, v: Tensor | None, offs: Tensor, top_k: int, scale: Tensor | None) -> None:
    """As `ess`, added to what ``into`` holds."""
    held = into if into.is_contiguous() else substitute(into)
    _sum_rows(held, True, g, v, offs, top_k, scale)
    settle(into, held)


def substitute(into: Tensor) -> Tensor:
    """Zeros for a kernel to add to, where no kernel supports the strides of a gradient buffer. Logged once; see `settle`."""
    _say_once(tuple(into.shape), into.stride())
    return torch.zeros_like(into, memory_format=torch.contiguous_format)


def settle(into: Tensor | None, held: Tensor | None) -> None:
    """Adds a `substitute` to the buffer that it stood in for."""
    if into is not None and held is not None and held.data_ptr() != into.data_ptr() and collection() is None:
        into.add_(held)


@cache
def _say_once(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    log.warning(
        "no kernel supports a gradient buffer %s with strides %s; torch adds to it from a second buffer", shape, strides
    )


def _sum_rows(
    out: Tensor, accumulate: bool, g: Tensor, v: Tensor | None, offs: Tensor, top_k: int, scale: Tensor | None
) -> None:
    g = dense_rows(g)
    scale = None if scale is None else scale.contiguous()
    n, experts, width, device = row_count(g, v), offs.shape[0] - 1, g.shape[1], g.device.index
    wide = torch.float64 if g.dtype == torch.float64 else torch.float32
    segments = n // SEGMENT_ROWS + min(experts, n)
    partial = torch.empty((segments, width), dtype=wide, device=g.device)
    w_name = "f32" if scale is None else DTYPES[scale.dtype].name
    args = (((g, v, offs, scale, partial, out), _ESS.pack(g.stride()[0], experts, width, top_k, 0)),)
    kernel = _ess_kernel(
        "ess_partial", card_of(device).arch, g.dtype, w_name, scale is not None, v is not None, aligned(g)
    )
    columns = ceil_div(width, 256)
    launch(kernel, device, (columns, segments, 1), args)
    finish = _ess_kernel("ess_finish", card_of(device).arch, g.dtype, "f32", False, False, True, accumulate)
    launch(finish, device, (columns, experts, 1), args)


@cuda_kernel("activate")
def activate(h: Tensor, activation: str, glu: Glu, params: tuple[float, ...] = ()) -> Tensor:
    """Each thread computes eight columns."""
    h = dense_rows(h)
    n, width = h.shape[0], h.shape[1] if glu == "none" else h.shape[1] // 2
    a = h.new_empty((n, width))
    alpha, limit = constants_of(activation, params)
    kernel = _activate_kernel(
        "activate", card_of(h.device.index).arch, h.dtype, "f32", False, activation, glu, width, aligned(h, a)
    )
    pointers = (h, None, None, None, None, a, None, None)
    args = ((pointers, _ACTIVATE.pack(h.stride()[0], 0, n, width, alpha, limit)),)
    launch(kernel, h.device.index, (_row_blocks(n, kernel) if width else 0, 1, 1), args)
    return a


@cuda_kernel("activate_backward")
def activate_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """One pass over da and h: dh, the scaled a, and the routing weight's gradient as a reduction over the row."""
    da, h, top_k_weights, v, offs, activation, glu, params = ActivateBackward(*args)
    h, da = dense_rows(h), dense_rows(da)
    n, width, device = h.shape[0], da.shape[1], h.device.index
    dh, a = torch.empty(h.shape, dtype=h.dtype, device=h.device), torch.empty(da.shape, dtype=h.dtype, device=h.device)
    weights = None if top_k_weights is None else top_k_weights.contiguous()
    dweights = h.new_empty(0) if weights is None else torch.empty_like(weights)
    assert weights is None or (v is not None and offs is not None)
    routed = None if weights is None or offs is None else _routed(offs)
    alpha, limit = constants_of(activation, params)
    w_name = "f32" if weights is None else DTYPES[weights.dtype].name
    fit = aligned(h, da, a, dh)
    kernel = _activate_kernel(
        "activate_backward", card_of(device).arch, h.dtype, w_name, weights is not None, activation, glu, width, fit
    )
    pointers = (h, da, weights, v, routed, a, dh, dweights)
    args = ((pointers, _ACTIVATE.pack(h.stride()[0], da.stride()[0], n, width, alpha, limit)),)
    launch(kernel, device, (_row_blocks(n, kernel), 1, 1), args)
    return dh, a, dweights


@cached_choice
def _combine_kernel(
    arch: int, dtype: torch.dtype, weights: torch.dtype | None, top_k: int, width: int, fit: bool
) -> Kernel:
    unrolled = top_k if top_k in UNROLLED_TOP_K and dtype != torch.float64 else 0
    chunks = max(1, ceil_div(width, 8))
    # The block that wastes the fewest threads, and the largest of equals.
    threads = min(COMBINE_THREADS, key=lambda t: (ceil_div(chunks, t) * t, -t))
    spec = KernelSpec("combine", "combine", arch, dtype=DTYPES[dtype], scale=weights is not None, aligned=fit)
    name = "f32" if weights is None else DTYPES[weights].name
    return kernel_of(spec.with_options(weights=name, top_k=unrolled, threads=threads))


@cached_choice
def _ess_kernel(
    op: str,
    arch: int,
    dtype: torch.dtype,
    weights: str,
    scaled: bool,
    gather: bool,
    fit: bool,
    accumulate: bool = False,
) -> Kernel:
    spec = KernelSpec("ess", op, arch, dtype=DTYPES[dtype], bm=SEGMENT_ROWS, scale=scaled, gather=gather, aligned=fit)
    spec = spec.with_options(weights=weights)
    return kernel_of(spec.adding() if accumulate else spec)


@cached_choice
def _activate_kernel(
    op: str,
    arch: int,
    dtype: torch.dtype,
    weights: str,
    weighted: bool,
    activation: str,
    glu: Glu,
    width: int,
    fit: bool,
) -> Kernel:
    chunks = ceil_div(width, 8)
    # As many warps as leave the fewest lanes idle, and the most of equals.
    warps = min((1, 2, 4), key=lambda w: (ceil_div(chunks, 32 * w) * w, -w))
    glu = "concat" if glu == "split" else glu  # h is laid out alike
    spec = KernelSpec(
        "activate", op, arch, dtype=DTYPES[dtype], activation=activation, glu=glu, scale=weighted, aligned=fit
    )
    return kernel_of(spec.with_options(weights=weights, warps_per_row=warps))


def _routed(offs: Tensor) -> Inside:
    """The last offset, which is the number of rows that have an expert."""
    return Inside(offs, 4 * (offs.shape[0] - 1))


def _row_blocks(n: int, kernel: Kernel) -> int:
    return ceil_div(n, 4 // int(kernel.spec.option("warps_per_row")))
