"""FP8 with a float32 scale a block: how rows, groups of rows and weights are quantised, and read again. Plain torch, any device.

A number is ``q * s``. A block's scale is its largest magnitude over 448, so that the largest element becomes e4m3's largest; blocks
of zeros, and of numbers near float32's smallest, have the scale of `FLOOR`. A *binary* scale is the next power of two: elements can
be given another such scale and stay the numbers that they are. A block with a NaN or an infinity reads as NaN or infinity in at
least that element. All sizes are filled up with zeros to multiples of 128.

Routed rows are summed over in *groups*: rows of one expert, 128 at a time from its first on, the last one filled up with zeros.
Group ``g`` of expert e holds its rows ``offs[e] + 128 g ..``; groups lie one after the other in the experts' order, and there is
room for ``n // 128 + min(E, n)`` of them, which is never too few. What lies after the last group is unspecified.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hexa_fx.formats.format import ceil_div

BLOCK = 128
"""Elements that share a scale; of weights, rows and columns."""

ELEMENT = torch.float8_e4m3fn
"""Of everything, gradients too (benchmarks/LOG.md)."""

BYTE_ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
"""Columns of rows in bytes, as the lanes of a product hold them."""

_MOST = torch.finfo(ELEMENT).max

FLOOR = 1e-30
"""The smallest of a block's largest magnitude: its scale and the scale's inverse are normal numbers."""


def padded(size: int) -> int:
    """The next multiple of 128."""
    return ceil_div(size, BLOCK) * BLOCK


def group_count(rows: int, experts: int) -> int:
    """Groups that there is room for, of n rows of E experts."""
    few: int = torch.sym_min(experts, rows)
    return rows // BLOCK + few


def quantize_blocks(blocks: Tensor, binary: bool = False) -> tuple[Tensor, Tensor]:
    """Elements shaped as ``blocks`` (..., B), and a scale (...), binary if asked for, for each block, in float32."""
    wide = blocks.float()
    largest = wide.abs().amax(-1).clamp_min(FLOOR)
    scales = binary_scales(largest) if binary else largest / _MOST
    return _divided(wide, scales), scales


def _divided(wide: Tensor, scales: Tensor) -> Tensor:
    """Numbers (..., B) as elements with scales (...)."""
    return (wide / scales.unsqueeze(-1)).clamp_(-_MOST, _MOST).to(ELEMENT)


def binary_scales(largest: Tensor) -> Tensor:
    """The least powers of two that are at least a 448th of float32 numbers above 2^-110; what is not finite stays what it is."""
    bits = (largest.contiguous().view(torch.int32) + 0x1FFFFF) & 0x7F800000  # 448 is 1.75 * 2^8
    return torch.where(largest.isfinite(), (bits - (8 << 23)).view(torch.float32), largest)


def quantize_rows(x: Tensor, binary: bool = False) -> tuple[Tensor, Tensor]:
    """x (R, C) in blocks of 1 x 128: elements (R, padded C) and scales (R, padded C / 128), binary if asked for."""
    width = padded(x.shape[1])
    blocks = torch.nn.functional.pad(x, (0, width - x.shape[1])).view(x.shape[0], width // BLOCK, BLOCK)
    q, scales = quantize_blocks(blocks, binary)
    return q.view(x.shape[0], width), scales


def read_rows(q: Tensor, scales: Tensor) -> Tensor:
    """What `quantize_rows` made, in float32, (R, padded C)."""
    blocks = q.float().view(q.shape[0], scales.shape[1], BLOCK)
    return blocks.mul_(scales.unsqueeze(2)).view(q.shape)


def rows_as_bytes(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (R, C), C a multiple of 128, as whole numbers of -127 to 127 that 128 columns of a row have a scale for.

    Bytes (R, C) are 128 more, sixteen columns in the order of `BYTE_ORDER`; scales (R, C / 128) are float32. A block with a NaN or
    an infinity reads as NaN.
    """
    blocks = x.float().unflatten(1, (-1, BLOCK))
    largest = blocks.abs().amax(-1)
    scales = largest.clamp_min(FLOOR) / 127
    scales = torch.where(largest.isfinite(), scales, torch.nan)
    whole = torch.where(largest.isfinite().unsqueeze(-1), blocks / scales.unsqueeze(-1), 0).round_() + 128
    order = torch.tensor(BYTE_ORDER, device=x.device)
    return whole.to(torch.uint8).flatten(1).unflatten(1, (-1, 16))[:, :, order].flatten(1), scales


def read_bytes(y: Tensor, scales: Tensor) -> Tensor:
    """What `rows_as_bytes` made, in float32."""
    places = torch.tensor(BYTE_ORDER, device=y.device).argsort()
    whole = y.unflatten(1, (-1, 16))[:, :, places].flatten(1).float().sub_(128)
    blocks: Tensor = whole.unflatten(1, (-1, BLOCK)).mul_(scales.unsqueeze(2))
    return blocks.flatten(1)


def first_groups(offs: Tensor) -> Tensor:
    """The first group of every expert, and the number of groups: (E + 1,) int64."""
    counts = (offs.diff() + (BLOCK - 1)).div(BLOCK, rounding_mode="floor")
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))


def rows_of_groups(offs: Tensor, rows: int) -> Tensor:
    """The row at every place of every group, (G, 128) int64; ``rows`` where there is none."""
    experts, first = offs.shape[0] - 1, first_groups(offs)
    group = torch.arange(group_count(rows, experts), device=offs.device)
    expert = torch.searchsorted(first[1:], group, right=True)
    known = expert.clamp(max=experts - 1)
    place = torch.arange(BLOCK, device=offs.device)
    row = (offs[known].long() + (group - first[known]) * BLOCK).unsqueeze(1) + place
    inside = (row < offs[known + 1].unsqueeze(1)) & (expert < experts).unsqueeze(1)
    return torch.where(inside, row, rows)


def quantize_groups(rows: Tensor, offs: Tensor, shared: bool = False) -> tuple[Tensor, Tensor]:
    """Rows (n, C) in expert order, transposed group by group: elements (G, padded C, 128), scales (G, padded C).

    Args:
        shared: 128 columns of a group have the same scale, from the largest number in all of them.
    """
    padding = (0, padded(rows.shape[1]) - rows.shape[1], 0, 1)  # and a row of zeros, which fills groups up
    wide = torch.nn.functional.pad(rows, padding)
    places = rows_of_groups(offs, rows.shape[0])
    groups = wide[places].transpose(1, 2).contiguous()
    if not shared:
        return quantize_blocks(groups)
    q, scales = quantize_blocks(groups.view(groups.shape[0], groups.shape[1] // BLOCK, BLOCK * BLOCK))
    return q.view(groups.shape), scales.repeat_interleave(BLOCK, 1)


def group_rows(rows: Tensor, scales: Tensor, offs: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (n, C) and binary scales (n, C / 128) in expert order, transposed group by group: elements (G, C, 128), scales (G, C).

    128 columns of a group have the largest of its rows' scales.
    """
    places, zero = rows_of_groups(offs, rows.shape[0]), (0, 0, 0, 1)  # and a row of zeros, which fills groups up
    common = torch.nn.functional.pad(scales, zero)[places].amax(1).clamp_min(FLOOR).repeat_interleave(BLOCK, 1)
    wide = torch.nn.functional.pad(read_rows(rows, scales), zero)[places].transpose(1, 2).contiguous()
    return _divided(wide, common), common


def read_groups(q: Tensor, scales: Tensor) -> Tensor:
    """What `quantize_groups` made, in float32, (G, padded C, 128)."""
    return q.float().mul_(scales.unsqueeze(2))


def quantize_weight(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """One expert's matrix (N, K), both multiples of 128, in blocks of 128 x 128: elements (N, K) and scales (N / 128, K / 128)."""
    high, wide = matrix.shape[0] // BLOCK, matrix.shape[1] // BLOCK
    tiles = matrix.view(high, BLOCK, wide, BLOCK).transpose(1, 2).reshape(high, wide, BLOCK * BLOCK)
    q, scales = quantize_blocks(tiles)
    return q.view(high, wide, BLOCK, BLOCK).transpose(1, 2).reshape(matrix.shape), scales


def read_weight(q: Tensor, scales: Tensor) -> Tensor:
    """What `quantize_weight` made, in float32."""
    tiles = q.float().view(scales.shape[0], BLOCK, scales.shape[1], BLOCK)
    return tiles.mul_(scales[:, None, :, None]).view(q.shape)
