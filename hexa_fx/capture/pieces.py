"""How many parts a recorded call gave: rows of an unbound tensor, slices of a split one, numbers of a list."""

from __future__ import annotations

from typing import Any, Protocol

import torch.fx

from hexa_fx.capture.records import record_of
from hexa_fx.capture.symint import NumberRecorder, wrap


class NodeRecorder(NumberRecorder, Protocol):
    """What `Pieces` needs of the recorder."""

    def add(self, op: str, target: Any, args: Any, kwargs: Any, value: Any) -> torch.fx.Node: ...


class Pieces:
    """The lists and tuples that recorded calls gave. ``len()`` of one is a size that code may decide on.

    Args:
        recorder: of the calls.
    """

    def __init__(self, recorder: NodeRecorder) -> None:
        self._recorder = recorder
        self._known: dict[int, tuple[Any, torch.fx.Node]] = {}  # by id, which is unique while they are held

    def note(self, pieces: Any, node: torch.fx.Node) -> Any:
        """Returns ``pieces``, which the call of ``node`` gave."""
        self._known[id(pieces)] = pieces, node
        return pieces

    def given_by(self, pieces: Any) -> torch.fx.Node | None:
        """The call that gave them; None if none did, or they were added to since."""
        known, node = self._known.get(id(pieces), ((), None))
        return node if node is not None and known is pieces and len(known) == len(record_of(node).value) else None

    def number(self, pieces: Any) -> Any:
        """How many there are, as a symbolic number; None if no call gave them, or they were added to since."""
        node = self.given_by(pieces)
        if node is None:
            return None
        if node.target == "tolist":
            size = self._recorder.add("call_method", "size", (node.args[0], 0), {}, len(pieces))
        else:
            size = self._recorder.record_call(len, (node,), len(pieces))
        return wrap(len(pieces), size, self._recorder)
