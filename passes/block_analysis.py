"""What the passes hand on of one block, for one kind of call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from hexa_fx.capture import CapturedBlock
from hexa_fx.capture.calls import written_at
from hexa_fx.ir import PythonRead, Refusal, RewrittenBlock
from hexa_fx.passes.detect import MoEMatch
from hexa_fx.passes.verify import VerificationResult

Mode = Literal["eval", "train"]


def mode_of(block: nn.Module) -> Mode:
    """The mode that a block is in."""
    return "train" if block.training else "eval"


@dataclass(frozen=True)
class BlockAnalysis:
    """What the passes made of one block as it was called.

    Args:
        path: the block's path.
        match: the region, if one was found.
        captured: the recorded run, if the block was rewritten at first.
        rewritten, refusal: exactly one of them is there.
        check: how what was rewritten at first compared; None if verification is off.
        seconds: time of capture, detection and rewriting.
        reads: what the runs read from Python.
        training: the mode, if the code asks for it; None if the other mode would give the same.
    """

    path: str
    match: MoEMatch | None = None
    captured: CapturedBlock | None = None
    rewritten: RewrittenBlock | None = None
    refusal: Refusal | None = None
    check: VerificationResult | None = None
    seconds: float = 0.0
    reads: tuple[PythonRead, ...] = ()
    training: bool | None = None

    def with_form(self, change: Callable[[RewrittenBlock], RewrittenBlock]) -> BlockAnalysis:
        """With ``change`` of what is rewritten, if anything is."""
        return self if self.rewritten is None else replace(self, rewritten=change(self.rewritten))

    def placed_in(self, block: nn.Module) -> BlockAnalysis:
        """With a place for a refusal that has none: the block's code, where no line of it is the reason."""
        if self.refusal is None or self.refusal.location:
            return self
        return replace(self, refusal=replace(self.refusal, location=written_at(block)))

    @property
    def elsewhere(self) -> bool:
        """Whether it is refused because code around it gives tokens to experts."""
        return self.refusal is not None and self.refusal.elsewhere

    @property
    def settled(self) -> bool:
        """Whether it is refused for what other inputs, and modules around it, would not change."""
        return self.refusal is not None and self.refusal.settled


def refused(refusal: Refusal) -> BlockAnalysis:
    """Of a block that is left as it is."""
    return BlockAnalysis(refusal.path, refusal=refusal)
