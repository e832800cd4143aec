"""Gradients of large weights as the products that they are sums of, so that no gradient of a whole stack is ever filled.

The gradient of an expert's matrix is ``g^T x`` over a few rows. A `Term` keeps ``g`` and ``x`` and where the product lies
in the gradient; what autograd does to gradients on the way from a product to the parameter (transposes, slices, sums) changes
only that place. Two gradients are compared through their products with random directions (`sketch`), which differ wherever the
gradients do.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hexa_fx.large_blocks.upcast_weight import TooLarge
from hexa_fx.ops.rows import contiguous_strides

_DIRECTIONS = 4

_TOGETHER = 1 << 21
"""Elements of several products that are held side by side."""


@dataclass(frozen=True)
class Term:
    """``left @ right``, laid out in a larger tensor.

    Args:
        left, right: (M, n) and (n, N).
        starts: for each dimension of the tensor, the index of the product's first element.
        steps: for each dimension, by how much the index grows with the product's row and with its column.
    """

    left: Tensor
    right: Tensor
    starts: tuple[int, ...]
    steps: tuple[tuple[int, int], ...]

    @property
    def extents(self) -> tuple[int, int]:
        """(M, N)."""
        return self.left.shape[0], self.right.shape[1]

    def along(self, strides: Sequence[int]) -> tuple[int, int, int]:
        """Offset of the first element, and strides of rows and columns, in memory with these strides."""
        offset = sum(start * stride for start, stride in zip(self.starts, strides))
        rows = sum(step[0] * stride for step, stride in zip(self.steps, strides))
        return offset, rows, sum(step[1] * stride for step, stride in zip(self.steps, strides))

    def with_dims(self, dims: Sequence[tuple[int, tuple[int, int]]]) -> Term:
        """The same product with other (start, steps) of dimensions."""
        return replace(self, starts=tuple(d[0] for d in dims), steps=tuple(d[1] for d in dims))

    @property
    def dims(self) -> list[tuple[int, tuple[int, int]]]:
        """(start, steps) of every dimension."""
        return list(zip(self.starts, self.steps))

    def cut(self, dim: int, start: int, stop: int) -> Term | None:
        """What lies between two indices of a dimension, counted from the first of them; None if nothing does."""
        first, (by_row, by_column) = self.span(dim)[0], self.steps[dim]
        if not by_row and not by_column:
            return self.moved(dim, first - start) if start <= first < stop else None
        step, extent = by_row + by_column, self.extents[0 if by_row else 1]
        low = max(0, -(-(start - first) // step))
        high = min(extent, -(-(stop - first) // step))
        if low >= high:
            return None
        left = self.left[low:high] if by_row else self.left
        right = self.right if by_row else self.right[:, low:high]
        return replace(self, left=left, right=right).moved(dim, first + low * step - start)

    def span(self, dim: int) -> tuple[int, int]:
        """First index along a dimension, and the one after the last.

        Raises:
            NotAPlace: the product does not run forward along it.
        """
        first, (by_row, by_column) = self.starts[dim], self.steps[dim]
        if not by_row and not by_column:
            return first, first + 1
        if (by_row and by_column) or by_row + by_column < 0:
            raise NotAPlace
        return first, first + (self.extents[0 if by_row else 1] - 1) * (by_row + by_column) + 1

    def halves(self, axis: int, count: int) -> tuple[Term, Term]:
        """The first ``count`` rows (axis 0) or columns of the product, and the others."""
        moved = tuple(start + count * step[axis] for start, step in zip(self.starts, self.steps))
        if axis == 0:
            return replace(self, left=self.left[:count]), replace(self, left=self.left[count:], starts=moved)
        return replace(self, right=self.right[:, :count]), replace(self, right=self.right[:, count:], starts=moved)

    def moved(self, dim: int, start: int) -> Term:
        """The same product from another index on."""
        return replace(self, starts=(*self.starts[:dim], start, *self.starts[dim + 1 :]))


class NotAPlace(Exception):
    """A product is no longer an evenly spaced part of the tensor."""


class Places:
    """Products by where they lie along a dimension, so that a gradient of many experts is not searched for each of them.

    Raises:
        NotAPlace: one of them does not run forward along it.
    """

    def __init__(self, terms: Sequence[Term], dim: int) -> None:
        spans = sorted((*term.span(dim), number) for number, term in enumerate(terms))
        self._firsts = [first for first, _, _ in spans]
        self._numbers = [number for _, _, number in spans]
        self._longest = max((stop - first for first, stop, _ in spans), default=0)

    def near(self, start: int, stop: int) -> list[int]:
        """Numbers of those that may reach between two indices, in order."""
        low = bisect_left(self._firsts, start - self._longest + 1)
        return sorted(self._numbers[low : bisect_left(self._firsts, stop)])


PLAIN = ((1, 0), (0, 1))
"""Steps of the last two dimensions of a product that lies as it is."""


def reshaped(term: Term, shape: Sequence[int], new: Sequence[int]) -> Iterator[Term]:
    """The product in the tensor with another shape, in pieces where it runs past the end of a new dimension.

    Raises:
        NotAPlace: it would no longer be evenly spaced.
    """
    strides, (rows, columns) = contiguous_strides(shape), term.extents
    offset, by_row, by_column = term.along(strides)
    dims, fit = [], (rows, columns)
    row_step, column_step = by_row if rows > 1 else 0, by_column if columns > 1 else 0
    for size, stride in zip(new, contiguous_strides(new)):
        start, offset = divmod(offset, stride)
        steps = row_step // stride, column_step // stride
        row_step, column_step = row_step % stride, column_step % stride
        if start >= size or all(steps):
            raise NotAPlace
        fit = (min(fit[0], _fitting(size - start, steps[0])), min(fit[1], _fitting(size - start, steps[1])))
        dims.append((start, steps))
    if fit == (rows, columns):
        yield term.with_dims(dims)
        return
    axis = 0 if fit[0] < rows else 1
    for part in term.halves(axis, fit[axis]):
        yield from reshaped(part, shape, new)


def _fitting(room: int, step: int) -> int:
    """How many steps end before ``room``."""
    return -(-room // step) if step else 1 << 62


def filled(terms: Sequence[Term], shape: Sequence[int], device: torch.device, limit: int) -> Tensor:
    """The sum of products as a tensor.

    Raises:
        TooLarge: it would take more than ``limit`` bytes.
    """
    if 8 * math.prod(shape) > limit:
        raise TooLarge(f"a gradient of {math.prod(shape) >> 20} Mi elements would be filled as a whole")
    result = torch.zeros(tuple(shape), dtype=torch.float64, device=device)
    for term in terms:
        offset, rows, columns = term.along(result.stride())
        result.as_strided(term.extents, (rows, columns), offset).add_(term.left @ term.right)
    return result


@functools.lru_cache(maxsize=8)
def directions(width: int, device: torch.device) -> Tensor:
    """(width, d) random directions, always the same, and kept: every expert of a list has its gradients sketched on them."""
    generator = torch.Generator().manual_seed(23)
    return torch.randn(width, _DIRECTIONS, dtype=torch.float64, generator=generator, device="cpu").to(device)


def sketch(terms: Sequence[Term], shape: Sequence[int], device: torch.device) -> Tensor:
    """(..., d) the tensor (..., K) times `directions`, without the tensor.

    Raises:
        NotAPlace: the last dimension runs along both dimensions of a product.
    """
    probe = directions(shape[-1], device)
    result = torch.zeros(*shape[:-1], _DIRECTIONS, dtype=torch.float64, device=device)
    for term in terms:
        offset, rows, columns = replace(term, starts=(*term.starts[:-1], 0)).along(result.stride())
        first, (by_row, by_column) = term.starts[-1], term.steps[-1]
        if by_row and by_column:
            raise NotAPlace
        if by_column:
            projected = term.left @ (term.right @ probe[first::by_column][: term.extents[1]])
            place = result.as_strided((len(projected), _DIRECTIONS), (rows, 1), offset)
        elif by_row:
            projected = term.right.t() @ (term.left.t() @ probe[first::by_row][: term.extents[0]])
            place = result.as_strided((len(projected), _DIRECTIONS), (columns, 1), offset)
        else:
            raise NotAPlace
        place.add_(projected)
    return result


def sketches(terms: Sequence[Term]) -> list[Tensor]:
    """`sketch` of matrices that are one product each, for all those of one shape together."""
    found: dict[int, Tensor] = {}
    alike: dict[tuple[int, int, int, torch.device], list[int]] = {}
    for number, term in enumerate(terms):
        alike.setdefault((*term.extents, len(term.right), term.left.device), []).append(number)
    for (rows, width, length, device), numbers in alike.items():
        step = max(1, _TOGETHER // max(1, length * (rows + width) + rows * _DIRECTIONS))
        for batch in (numbers[start : start + step] for start in range(0, len(numbers), step)):
            if length:
                lefts = torch.stack([terms[number].left for number in batch])
                rights = torch.stack([terms[number].right for number in batch])
                sums = lefts @ (rights @ directions(width, device))
            else:
                sums = torch.zeros(len(batch), rows, _DIRECTIONS, dtype=torch.float64, device=device)
            found |= zip(batch, sums.unbind())
    return [found[number] for number in range(len(terms))]


def sketch_of_dense(tensor: Tensor) -> Tensor:
    """`sketch` of a tensor."""
    probe = directions(tensor.shape[-1], tensor.device)
    return torch.stack([row.double() @ probe for row in tensor]) if tensor.dim() > 2 else tensor.double() @ probe
