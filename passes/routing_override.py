"""Forced routings: which experts a case sends every token to, and making a router inside a block choose them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True)
class Routing:
    """A routing by name: ``choose(rows, candidates, k)`` gives (rows, k) distinct ids below ``candidates``, int64."""

    name: str
    choose: Callable[[int, int, int], torch.Tensor]


def _first(rows: int, candidates: int, k: int) -> torch.Tensor:
    return torch.arange(k).expand(rows, k).contiguous()


def _last(rows: int, candidates: int, k: int) -> torch.Tensor:
    return candidates - 1 - _first(rows, candidates, k)


def _alternating(rows: int, candidates: int, k: int) -> torch.Tensor:
    even = (torch.arange(rows) % 2 == 0)[:, None]
    return torch.where(even, _first(rows, candidates, k), _last(rows, candidates, k))


def _one_unused(rows: int, candidates: int, k: int) -> torch.Tensor:
    if k >= candidates:
        return _first(rows, candidates, k)
    return 1 + (torch.arange(rows)[:, None] + torch.arange(k)) % (candidates - 1)


ROUTINGS = (
    Routing("all tokens to the first experts", _first),
    Routing("all tokens to the last experts", _last),
    Routing("first and last experts alternating", _alternating),
    Routing("one expert without tokens", _one_unused),
)


class RoutingOverride(TorchFunctionMode):
    """While active, top-k, argmax, max and sort along experts return a given routing instead of the best scores.

    The values they return are gathered from their input at the forced places, so gradients flow as before. Two runs
    under equal overrides choose equally.

    Args:
        routing: what to choose.
        num_experts: argmax, max and sort are only forced along a dimension of this size; None: of any size.
    """

    def __init__(self, routing: Routing, num_experts: int | None) -> None:
        super().__init__()
        self.routing = routing
        self.num_experts = num_experts
        self.forced = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        force = _FORCED.get(getattr(func, "__name__", ""))
        scores = args[0] if args else kwargs.get("input")
        if force is None or not isinstance(scores, torch.Tensor) or not scores.is_floating_point() or "out" in kwargs:
            return func(*args, **kwargs)
        result = force(self, scores, *args[1:], **{key: value for key, value in kwargs.items() if key != "input"})
        if result is None:
            return func(*args, **kwargs)
        self.forced += 1
        return result

    def choice(self, scores: torch.Tensor, k: int, dim: int) -> torch.Tensor:
        """The forced places along ``dim``, in the shape of ``scores`` but k long there."""
        size = scores.shape[dim]
        moved = scores.movedim(dim, -1)
        chosen = self.routing.choose(moved.shape[:-1].numel(), size, k).to(scores.device)
        return chosen.reshape(*moved.shape[:-1], k).movedim(-1, dim)

    def along_experts(self, scores: torch.Tensor, dim: Any) -> bool:
        if not isinstance(dim, int) or scores.dim() == 0:
            return False
        return self.num_experts in (None, scores.shape[dim])


def _topk(
    override: RoutingOverride, scores: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Any:
    index = override.choice(scores, int(k), dim)
    return torch.return_types.topk((scores.gather(dim, index), index))


def _argmax(override: RoutingOverride, scores: torch.Tensor, dim: Any = None, keepdim: bool = False) -> Any:
    if not override.along_experts(scores, dim):
        return None
    index = override.choice(scores, 1, dim)
    return index if keepdim else index.squeeze(dim)


def _max(override: RoutingOverride, scores: torch.Tensor, dim: Any = None, keepdim: bool = False) -> Any:
    if not override.along_experts(scores, dim):
        return None
    index = override.choice(scores, 1, dim)
    values = scores.gather(dim, index)
    return torch.return_types.max((values, index) if keepdim else (values.squeeze(dim), index.squeeze(dim)))


def _order(override: RoutingOverride, scores: torch.Tensor, dim: int, descending: bool) -> torch.Tensor | None:
    """A permutation that starts (ends, if ascending) with the forced expert, the others following in order."""
    if not override.along_experts(scores, dim):
        return None
    size = scores.shape[dim]
    places = torch.arange(size, device=scores.device).reshape(-1, *[1] * ((scores.dim() - 1 - dim) % scores.dim()))
    order = (override.choice(scores, 1, dim) + places) % size
    return order if descending else order.flip(dim)


def _sort(
    override: RoutingOverride, scores: torch.Tensor, dim: int = -1, descending: bool = False, stable: bool = False
) -> Any:
    index = _order(override, scores, dim, descending)
    return None if index is None else torch.return_types.sort((scores.gather(dim, index), index))


def _argsort(
    override: RoutingOverride, scores: torch.Tensor, dim: int = -1, descending: bool = False, stable: bool = False
) -> Any:
    return _order(override, scores, dim, descending)


_FORCED: dict[str, Callable[..., Any]] = {
    "topk": _topk,
    "argmax": _argmax,
    "max": _max,
    "sort": _sort,
    "argsort": _argsort,
}
