"""Forced routings: which experts a case sends every token to, and how a router inside a block is made to choose them.

`LogitsOverride` raises the logits of the wanted experts where the router's weight produces them, so that everything downstream
(softmax, groups, thresholds, second choices, auxiliary losses) sees a routing that can occur. If there is no such product,
`RoutingOverride` replaces the results of top-k and the like.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hexa_fx import operations as ops
from hexa_fx.isolation.choices import ChoosingCall, choosing_call
from hexa_fx.torch_private import DisableTorchFunction


@dataclass(frozen=True)
class ForcedRouting:
    """A routing by name: ``choose(rows, candidates, k)`` gives (rows, k) distinct ids below ``candidates``, int64."""

    name: str
    choose: Callable[[int, int, int], torch.Tensor]


def _first(rows: int, candidates: int, k: int) -> torch.Tensor:
    return torch.arange(k, device="cpu").expand(rows, k).contiguous()


def _last(rows: int, candidates: int, k: int) -> torch.Tensor:
    return candidates - 1 - _first(rows, candidates, k)


def _alternating(rows: int, candidates: int, k: int) -> torch.Tensor:
    even = (torch.arange(rows, device="cpu") % 2 == 0)[:, None]
    return torch.where(even, _first(rows, candidates, k), _last(rows, candidates, k))


def _one_unused(rows: int, candidates: int, k: int, first_row: int = 0) -> torch.Tensor:
    if k >= candidates:
        return _first(rows, candidates, k)
    number = torch.arange(first_row, first_row + rows, device="cpu")[:, None]
    return 1 + (_step(k) * number + torch.arange(k, device="cpu")) % (candidates - 1)


def _step(k: int) -> int:
    """How far a token's experts lie after those of the previous token: each is chosen twice, in case one choice does not count."""
    return -(-k // 2)


def rows_for_all(candidates: int, k: int) -> int:
    """Number of tokens with which the last of `ROUTINGS` reaches every expert but the first."""
    return -(-(candidates - 1) // _step(k))


_SPREAD = 8.0
"""How far apart logits may lie where a routing is forced: weights differ by a factor of 3000 then."""

ROUTINGS = (
    ForcedRouting("all tokens to the first experts", _first),
    ForcedRouting("all tokens to the last experts", _last),
    ForcedRouting("first and last experts alternating", _alternating),
    ForcedRouting("one expert without tokens", _one_unused),
)


def in_turns(candidates: int, k: int, rows: int) -> Iterator[ForcedRouting]:
    """The last of `ROUTINGS` a few tokens at a time, so that together they reach every expert but the first."""
    for first in range(0, rows_for_all(candidates, k), rows):
        name = ROUTINGS[-1].name + (f", on from expert {1 + _step(k) * first}" if first else "")
        yield ForcedRouting(name, partial(_one_unused, first_row=first))


def under_other_numbers(experts: int) -> ForcedRouting:
    """Numbers that lie as far apart as there are experts, for routers that have several numbers for each."""

    def choose(rows: int, candidates: int, k: int) -> torch.Tensor:
        apart = experts * torch.arange(k, device="cpu") % candidates
        if len(apart.unique()) < k:
            return _first(rows, candidates, k)
        return (torch.arange(rows, device="cpu")[:, None] + apart) % candidates

    return ForcedRouting("one expert under several numbers", choose)


def _is_routers(call: ChoosingCall, num_experts: int | None) -> bool:
    """Whether a router may choose so among so many experts, if it is known how many."""
    return call.name == "topk" or (call.name != "multinomial" and num_experts in (None, call.size))


class ChoiceSpy(TorchFunctionMode):
    """Notes how many experts a router picks for a token: the largest top-k, or the number of argmax calls."""

    def __init__(self, num_experts: int | None) -> None:
        super().__init__()
        self._num_experts = num_experts
        self._largest, self._single, self._among = 0, 0, 0
        self.chooses = False
        """Whether something is chosen that a `RoutingOverride` may choose otherwise."""

    @property
    def has_more_numbers(self) -> bool:
        """Whether a top-k is among more numbers than there are experts, and nothing is chosen among as many."""
        return self._num_experts is not None and self._among > self._num_experts and not self._largest + self._single

    @property
    def top_k(self) -> int:
        return max(self._largest, self._single, 1)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        call = choosing_call(func, args, kwargs or {})
        self.chooses = self.chooses or (call is not None and _is_routers(call, self._num_experts))
        if name not in ("topk", "argmax") or not args:
            return result
        self._among = max(self._among, args[0].shape[-1] if name == "topk" and args[0].dim() else 0)
        if self._num_experts not in args[0].shape:
            return result
        if name == "argmax":
            self._single += 1
        else:
            self._largest = max(self._largest, result[1].numel() // max(1, args[0].numel() // args[0].shape[-1]))
        return result


class LogitsOverride(TorchFunctionMode):
    """A mode that raises the product of a router's weight at the wanted experts, by more than logits differ.

    Args:
        routing: what to choose.
        num_experts: size of the dimension that holds logits, the last one.
        top_k: how many experts per token is to prefer.
        experts: weights of the experts, which are no router's weight even if one of their sizes is the number of experts.
    """

    forces = "logits"

    def __init__(
        self, routing: ForcedRouting, num_experts: int, top_k: int, experts: Collection[torch.Tensor] = ()
    ) -> None:
        super().__init__()
        self.routing, self.num_experts, self.top_k = routing, num_experts, min(top_k, num_experts)
        self._experts = frozenset(map(id, experts))
        self.forced = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if ops.canonical(getattr(func, "__name__", "")) not in ops.CONTRACTIONS or not self._are_logits(
            result, (*args, *kwargs.values())
        ):
            return result
        self.forced += 1
        return raised(result, self.routing, self.top_k)

    def _are_logits(self, result: Any, operands: tuple[Any, ...]) -> bool:
        with DisableTorchFunction():  # an outer mode would be told of every product
            if not isinstance(result, torch.Tensor) or result.dim() < 2 or result.shape[-1] != self.num_experts:
                return False
            return any(self._is_router_weight(operand) for operand in operands)

    def _is_router_weight(self, operand: Any) -> bool:
        if not isinstance(operand, torch.Tensor):
            return False
        owner = operand if operand._base is None else operand._base
        if id(owner) in self._experts or not isinstance(owner, nn.Parameter):
            return False
        return operand.dim() == 2 and self.num_experts in operand.shape


def raised(logits: torch.Tensor, routing: ForcedRouting, top_k: int) -> torch.Tensor:
    """(..., E) logits, the wanted experts' far above the others'; gradients flow as before.

    Logits that lie far apart are brought closer first: an expert that the router all but rules out would be chosen with a weight
    at which nothing shows of what it computes.
    """
    rows = logits.shape[:-1].numel()
    if rows == 0:
        return logits
    with torch.no_grad():
        finite = logits.nan_to_num(0.0, 0.0, 0.0)
        spread = finite.max() - finite.min()
        closer = (_SPREAD / spread).clamp(max=1.0)
        distance = 2 * torch.ceil(spread * closer) + 4
        chosen = routing.choose(rows, logits.shape[-1], top_k).to(logits.device)
        wanted = logits.new_zeros(rows, logits.shape[-1]).scatter_(1, chosen, 1.0).reshape(logits.shape)
    return logits * closer + distance * wanted


class RoutingOverride(TorchFunctionMode):
    """A mode in which top-k, argmax, max and sort along experts return a given routing instead of the best scores.

    The values they return are gathered from their input at the forced places, so that gradients flow as before. Two runs under
    equal overrides choose equally.

    Args:
        routing: what to choose.
        num_experts: argmax, max and sort are only forced along a dimension of this size; None: of any size.
    """

    forces = "choices"

    def __init__(self, routing: ForcedRouting, num_experts: int | None) -> None:
        super().__init__()
        self.routing = routing
        self.num_experts = num_experts
        self.forced = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        call = choosing_call(func, args, kwargs or {})
        if call is None or not _is_routers(call, self.num_experts):
            return func(*args, **(kwargs or {}))
        self.forced += 1
        return call.forced(self._choice(call))

    def _choice(self, call: ChoosingCall) -> torch.Tensor:
        """(rows, k) forced places; of a sort all of them, the others following the forced one in order.

        A place that the router has masked out, such as the first choice when it looks for the second, is skipped.
        """
        k = call.width if call.name == "topk" else 1
        scores = call.scores.detach().movedim(call.dim, -1).reshape(-1, call.size)
        chosen = self.routing.choose(len(scores), call.size, k).to(scores.device)
        if k == 1:
            chosen = _first_open(chosen, scores)
        if call.name in ("sort", "argsort"):
            chosen = (chosen + torch.arange(call.size, device=scores.device)) % call.size
        return chosen


def _first_open(wanted: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """``wanted`` (rows, 1), or cyclically the next place after it that is not masked in ``scores`` (rows, candidates)."""
    size = scores.shape[1]
    order = (wanted + torch.arange(size, device=scores.device)) % size
    probabilities = (scores >= 0).all(1, keepdim=True)
    masked = (scores < -1e30) | (probabilities & (scores == 0))
    opened = (~masked).gather(1, order).int()
    first = opened.argmax(1, keepdim=True)  # 0, the wanted place, if everything is masked
    return order.gather(1, first)
