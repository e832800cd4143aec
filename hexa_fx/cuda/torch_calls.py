"""What torch does around the launches of a recorded call: tensors that leave the call, and operators before and after.

Kernels want some operands in another form (routing weights in float32, contiguous rows) and leave some results unfinished
(partial sums, another dtype). Torch's operators do the rest. Those that read operands only are run before the launches, and
those that compute results after them. Any other operator is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hexa_fx.cuda.record import Recording, TorchCall
from hexa_fx.ops import library

Fresh = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a tensor that every replay allocates."""

_DETACH = torch.ops.aten.detach.default
_CASTS = (torch.ops.aten.to.dtype, torch.ops.aten._to_copy.default)
"""Operators that may be left out if nobody needs their result."""

_Known = dict[int, Any]
"""The tensors of a replay, by the `id` of their counterparts in the recording."""


class CannotReplay(Exception):
    """A recording cannot be replayed on other addresses; says why."""


_Run = Callable[[_Known], None]
"""Runs one operator on the tensors of a replay and adds its result to them."""


@dataclass(frozen=True)
class SurroundingCalls:
    """The torch operators of a recording, ready to run on other tensors. It holds no tensor of the recording, only identities.

    Attributes:
        fresh: what every replay allocates: results, and what operators read after the launches.
    """

    fresh: tuple[Fresh, ...]
    _operands: tuple[int, ...]
    _kept: tuple[int, ...]
    _copies: tuple[int, ...]
    _wanted: tuple[int, ...]
    _single: bool
    _before: tuple[_Run, ...]
    _after: tuple[_Run, ...]

    @classmethod
    def of(cls, recording: Recording, operands: Sequence[Tensor | None]) -> tuple[SurroundingCalls, tuple[Tensor, ...]]:
        """Returns it, and the tensors of the recording that launches may use: those of `fresh`, then the results of `before`.

        Args:
            recording: the call.
            operands: its tensors, None where one is missing.

        Raises:
            CannotReplay: an operator writes to a tensor, or is of neither kind.
        """
        reading = _Reading(recording, operands)
        single = isinstance(recording.result, Tensor)
        results: list[Tensor] = [recording.result] if single else list(recording.result)
        kept: dict[int, Tensor] = {}
        after = reading.behind(results, kept)
        before = reading.ahead([call for call in recording.calls if id(call.result) not in after])
        copies = [call.result for call in recording.calls if id(call.result) in before and not call.is_view]
        around = cls(
            tuple((tuple(t.shape), t.stride(), t.dtype) for t in kept.values()),
            tuple(reading.operands),
            tuple(kept),
            tuple(map(id, copies)),
            tuple(map(reading.place, results)),
            single,
            tuple(reading.again(call) for call in recording.calls if id(call.result) in before),
            tuple(reading.again(call) for call in recording.calls if id(call.result) in after),
        )
        return around, (*kept.values(), *copies)

    def before(self, operands: Sequence[Tensor | None]) -> list[Tensor]:
        """Runs the operators that read operands only, and returns their results."""
        if not self._before:
            return []
        known: _Known = dict(zip(self._operands, operands, strict=True))
        with library.without_autocast():
            for run in self._before:
                run(known)
        return [known[place] for place in self._copies]

    def after(self, operands: Sequence[Tensor | None], fresh: Sequence[Tensor]) -> Any:
        """Runs the operators that compute results, and returns the results of the call, several as a list."""
        known: _Known = dict(zip((*self._operands, *self._kept), (*operands, *fresh), strict=True))
        if self._after:
            with library.without_autocast():
                for run in self._after:
                    run(known)
        if self._single:
            return known[self._wanted[0]]
        return [known[place] for place in self._wanted]


class _Reading:
    """What a recording says about its tensors, which it holds."""

    def __init__(self, recording: Recording, operands: Sequence[Tensor | None]) -> None:
        self.operands = [id(t) for t in operands]
        self._same = {id(call.result): id(call.args[0]) for call in recording.calls if call.function is _DETACH}
        self._made = {id(call.result): call for call in recording.calls}
        self._allocated = {id(t): t for t in recording.allocated}

    def place(self, t: Tensor) -> int:
        """Returns the identity of a tensor. Torch hands out a detached alias of some that it allocates."""
        place = id(t)
        while place in self._same:
            place = self._same[place]
        return place

    def behind(self, wanted: Iterable[Tensor], kept: dict[int, Tensor]) -> set[int]:
        """Returns the results of all operators that these tensors were computed with, and adds the allocations read to `kept`."""
        found: set[int] = set()
        open_ = list(wanted)
        while open_:
            t = open_.pop(0)
            place = self.place(t)
            if place in self.operands or place in kept or place in found:
                continue
            if place in self._allocated:
                kept[place] = self._allocated[place]
            elif place in self._made:
                found.add(place)
                open_ += _tensors(self._made[place])
            else:
                raise CannotReplay("its result is none of its allocations")
        return found

    def ahead(self, calls: Sequence[TorchCall]) -> set[int]:
        """Returns the results of the operators that read operands only, and of the views that they read."""
        found: set[int] = set()
        for call in calls:
            if call.is_view:  # found from the operator that reads it, if there is one
                continue
            kept: dict[int, Tensor] = {}
            places = {id(call.result)} | self.behind(_tensors(call), kept)
            if not isinstance(call.result, Tensor) or (kept and call.function not in _CASTS):
                raise CannotReplay(f"it also runs {call.function}")
            if not kept:
                found |= places
        return found

    def again(self, call: TorchCall) -> _Run:
        """Returns a function that runs the operator on the tensors of a replay and adds its result to them."""
        function, kwargs, place = call.function, dict(call.kwargs), id(call.result)
        args = [(True, self.place(a)) if isinstance(a, Tensor) else (False, a) for a in call.args]
        inside = [a for a in call.args if isinstance(a, list | tuple)] + [[*kwargs.values()]]
        if function._schema.is_mutable or any(isinstance(a, Tensor | list) for one in inside for a in one):
            raise CannotReplay(f"it also runs {function}")

        def run(known: _Known) -> None:
            known[place] = function(*(known[a] if given else a for given, a in args), **kwargs)

        return run


def _tensors(call: TorchCall) -> list[Tensor]:
    return [a for a in (*call.args, *call.kwargs.values()) if isinstance(a, Tensor)]
