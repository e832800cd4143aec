"""4-bit codes, two in a byte: NF4 of bitsandbytes (QLoRA, arXiv 2305.14314), MXFP4 (OCP Microscaling) as gpt-oss stores it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from hexa_fx.formats.format import Format, ceil_div

_QUANTILES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Of a normal distribution, in [-1, 1]: the values of NF4's codes (QLoRA, appendix E)."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of E2M1; the fourth bit is the sign."""

_LARGEST_EXPONENT = 2
"""Of E2M1."""

NESTED_BLOCK = 256
"""Scales that share one scale where scales are quantised themselves."""


@dataclass(frozen=True)
class FourBit(Format):
    """Two codes in a byte.

    Args:
        values: of the sixteen codes.
        high_first: whether the first of two values lies in the byte's high half.
        block: values that share a scale; they lie one after the other in an expert's matrix, read row by row.
    """

    values: tuple[float, ...]
    high_first: bool
    block: int

    def block_scales(self, scales: Sequence[Tensor], expert: int, blocks: slice) -> Tensor:
        """Scales of an expert's blocks in float32, (blocks,)."""
        raise NotImplementedError

    def read(self, packed: Tensor, scales: Sequence[Tensor], expert: int, rows: slice, dtype: torch.dtype) -> Tensor:
        columns = packed.shape[2] * 2
        begin, end, _ = rows.indices(packed.shape[1])
        codes = packed[expert, begin:end].reshape(-1).int()
        values = _pairs(self.values, self.high_first, str(packed.device)).index_select(0, codes).view(-1)
        first, last = begin * columns // self.block, ceil_div(end * columns, self.block)
        factors = self.block_scales(scales, expert, slice(first, last))
        if columns % self.block == 0:
            values.view(-1, self.block).mul_(factors[:, None])
        else:  # blocks go on in the next row
            skipped = begin * columns - first * self.block
            values.mul_(factors.repeat_interleave(self.block)[skipped : skipped + values.numel()])
        return values.view(end - begin, columns).to(dtype)

    def _codes(self, blocks: Tensor) -> Tensor:
        """The nearest value's code of numbers that are divided by their scale already."""
        pairs = sorted(enumerate(self.values), key=lambda pair: (pair[1], -pair[0]))
        code_of = {value: code for code, value in pairs}  # of the two zeros the positive one
        ordered = torch.tensor(list(code_of), dtype=torch.float32, device=blocks.device)
        nearest = torch.bucketize(blocks.contiguous(), (ordered[1:] + ordered[:-1]) / 2)
        return torch.tensor(list(code_of.values()), dtype=torch.uint8, device=blocks.device)[nearest]

    def _packed(self, codes: Tensor, shape: Sequence[int]) -> Tensor:
        first, second = codes.view(-1, 2).unbind(1)
        high, low = (first, second) if self.high_first else (second, first)
        return (high << 4 | low).view(shape[0], shape[1] // 2)


@cache
def _pairs(values: tuple[float, ...], high_first: bool, device: str) -> Tensor:
    """The two values of every byte, (256, 2)."""
    byte, table = torch.arange(256, device="cpu"), torch.tensor(values, dtype=torch.float32, device="cpu")
    halves = (byte >> 4, byte & 15) if high_first else (byte & 15, byte >> 4)
    return torch.stack([table[half] for half in halves], 1).to(device)


@dataclass(frozen=True)
class Nf4(FourBit):
    """NF4: blocks of 64 of an expert's matrix, read row by row, with the largest magnitude of each in float32."""

    def why_not(self, shape: Sequence[int]) -> str:
        _, rows, columns = shape
        if columns % 2 or rows * columns % self.block:
            return f"blocks of {self.block} values must fill an expert's matrix, and two values a byte of a row"
        return ""

    def rows_together(self, columns: int) -> int:
        return self.block // math.gcd(self.block, columns)

    def scale_shapes(self, shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        experts, rows, columns = shape
        return ((experts, rows * columns // self.block),)

    def scale_dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.float32,)

    def block_scales(self, scales: Sequence[Tensor], expert: int, blocks: slice) -> Tensor:
        return scales[0][expert, blocks]

    def pack(self, matrix: Tensor) -> tuple[Tensor, ...]:
        blocks = matrix.float().reshape(-1, self.block)
        largest = blocks.abs().amax(1)
        codes = self._codes(blocks / largest.clamp_min(torch.finfo(torch.float32).tiny)[:, None])
        return self._packed(codes, matrix.shape), largest


@dataclass(frozen=True)
class Nf4Double(Nf4):
    """NF4 whose scales are quantised, too: ``map[code] * nested + offset``, in blocks of 256 scales (QLoRA, section 3)."""

    def rows_together(self, columns: int) -> int:
        return 0

    def scale_shapes(self, shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        experts, blocks = super().scale_shapes(shape)[0]
        return (experts, blocks), (experts, ceil_div(blocks, NESTED_BLOCK)), (experts,), (experts, 256)

    def scale_dtypes(self) -> tuple[torch.dtype, ...]:
        return torch.uint8, torch.float32, torch.float32, torch.float32

    def block_scales(self, scales: Sequence[Tensor], expert: int, blocks: slice) -> Tensor:
        codes, nested, offset, values = (scale[expert] for scale in scales)
        part = codes[blocks]
        place = torch.arange(blocks.start, blocks.start + part.shape[0], device=part.device) // NESTED_BLOCK
        return values[part.int()] * nested[place] + offset

    def pack(self, matrix: Tensor) -> tuple[Tensor, ...]:
        packed, largest = super().pack(matrix)
        offset = largest.mean()
        centred = largest - offset
        padded = torch.nn.functional.pad(centred, (0, -len(centred) % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
        nested = padded.abs().amax(1)
        values = dynamic_map(str(matrix.device))
        shares = (padded / nested.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).view(-1)[: len(centred)]
        codes = torch.bucketize(shares, (values[1:] + values[:-1]) / 2).to(torch.uint8)
        return packed, codes, nested, offset, values


@cache
def dynamic_map(device: str) -> Tensor:
    """The 256 values, in order, of 8-bit codes with an exponent of varying length (arXiv 2110.02861, section 2)."""
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float64, device="cpu")
        means = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (exponent - 6)
        values += [*means.tolist(), *(-means).tolist()]
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


@dataclass(frozen=True)
class Mxfp4(FourBit):
    """MXFP4: E2M1 in blocks of 32 of a row, each with a power of two (E8M0; 255 is NaN)."""

    def why_not(self, shape: Sequence[int]) -> str:
        return f"its rows are no multiple of {self.block} long" if shape[2] % self.block else ""

    def scale_shapes(self, shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        experts, rows, columns = shape
        return ((experts, rows, columns // self.block),)

    def scale_dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.uint8,)

    def block_scales(self, scales: Sequence[Tensor], expert: int, blocks: slice) -> Tensor:
        return scales[0][expert].reshape(-1)[blocks].view(torch.float8_e8m0fnu).float()

    def pack(self, matrix: Tensor) -> tuple[Tensor, ...]:
        blocks = matrix.float().reshape(-1, self.block)
        _, exponent = torch.frexp(blocks.abs().amax(1))
        power = (exponent - 1 - _LARGEST_EXPONENT).clamp(-127, 127)
        codes = self._codes(torch.ldexp(blocks, -power[:, None]))
        return self._packed(codes, matrix.shape), (power + 127).to(torch.uint8).view(matrix.shape[0], -1)


NF4 = Nf4("nf4", torch.uint8, 2, ("absmax",), _QUANTILES, True, 64)
NF4_DOUBLE = Nf4Double("nf4_double", torch.uint8, 2, ("absmax", "nested", "offset", "map"), _QUANTILES, True, 64)
MXFP4 = Mxfp4("mxfp4", torch.uint8, 2, ("exponents",), (*_E2M1, *(-v for v in _E2M1)), False, 32)
