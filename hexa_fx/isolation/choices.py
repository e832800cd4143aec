"""The calls by which code chooses experts: what they were asked, which ids they gave, and what they give for other ids.

Values are gathered from the scores of the call, so that gate values and their gradients come from the live scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hexa_fx import operations as ops
from hexa_fx.ir import Choice


@dataclass(frozen=True)
class ChoosingCall:
    """One call of a function that chooses the best.

    Args:
        name: of the function.
        scores: what it chooses from, floating point.
        dim: the dimension of the candidates, not negative.
        width: how many ids it gives for a row of scores.
        keepdim: whether a single id keeps its dimension.
        ascending: of a sort, so that its best candidates are its last.
    """

    name: str
    scores: Tensor
    dim: int
    width: int
    keepdim: bool = True
    ascending: bool = False

    @property
    def size(self) -> int:
        """Number of candidates."""
        return self.scores.shape[self.dim]

    @property
    def rows(self) -> int:
        """Number of times it chooses."""
        return self.scores.numel() // max(1, self.size)

    def ids(self, result: Any) -> Tensor:
        """(rows, width) ids in ``result``, which the call gave; the best first."""
        index: Tensor = result[1] if self.name in ("topk", "max", "sort") else result
        if self.width == 1 and not self.keepdim:
            index = index.unsqueeze(self.dim)
        index = index.detach().movedim(self.dim, -1).reshape(-1, self.width)
        return index.flip(1) if self.ascending else index

    def forced(self, ids: Tensor) -> Any:
        """What the call gives if it chooses ``ids`` (rows, n), n <= width; the rest of a sort follows in its own order."""
        ids = ids.to(self.scores.device, torch.long)
        if self.name in ("sort", "argsort"):
            ids = self._order(ids)
        leading = self.scores.movedim(self.dim, -1).shape[:-1]
        index = ids.reshape(*leading, ids.shape[1]).movedim(-1, self.dim)
        index = index.contiguous()  # as the call gives it: a block may have been recorded for this layout alone
        values = None if self.name in ("argmax", "argsort", "multinomial") else self.scores.gather(self.dim, index)
        if self.width == 1 and not self.keepdim:
            index = index.squeeze(self.dim)
            values = None if values is None else values.squeeze(self.dim)
        if values is None:
            return index
        return getattr(torch.return_types, self.name)((values, index))

    def _order(self, ids: Tensor) -> Tensor:
        scores = self.scores.detach().movedim(self.dim, -1).reshape(-1, self.size)
        ranks = scores.argsort(dim=1, descending=not self.ascending, stable=True).argsort(dim=1)
        chosen = torch.arange(ids.shape[1], device=ids.device) - self.size
        if self.ascending:
            chosen = 2 * self.size - torch.arange(ids.shape[1], device=ids.device)
        return ranks.scatter(1, ids, chosen.expand_as(ids)).argsort(dim=1)


def choosing_call(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ChoosingCall | None:
    """The call of ``func`` if that chooses the best by floating-point scores; else None."""
    reader = _READERS.get(getattr(func, "__name__", ""))
    if reader is None or "out" in kwargs:
        return None
    named = {"scores" if name == "input" else name: value for name, value in kwargs.items()}
    try:
        call = reader(*args, **named)
    except TypeError:  # another overload, such as the maximum of two tensors
        return None
    if call is None or not isinstance(call.scores, Tensor) or not call.scores.is_floating_point():
        return None
    return call


def _call(
    name: str, scores: Any, dim: Any, width: int | None, keepdim: bool = True, ascending: bool = False
) -> ChoosingCall | None:
    if not isinstance(scores, Tensor) or type(dim) is not int or scores.dim() == 0:
        return None
    dim %= scores.dim()
    return ChoosingCall(name, scores, dim, scores.shape[dim] if width is None else width, keepdim, ascending)


def _best(name: str) -> Callable[..., ChoosingCall | None]:
    return lambda scores, dim=None, keepdim=False: _call(name, scores, dim, 1, keepdim)


def _sorted(name: str) -> Callable[..., ChoosingCall | None]:
    return lambda scores, dim=-1, descending=False, stable=False: _call(name, scores, dim, None, True, not descending)


_READERS: dict[str, Callable[..., ChoosingCall | None]] = {
    "topk": lambda scores, k, dim=-1, largest=True, sorted=True: _call("topk", scores, dim, int(k)),
    "multinomial": lambda scores, num_samples, replacement=False, *, generator=None: _call(
        "multinomial", scores, -1, int(num_samples)
    ),
    **{name: _best(name) for name in ("argmax", "max")},
    **{name: _sorted(name) for name in ("sort", "argsort")},
}
"""What each function is called with, by its names for that, but for ``input``."""


class ChoiceCounter:
    """Numbers the calls of a run among those of their kind."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int, int], int] = {}

    def numbered(self, call: ChoosingCall) -> Choice:
        kind = call.name, call.size, call.width
        number = self._seen[kind] = self._seen.get(kind, -1) + 1
        return Choice(*kind, number)


def with_groups(ids: Tensor, call: ChoosingCall, experts: int) -> Tensor:
    """(rows, width) groups of a call that chooses among equal groups of experts: those of ``ids`` (rows, k), then the best others.

    A row whose experts lie in more groups than the call chooses keeps the first of them.
    """
    scores = call.scores.detach().movedim(call.dim, -1).reshape(-1, call.size)
    ranks = scores.argsort(dim=1, descending=True).argsort(dim=1)
    of_ids = (ids.to(scores.device, torch.long) // (experts // call.size)).clamp(0, call.size - 1)
    return ranks.scatter(1, of_ids, -1).argsort(dim=1, stable=True)[:, : call.width]


def numbers_intervals(name: str, args: tuple[Any, ...], result: Any) -> bool:
    """Whether a call makes whole numbers of fractions, as those of the intervals that times lie in, or of comparisons."""
    if ops.canonical(name) not in ops.CASTS or not (isinstance(result, Tensor) and isinstance(args[0], Tensor)):
        return False
    made_of = args[0].is_floating_point() or args[0].dtype == torch.bool
    return made_of and result.dtype in (torch.int64, torch.int32)
