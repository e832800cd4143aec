"""Reads the packed matrices of listed experts (a `QuantizedWeight` each) as one packed weight, without a second copy of them.

The user's parameters stay the same objects, and only their memory moves: each keeps a storage
of its own over its part of what all of them hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hexa_fx.formats import format_of
from hexa_fx.formats.formed import PackedStack
from hexa_fx.formats.quantized_weight import Place, QuantizedWeight
from hexa_fx.packed.reader import PackedReader
from hexa_fx.runtime.guards import GuardMiss
from hexa_fx.torch_private import DisableTorchFunction

_names = count()
Stack = TypeVar("Stack", QuantizedWeight, PackedStack)


class StackedParts(PackedReader):
    """A weight that is read as a `QuantizedWeight` (E, ., .)."""

    def _bind(self, block: nn.Module) -> None:
        super()._bind(block)
        self._places: list[Place] = []
        self._lies: list[str] = []

    def _seen_in_trace(self) -> list[Any]:
        return self.tensors_in_trace()

    def _kind(self, first: QuantizedWeight) -> tuple[str, torch.dtype, bool]:
        return first.format, first.dtype, first.transposed

    def _copied(self, parameters: Sequence[Any]) -> PackedStack:
        return self._joined(parameters, PackedStack)

    def _still_in_place(self, parameters: Sequence[Any]) -> bool:
        return [getattr(parameter, "lies", "") for parameter in parameters] == self._lies

    def _in_place(self, parameters: Sequence[Tensor]) -> bool:
        return len(parameters) == len(self._places) and all(
            getattr(parameter, "place", None) is place for parameter, place in zip(parameters, self._places)
        )

    def _pack(self, parameters: Sequence[Tensor]) -> QuantizedWeight:
        parts = self._packed_parts(parameters)
        packed = self._where_they_lie(parameters)
        if packed is None:
            with torch.inference_mode(False), torch.no_grad():
                packed = self._joined(parameters, QuantizedWeight)
                _move(parts, packed)
        self._places = [parameter.place for part in parts for parameter in part]
        self._lies = [parameter.lies for part in parts for parameter in part]
        return packed

    def _where_they_lie(self, parameters: Sequence[Tensor]) -> QuantizedWeight | None:
        """What another block with the same experts has moved them to, if that is how they are read here."""
        places: list[Place] = [getattr(parameter, "place", None) for parameter in parameters]
        first, experts = places[0], len(self.weight.parts[0])
        if first is None or first[0].shape[0] != experts or first[2] != len(places):
            return None
        of_one = all(place is not None and place[0] is first[0] for place in places)
        return first[0] if of_one and [place[1] for place in places if place] == [*range(len(places))] else None

    def _joined(self, parameters: Sequence[Tensor], kind: type[Stack]) -> Stack:
        parts = self._packed_parts(parameters)
        first = parts[0][0]
        held = [[_beside(rows) for rows in zip(*(p.held for p in alike))] for alike in zip(*parts)]
        codes, *scales = (torch.stack(list(of_all)) for of_all in zip(*held))
        packed = codes.view(format_of(first.format).dtype)
        return kind(packed, tuple(scales), first.format, first.dtype, first.transposed)

    def _packed_parts(self, parameters: Sequence[Tensor]) -> list[Sequence[QuantizedWeight]]:
        packed = [parameter for parameter in parameters if isinstance(parameter, QuantizedWeight)]
        first = packed[0] if packed else None
        kinds = {(p.format, p.transposed, p.dtype, p.device, p.shape[1:]) for p in packed}
        if len(packed) < len(parameters) or first is None or len(kinds) > 1 or first.dim() != 2:
            raise GuardMiss(f"the experts' matrices of {self.weight.name!r} are no longer packed alike")
        parts = self.in_parts(packed)
        if any(len({p.shape for p in part}) > 1 for part in parts):
            raise GuardMiss(f"the experts' matrices of {self.weight.name!r} differ in shape")
        return parts


def _move(parts: Sequence[Sequence[QuantizedWeight]], packed: QuantizedWeight) -> None:
    """Lets parameters lie in what was made of them."""
    begins, number, total, name = [0 for _ in packed.held], count(), sum(map(len, parts)), next(_names)
    for part in parts:
        for expert, parameter in enumerate(part):
            parameter.lie_in([_part(*each, expert) for each in zip(packed.held, parameter.held, begins)])
            parameter.place = place = packed, next(number), total
            parameter.lies = f"{name}.{place[1]}"
        begins = [begin + len(own) if own.dim() else 0 for begin, own in zip(begins, part[0].held)]


def _beside(rows: Sequence[Tensor]) -> Tensor:
    """One tensor of the rows of several. Elements are handed over as bytes, which every device takes."""
    plain = [r.view(torch.uint8) if r.dim() and r.itemsize == 1 else r for r in rows]
    return torch.cat(plain) if len(plain) > 1 else plain[0]


def _part(whole: Tensor, own: Tensor, begin: int, expert: int) -> Tensor:
    """The part of an expert's share in ``whole`` that ``own`` is equal to."""
    share = whole[expert]
    return _with_own_storage(share[begin : begin + len(own)] if own.dim() else share)


def _with_own_storage(value: Tensor) -> Tensor:
    """A tensor on the same memory, which it keeps alive, that has a storage for itself; on the meta device a view.

    Whatever looks at storages takes tensors of one storage for one tensor under several names: accelerate saves the first of them
    only, safetensors' ``save_model`` refuses them, and `torch.save` of one writes all.
    """
    if value.is_meta:
        return value
    start = value.storage_offset() * value.element_size()
    with torch.inference_mode(False), torch.no_grad(), DisableTorchFunction():
        part: torch.UntypedStorage = value.untyped_storage()[start : start + value.numel() * value.element_size()]
        return torch.empty(0, dtype=value.dtype, device=value.device).set_(part, 0, value.shape, value.stride())
