"""Computes gradients of stacked weights, used one expert at a time, in time linear in the number of experts.

Autograd's backward of ``weight[e]`` fills a tensor of the whole weight's size for every expert: E * E work in all. Under this mode
every such part is a leaf of its own, and its gradient is added where it belongs afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hexa_fx.torch_private import DisableTorchFunction, _debug_has_internal_overlap, peek_interpreter_stack

_TAKES_A_PART = frozenset({"__getitem__", "select", "narrow"})


class WeightSlices(TorchFunctionMode):
    """A mode under which parts taken from ``weights`` are leaves of their own.

    It applies only where that changes no result: to parts that share memory with the weight, do not overlap themselves, and
    are taken with gradients on from weights without hooks. Everything else goes the usual way.
    """

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._weights = {id(weight): weight for weight in weights if _is_plain_leaf(weight)}
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def parts(self) -> list[torch.Tensor]:
        """The leaves that were made, in order of creation."""
        return [part for _, part in self._parts]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        weight = self._weights.get(id(args[0])) if args and getattr(func, "__name__", "") in _TAKES_A_PART else None
        if weight is None or not torch.is_grad_enabled() or peek_interpreter_stack() is not None:
            return func(*args, **kwargs)
        part = func(weight.detach(), *args[1:], **kwargs)
        if not _lies_in(part, weight):
            return func(*args, **kwargs)
        self._parts.append((weight, part.requires_grad_()))
        return part

    def whole(
        self, gradients: Mapping[str, torch.Tensor | None], weights: Mapping[str, torch.Tensor], parts: Sequence[Any]
    ) -> dict[str, torch.Tensor | None]:
        """``gradients`` by name, with those of the parts added.

        Args:
            gradients: gradients of whole ``weights``; None where there is none.
            weights: the weights by the same names.
            parts: gradients of `parts`, in their order; None where there is none.
        """
        sums: dict[int, torch.Tensor] = {}
        for (weight, part), gradient in zip(self._parts, parts):
            if gradient is None:
                continue
            if id(weight) not in sums:
                sums[id(weight)] = torch.empty_strided(
                    weight.size(), weight.stride(), dtype=weight.dtype, device=weight.device
                ).zero_()
            offset = int(part.storage_offset() - weight.storage_offset())
            sums[id(weight)].as_strided(part.size(), part.stride(), offset).add_(gradient)
        return {name: _sum(gradient, sums.get(id(weights[name]))) for name, gradient in gradients.items()}


def sliced(weights: Iterable[torch.Tensor], gradients: bool) -> AbstractContextManager[WeightSlices | None]:
    """The mode for those of ``weights`` that backward would fill; none where there are none, since it slows every operation."""
    with DisableTorchFunction():  # an outer mode would be told of every expert's weight
        plain = [weight for weight in weights if _is_plain_leaf(weight) and weight.dim() > 2] if gradients else []
    return WeightSlices(plain) if plain else nullcontext()


def _is_plain_leaf(weight: torch.Tensor) -> bool:
    return type(weight) is nn.Parameter and weight.requires_grad and not weight._backward_hooks


def _lies_in(part: Any, weight: torch.Tensor) -> bool:
    """Whether ``part`` lies in ``weight``'s memory without overlapping itself."""
    if not isinstance(part, torch.Tensor) or part.numel() == 0 or part.dtype != weight.dtype:
        return False
    same = part.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    return same and _debug_has_internal_overlap(part) == 0


def _sum(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other
