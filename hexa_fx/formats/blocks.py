"""Formats of 8-bit elements with a float32 scale for each block of a matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hexa_fx.formats.format import Format, ceil_div


@dataclass(frozen=True)
class Blocks(Format):
    """8-bit elements in blocks of rows and columns; those at the lower and the right edge may be smaller.

    Args:
        block: rows and columns that share a scale; None columns are all of them.
        largest: the element that a block's largest magnitude becomes.
    """

    block: tuple[int, int | None]
    largest: float

    def scale_shapes(self, shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        experts, rows, columns = shape
        high, wide = self.block
        return ((experts, ceil_div(rows, high), 1 if wide is None else ceil_div(columns, wide)),)

    def rows_together(self, columns: int) -> int:
        return self.block[0]

    def scale_dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.float32,)

    def read(self, packed: Tensor, scales: Sequence[Tensor], expert: int, rows: slice, dtype: torch.dtype) -> Tensor:
        begin, end, _ = rows.indices(packed.shape[1])
        values = packed[expert, begin:end].float()
        return values.mul_(self._of_elements(scales[0][expert], begin, end, packed.shape[2])).to(dtype)

    def _of_elements(self, scales: Tensor, begin: int, end: int, columns: int) -> Tensor:
        """The scales of rows, element by element or as a column."""
        high, wide = self.block
        of_rows = scales.repeat_interleave(high, 0)[begin:end]
        return of_rows if wide is None else of_rows.repeat_interleave(wide, 1)[:, :columns]

    def pack(self, matrix: Tensor) -> tuple[Tensor, ...]:
        rows, columns = matrix.shape
        high, wide = self.block[0], self.block[1] or columns
        padded = torch.nn.functional.pad(matrix.float(), (0, -columns % wide, 0, -rows % high))
        tiles = padded.view(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
        scales = tiles.abs().amax((1, 3)) / self.largest
        found = matrix.float() / self._of_elements(scales, 0, rows, columns).clamp_min(torch.finfo(torch.float32).tiny)
        found = found if self.dtype.is_floating_point else found.round_()
        return found.clamp_(-self.largest, self.largest).to(self.dtype), scales


FP8_BLOCK = Blocks("fp8_block", torch.float8_e4m3fn, 1, ("scales",), (128, 128), 448.0)
INT8_ROWS = Blocks("int8_rows", torch.int8, 1, ("scales",), (1, None), 127.0)
