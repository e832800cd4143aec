"""How a detection step says no."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch.fx import Node

from hexa_fx.capture import record_of
from hexa_fx.capture.replay import CannotReplay
from hexa_fx.ir import Refusal, SourceLocation

Found = TypeVar("Found")


class Refuse(Exception):
    """Ends detection of one block with a sentence for the user and the line that it is about, or the node that is of this line.

    Internal to the passes: every step raises it where what it looks for is not there, or is nothing that can be rewritten, and
    `hexa_fx.passes.detect.detect_block` returns it as a `hexa_fx.ir.Refusal` value.

    ``elsewhere``: whether what is missed here may be in the code around the block.
    """

    def __init__(self, reason: str, node: Node | SourceLocation | None = None, elsewhere: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.node = node
        self.elsewhere = elsewhere

    def at(self, path: str) -> Refusal:
        """The refusal of the block at ``path``."""
        location = self.node if isinstance(self.node, SourceLocation) else None
        if isinstance(self.node, Node) and self.node.op != "output":
            location = record_of(self.node).location
        return Refusal(path, self.reason, location, elsewhere=self.elsewhere)


class NoRouting(Refuse):
    """The rows of this tensor are given to experts, but nothing says to which: perhaps they are rows of another tensor."""


def first_match(attempts: Iterable[Callable[[], Found]]) -> Found:
    """What the first of some attempts finds that does not refuse."""
    first = None
    try:
        for attempt in attempts:
            try:
                return attempt()
            except Refuse as refusal:
                first = first or refusal
        assert first is not None
        raise first
    finally:
        del first  # it refers to this frame and all callers, which it would keep alive until garbage is collected


@contextmanager
def experiments() -> Iterator[None]:
    """A context in which an experiment that cannot be carried out is a refusal."""
    try:
        yield
    except CannotReplay as failed:
        raise Refuse(
            f"with other numbers in place of what experts compute, {failed.node.name} raises an error: {failed.__cause__}",
            failed.node,
        ) from failed
