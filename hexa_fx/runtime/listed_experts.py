"""Reads per-expert parameters as one weight, where they are (`hexa_fx.ops.listed`).

The parameters of the user's experts stay what they are: the same objects in the same memory, with the same names, order, hooks and
``requires_grad``.

For an expert without tokens the gradient is zero, where code that skips such experts leaves None. Optimizers that act on zero
gradients tell the difference: AdamW decays the weight and its moments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling

from hexa_fx import registry
from hexa_fx.errors import InputError
from hexa_fx.formats.quantized_weight import QuantizedWeight
from hexa_fx.ir import PackedWeight, RewrittenBlock
from hexa_fx.ops.listed import Listed, joined
from hexa_fx.runtime.call_kinds import is_foreign, said_of
from hexa_fx.runtime.guards import AGAIN, GuardMiss
from hexa_fx.runtime.paths import WeightReader, first_parameter
from hexa_fx.sources import linear4bit
from hexa_fx.torch_private import (
    DisableTorchFunction,
    _are_functorch_transforms_active,
    _get_tracing_state,
    _len_torch_dispatch_stack,
)

_OF_KIND: tuple[Callable[[Any], Any], ...] = (type, *map(attrgetter, ("dtype", "shape", "device")))
_PLAIN = frozenset({torch.Tensor, nn.Parameter})


class ListedExperts(WeightReader):
    """A weight of shape (E, ...) that is one parameter an expert, or several below each other (gate and up)."""

    def _bind(self, block: nn.Module) -> None:
        super()._bind(block)
        self._seen: tuple[list[list[Any]], bool] = [], False
        self._ends: list[list[Any]] = []

    def __call__(self) -> torch.Tensor | Listed:
        """The weight: (E, N, K), or (E, N) for a bias. Raises `GuardMiss` where something is that cannot be read so."""
        if is_compiling() or _traced():
            tensors = self.tensors_in_trace()
            self._check_kinds(tensors)
            parts = self.in_parts(tensors)
            return joined(parts) if is_compiling() else Listed(parts, False)
        tensors = self.tensors()
        return Listed(self.in_parts(tensors), self._lie_in_place(tensors))

    def refresh(self) -> None:
        """Raises `GuardMiss` if an expert was replaced or hooked. Call it before the block has any effect."""
        if not is_compiling():
            self.check()
        if is_compiling() or _traced():
            self._check_kinds([self.found_in_trace(self.paths[0])])
            return
        # what changes parameters changes all of them, and every read looks at each
        first, last = self._owners[0].get(self._names[0]), self._owners[-1].get(self._names[-1])
        if first is None or last is None or _kinds_of((first, last)) != self._ends:
            self._lie_in_place(self.tensors())

    def _lie_in_place(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether kernels read them where they lie, else operators that see their class; decided anew for other kinds of them."""
        kinds, in_place = self._seen
        found = _kinds_of(tensors)
        if found != kinds:
            in_place = self._decide(tensors)
            self._seen, self._ends = (found, in_place), [[each[0], each[-1]] for each in found]
        return in_place

    def _decide(self, tensors: Sequence[torch.Tensor]) -> bool:
        self._check_kinds(tensors)
        if any(type(tensor).__name__ == "DTensor" for tensor in tensors):
            raise GuardMiss("the experts' weights are distributed tensors")
        if not _are_alike(self.in_parts(tensors)):
            raise GuardMiss(f"the experts' parameters of {self.weight.name!r} differ in shape, dtype or device")
        first = tensors[0]
        strided = _PLAIN.issuperset(map(type, tensors)) and first.layout is torch.strided
        return strided and (first.is_cpu or first.is_cuda)

    def _check_kinds(self, tensors: Sequence[torch.Tensor]) -> None:
        for path, tensor in zip(self.paths, tensors):
            if type(tensor) is nn.Parameter:
                continue
            if isinstance(tensor, QuantizedWeight):  # by way of another block with these experts, perhaps
                raise GuardMiss(f"{'.'.join(path)} was packed after the block was rewritten; {AGAIN}")
            if is_foreign(tensor):
                raise GuardMiss(f"{'.'.join(path)} is {said_of(tensor)}")


def _kinds_of(tensors: Sequence[torch.Tensor]) -> list[list[Any]]:
    with DisableTorchFunction():  # a mode would be told of every parameter
        return [list(map(of, tensors)) for of in _OF_KIND]


def _are_alike(parts: Sequence[Sequence[torch.Tensor]]) -> bool:
    """Whether all tensors share dtype and device, and the experts within a part their shape."""
    first = parts[0][0]
    return first.dim() > 0 and all(
        tensor.dtype == first.dtype
        and tensor.device == first.device
        and tensor.shape == part[0].shape
        and tensor.shape[1:] == first.shape[1:]
        for part in parts
        for tensor in part
    )


def _traced() -> bool:
    """Whether a tracer or transform is active: it must see the parameters, and nothing may be moved."""
    return bool(
        _len_torch_dispatch_stack() > 0 or _are_functorch_transforms_active() or _get_tracing_state() is not None
    )


def readers(block: nn.Module, *blocks: RewrittenBlock) -> dict[str, WeightReader]:
    """The readers of all stacked weights of a block's rewritten forwards, by attribute; those that are there stay. Raises
    `InputError` if the block has such an attribute, or the forwards read different weights under one name."""
    weights: dict[str, PackedWeight] = {}
    for weight in (weight for rewritten in blocks for weight in rewritten.packed):
        if weights.setdefault(weight.name, weight) != weight:
            raise InputError(f"two forms of the block read different weights as {weight.name!r}; please report this")
        there = vars(block).get(weight.name)
        if isinstance(there, WeightReader) and there.weight != weight:
            raise InputError(f"the block was rewritten before so that {weight.name!r} is another weight")
        if not isinstance(there, WeightReader) and hasattr(block, weight.name):
            raise InputError(
                f"{type(block).__name__} already has an attribute {weight.name!r}, which hexa_fx needs; rename it"
            )
    made = {name: reader_of(block, weight) for name, weight in weights.items()}
    return {name: now for name, now in made.items() if type(vars(block).get(name)) is not type(now)}


def reader_of(block: nn.Module, weight: PackedWeight) -> WeightReader:
    """The reader of a stacked weight, as its parameters are now."""
    if isinstance(first_parameter(block, weight), QuantizedWeight):
        return registry.packed().StackedParts(block, weight)  # type: ignore[no-any-return]
    if reads_codes(block, weight):
        return registry.packed().StackedCodes(block, weight)  # type: ignore[no-any-return]
    return ListedExperts(block, weight)


def reads_codes(block: nn.Module, weight: PackedWeight) -> bool:
    """Whether a weight is one of 4-bit parameters."""
    return linear4bit.is_four_bit(first_parameter(block, weight))
