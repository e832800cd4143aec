"""Experts' parameters of one shape that lie apart, read as one stacked tensor without a copy of them.

They are read where they lie at the time: memory that they have left is not held.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor

_ATEN = torch.ops.aten
View: TypeAlias = Callable[[Tensor], Tensor]
_Seen: TypeAlias = "ListedStack | Tensor | list[Tensor] | list[ListedStack] | None"


@dataclass(frozen=True)
class ListedStack:
    """An (E, ...) tensor of E parameters.

    Args:
        parameters: of the experts, all of one shape, dtype and device.
        views: taken of every parameter, one after the other.
    """

    parameters: tuple[Tensor, ...]
    views: tuple[View, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """Of the stored numbers."""
        return self.parameters[0].dtype

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.parameters[0].device

    def row(self, expert: int) -> Tensor:
        """What is stored of one expert."""
        return functools.reduce(lambda tensor, view: view(tensor), self.views, self.parameters[expert].data)

    def rows(self) -> list[Tensor]:
        """What is stored of all of them."""
        return [self.row(expert) for expert in range(len(self.parameters))]

    def empty(self) -> Tensor:
        """A tensor of the whole's shape without memory."""
        return torch.empty((len(self.parameters), *self.row(0).shape), dtype=self.dtype, device="meta")

    def seen_through(self, func: Any, *args: Any, **kwargs: Any) -> _Seen:
        """An aten view of the whole, of the parameters as they lie; None if there is no such view of them."""
        view = _VIEWS.get(func)
        return None if view is None else view(self, *args, **kwargs)

    def _through(self, view: View) -> ListedStack:
        return replace(self, views=(*self.views, view))

    def _inner(self, dim: int) -> int:
        """A dimension of the whole as one of an expert; -1 for the first."""
        return dim % (self.row(0).dim() + 1) - 1


def _same(whole: ListedStack) -> ListedStack:
    return whole


def _select(whole: ListedStack, dim: int, index: int) -> ListedStack | Tensor:
    inner = whole._inner(dim)
    return whole.row(index) if inner < 0 else whole._through(lambda tensor: tensor.select(inner, index))


def _slice(
    whole: ListedStack, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> ListedStack | None:
    inner = whole._inner(dim)
    if inner >= 0:
        return whole._through(lambda tensor: _ATEN.slice.Tensor(tensor, inner, start, end, step))
    kept = whole.parameters[start:end:step]
    return replace(whole, parameters=kept) if kept else None


def _split(whole: ListedStack, size: int | list[int], dim: int = 0) -> list[ListedStack] | None:
    inner = whole._inner(dim)
    if inner < 0:
        return None
    ends = list(accumulate(part.shape[inner] for part in whole.row(0).split(size, inner)))
    cuts = (_slice(whole, dim, start, end) for start, end in zip([0, *ends], ends))
    return [cut for cut in cuts if cut is not None]


def _transpose(whole: ListedStack, one: int, two: int) -> ListedStack | None:
    first, second = whole._inner(one), whole._inner(two)
    return None if min(first, second) < 0 else whole._through(lambda tensor: tensor.transpose(first, second))


def _unbind(whole: ListedStack, dim: int = 0) -> list[Tensor] | None:
    return whole.rows() if whole._inner(dim) < 0 else None


_VIEWS: dict[Any, Callable[..., _Seen]] = {
    _ATEN.alias.default: _same,
    _ATEN.detach.default: _same,
    _ATEN.select.int: _select,
    _ATEN.slice.Tensor: _slice,
    _ATEN.split.Tensor: _split,
    _ATEN.split_with_sizes.default: _split,
    _ATEN.transpose.int: _transpose,
    _ATEN.unbind.int: _unbind,
}
