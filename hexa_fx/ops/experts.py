"""Experts on rows that somebody else has dispatched: an all-to-all, DeepEP, torchtitan, expert parallelism of any kind.

It is `hexa::moe_ffn` of one slot a row, whose expert follows from how many rows each expert got. The counts stay on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

from hexa_fx.errors import InputError
from hexa_fx.ir import FfnSpec
from hexa_fx.ops.moe_ffn import moe_ffn
from hexa_fx.ops.records import INTEGER, shape
from hexa_fx.torch_private import _len_torch_dispatch_stack


def experts(
    rows: Tensor,
    counts: Tensor,
    row_weights: Tensor | None,
    w1: Tensor,
    b1: Tensor | None,
    w3: Tensor | None,
    b3: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    spec: FfnSpec,
) -> Tensor:
    """``y[r] = row_weights[r] * FFN_e(rows[r])`` for rows that lie together by expert.

    Nothing waits for the device, so ``rows`` may be allocated for the most that can arrive: rows after the last one counted are
    never read, whatever they hold, give zeros and get zeros as their gradient.

    Args:
        rows: (R, D), first those of expert 0, then those of expert 1, and so on. Or (S, R, D): one such block from each of S
            senders, each with room of its own.
        counts: integer, rows of each expert, 0 or more and at most R in all, on the device of ``rows``: (E,), or (S, E) for S
            senders, whose rows may also lie right behind one another in an (R, D). No sorting by expert is needed then, nor
            sorting back. Nobody looks at them on a GPU, where one below 0 counts as 0; on a CPU it is refused.
        row_weights: in any floating dtype, one a row, or None, which means 1.
        w1, b1, w3, b3, w2, b2, spec: as for `hexa_fx.ops.moe_ffn`, of the E experts that are here.

    Returns:
        In the order, shape and dtype of ``rows``.

    Raises:
        InputError: shapes, dtypes or devices do not fit together.
    """
    _check(rows, counts, row_weights, w1.shape[0])
    index = _expert_of(rows, counts).reshape(-1, 1)
    weights = None if row_weights is None else row_weights.reshape(-1, 1)
    flat = rows.reshape(-1, rows.shape[-1])
    return moe_ffn(flat, index, weights, w1, b1, w3, b3, w2, b2, spec).reshape(rows.shape)


def _check(rows: Tensor, counts: Tensor, row_weights: Tensor | None, experts: int) -> None:
    op = "hexa_fx.ops.experts"
    if rows.dim() not in (2, 3):
        raise InputError(f"{op}: rows is {shape(rows)}; expected (rows, D) or (senders, rows, D)")
    if not isinstance(counts, Tensor) or counts.device != rows.device:
        found = f"on {counts.device}" if isinstance(counts, Tensor) else f"a {type(counts).__name__}"
        raise InputError(f"{op}: counts is {found}; expected a tensor on {rows.device}, where the rows are")
    dims = (1, 2) if rows.dim() == 2 else (2,)
    fits = counts.dim() in dims and counts.shape[-1] == experts and counts.dtype in INTEGER
    if not fits or (rows.dim() == 3 and counts.shape[0] != rows.shape[0]):
        raise InputError(
            f"{op}: counts is {shape(counts)}; expected integer ({experts},), or one such row for each sender's block"
        )
    seen = type(counts) is Tensor and counts.is_cpu and not is_compiling() and not _len_torch_dispatch_stack()
    if seen and bool((counts < 0).any()):
        raise InputError(f"{op}: counts has {int(counts.min())}; expected the number of rows of each expert, 0 or more")
    if row_weights is None:
        return
    if row_weights.shape != rows.shape[:-1] or not row_weights.is_floating_point():
        raise InputError(
            f"{op}: row_weights is {shape(row_weights)}; expected floating, one a row, {tuple(rows.shape[:-1])}"
        )


def _expert_of(rows: Tensor, counts: Tensor) -> Tensor:
    """Expert of every row; E, which contributes nothing, for rows that nobody counted."""
    number = counts.shape[-1]
    counts = counts.clamp(min=0)
    ends = counts.cumsum(-1) if rows.dim() == 3 else counts.reshape(-1).cumsum(0)
    places = torch.arange(rows.shape[-2], device=rows.device, dtype=ends.dtype)
    run = torch.searchsorted(ends, places.expand(rows.shape[:-1]).contiguous(), right=True)
    return torch.where(run < ends.shape[-1], run % max(number, 1), number)
