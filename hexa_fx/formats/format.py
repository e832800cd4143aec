"""What every format of packed weights says of itself.

A weight of E experts is stored as matrices of R rows and C columns: (E, N, K) in layout ``nk``, (E, K, N) in ``kn``. Formats do not
care which. Their packed tensors have the experts first, too, so that one expert's matrix can be read alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Size, Tensor

from hexa_fx.errors import InputError


@dataclass(frozen=True)
class Format(ABC):
    """A format of packed weights. Numbers are products in float32 of an element and a scale, rounded once to the asked dtype.

    Args:
        name: as in schemas, e.g. ``nf4``.
        dtype: of the packed tensor.
        per_item: values in one item of the packed tensor.
        scales: names of the tensors that go with it, in order.
    """

    name: str
    dtype: torch.dtype
    per_item: int
    scales: tuple[str, ...]

    @abstractmethod
    def scale_shapes(self, shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Shapes of the scale tensors of a weight (E, R, C)."""

    @abstractmethod
    def scale_dtypes(self) -> tuple[torch.dtype, ...]:
        """dtypes of the scale tensors."""

    @abstractmethod
    def read(self, packed: Tensor, scales: Sequence[Tensor], expert: int, rows: slice, dtype: torch.dtype) -> Tensor:
        """Rows of one expert's matrix, (rows, C) of a floating-point ``dtype``."""

    @abstractmethod
    def pack(self, matrix: Tensor) -> tuple[Tensor, ...]:
        """The packed tensor of a floating-point matrix (R, C), and its scales, without the experts' dimension."""

    def why_not(self, shape: Sequence[int]) -> str:
        """Why a weight (E, R, C) cannot be packed; empty if it can."""
        return ""

    def rows_together(self, columns: int) -> int:
        """Of what a matrix of so many columns has a multiple of rows if another's may follow in the same expert; 0 if none may."""
        return 1

    def packed_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the packed tensor of a weight (E, R, C)."""
        experts, rows, columns = shape
        return experts, rows, columns // self.per_item

    def shape_of(self, packed: Tensor) -> Size:
        """(E, R, C) of a packed tensor."""
        experts, rows, items = packed.shape
        return Size((experts, rows, items * self.per_item))

    def expert(self, packed: Tensor, scales: Sequence[Tensor], expert: int, dtype: torch.dtype) -> Tensor:
        """One expert's matrix, (R, C)."""
        return self.read(packed, scales, expert, slice(0, packed.shape[1]), dtype)

    def dense(self, packed: Tensor, scales: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """The whole weight, (E, R, C). Only for tests and for code that knows nothing of formats."""
        made = torch.empty(self.shape_of(packed), dtype=dtype, device=packed.device)
        for expert, matrix in enumerate(made):
            matrix.copy_(self.expert(packed, scales, expert, dtype))
        return made

    def pack_all(self, weight: Tensor) -> tuple[Tensor, ...]:
        """The packed tensor of a weight (E, R, C), and its scales; packed one expert at a time.

        Raises:
            InputError: the format does not take this shape.
        """
        reason = self.why_not(weight.shape)
        if reason:
            raise InputError(f"a weight of shape {tuple(weight.shape)} cannot be packed as {self.name}: {reason}")
        shapes = (self.packed_shape(weight.shape), *self.scale_shapes(weight.shape))
        dtypes = (self.dtype, *self.scale_dtypes())
        made = tuple(torch.empty(s, dtype=d, device=weight.device) for s, d in zip(shapes, dtypes, strict=True))
        for expert, matrix in enumerate(weight.detach()):
            for whole, part in zip(made, self.pack(matrix), strict=True):
                whole[expert].copy_(part)
        return made

    def check(self, op: str, name: str, packed: Tensor, scales: Sequence[Tensor]) -> None:
        """Checks the tensors of a packed weight.

        Raises:
            InputError: dtypes or shapes do not fit together.
        """
        if packed.dtype != self.dtype or packed.ndim != 3:
            raise InputError(
                f"hexa::{op}: {name} is {packed.dtype} {tuple(packed.shape)}; {self.name} is stored as {self.dtype} with the "
                "experts first and 3 dimensions"
            )
        shape = self.shape_of(packed)
        if reason := self.why_not(shape):
            raise InputError(f"hexa::{op}: {name} is {self.name} of shape {tuple(shape)}: {reason}")
        if len(scales) != len(self.scales):
            raise InputError(f"hexa::{op}: {name} has {len(scales)} scale tensors; {self.name} has {self.scales}")
        expected = zip(self.scales, scales, self.scale_shapes(shape), self.scale_dtypes(), strict=True)
        for label, scale, wanted, dtype in expected:
            if tuple(scale.shape) != wanted or scale.dtype != dtype or scale.device != packed.device:
                raise InputError(
                    f"hexa::{op}: {label} of {name} is {scale.dtype} {tuple(scale.shape)} on {scale.device}; expected {dtype} "
                    f"{wanted} on {packed.device}"
                )


def ceil_div(a: int, b: int) -> int:
    """Smallest whole number not below a / b."""
    return -(-a // b)
