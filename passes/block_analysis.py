"""What the passes hand on of one block, by the mode that it runs in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import nn

from hexa_fx.capture import CapturedBlock
from hexa_fx.capture.calls import written_at
from hexa_fx.ir import PythonRead, Refusal, RewrittenBlock
from hexa_fx.passes.detect import MoEMatch
from hexa_fx.passes.verify import VerificationResult

Mode = Literal["eval", "train"]
MODES: tuple[Mode, ...] = ("eval", "train")


@dataclass(frozen=True)
class BlockAnalysis:
    """What the passes made of one block.

    Args:
        path: the block's path.
        match: the region, from the first mode in which it was found.
        captured, rewritten, refusals: by mode; a mode is in exactly one of ``rewritten`` and ``refusals``.
        checks: by mode, for those that were rewritten at first; empty if verification is off.
        seconds: time of capture, detection and rewriting.
        reads: what the runs of all modes read from Python.
    """

    path: str
    match: MoEMatch | None
    captured: Mapping[Mode, CapturedBlock] = field(default_factory=dict)
    rewritten: Mapping[Mode, RewrittenBlock] = field(default_factory=dict)
    refusals: Mapping[Mode, Refusal] = field(default_factory=dict)
    checks: Mapping[Mode, VerificationResult] = field(default_factory=dict)
    seconds: float = 0.0
    reads: tuple[PythonRead, ...] = ()

    def with_forms(self, change: Callable[[RewrittenBlock], RewrittenBlock]) -> dict[Mode, RewrittenBlock]:
        """``change`` of what is rewritten, by mode. What both modes share is changed once, and stays the same in both."""
        forms = {id(form): form for form in self.rewritten.values()}
        made = {number: change(form) for number, form in forms.items()}
        return {mode: made[id(form)] for mode, form in self.rewritten.items()}

    def placed_in(self, block: nn.Module) -> BlockAnalysis:
        """The analysis with a place for each of its refusals that has none: the block's code, where no line of it is the reason."""
        if all(refusal.location for refusal in self.refusals.values()):
            return self
        location = written_at(block)
        refusals = {mode: replace(r, location=r.location or location) for mode, r in self.refusals.items()}
        return replace(self, refusals=refusals)

    @property
    def elsewhere(self) -> bool:
        """Whether it is refused because code around it gives tokens to experts."""
        return not self.rewritten and all(refusal.elsewhere for refusal in self.refusals.values())

    @property
    def settled(self) -> bool:
        """Whether it is refused for what other inputs, and modules around it, would not change."""
        return not self.rewritten and all(refusal.settled for refusal in self.refusals.values())
