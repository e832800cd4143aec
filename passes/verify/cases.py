"""What a verification compares, and what came of it, case by case."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

SECOND = "a second call, which sees what the first one stored"
NO_ROUTER = "there is no router inside that could be overridden"


@dataclass(frozen=True)
class VerificationCase:
    """One comparison.

    Args:
        name: which inputs or routing.
        outcome: ``skipped`` if the original raises, or a guard keeps the rewritten block from running.
        forward_error, gradient_error: largest difference relative to the tensor's scale.
        detail: why it was skipped, or where the two differ.
        none_became_zero: parameters whose gradient is None in the original and zero in the rewritten block.
        raised: whether it was skipped because the original raises.
        changed: what a guard reads that the code itself has changed, if it was skipped for that.
    """

    name: str
    outcome: Literal["equal", "different", "skipped"]
    forward_error: float = 0.0
    gradient_error: float = 0.0
    detail: str = ""
    none_became_zero: tuple[str, ...] = ()
    raised: bool = False
    changed: str = ""


@dataclass(frozen=True)
class Subject:
    """What is compared: the block itself, or a copy of it in ``dtype`` of one in ``own``.

    As it is, casts that its code asks for are made.
    """

    module: nn.Module
    dtype: torch.dtype
    own: torch.dtype
    as_it_is: bool = False


def up_to_different(cases: Iterator[VerificationCase]) -> tuple[VerificationCase, ...]:
    """The cases up to the first that differs, which is reason enough, or until the code itself changed what it reads in some."""
    found: list[VerificationCase] = []
    for case in cases:
        found.append(case)
        if case.outcome == "different" or (len(found) == _ENOUGH and changes_itself(found)):
            break
    return tuple(found)


_ENOUGH = 3


def changes_itself(cases: Sequence[VerificationCase]) -> bool:
    """Whether nothing could be compared since every call of the original changed what the rewritten block would read."""
    return bool(cases) and all(case.outcome == "skipped" and case.changed for case in cases)


def size(batch: int, sequence: int) -> str:
    """The name of a case at that size."""
    return f"batch {batch}, sequence {sequence}"
