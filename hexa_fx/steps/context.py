"""What a recorded step needs to know of where its model runs: on one device, or in a partition (`PartitionSession`)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn


class StepContext(Protocol):
    """What a recorded step needs to know of where its model runs."""

    @property
    def model(self) -> nn.Module:
        """Whose parameters the step trains."""

    def gathered(self, mine: Sequence[int]) -> list[list[int]]:
        """These numbers of every rank, in rank order."""

    def following(self, notes: list[Any]) -> AbstractContextManager[None]:
        """Within it, what hosts tell each other in a step is noted; in a recording, where they cannot, what was noted is taken."""

    def held(self) -> list[Any]:
        """Memory beside the model's that a recording uses and somebody else might give up."""

    def settle(self) -> None:
        """Waits for what goes on after a step has returned, so that the next one depends on none of it."""

    def abandon(self) -> None:
        """Forgets a step that was broken off."""


@dataclass(frozen=True)
class OneDevice:
    """A model on one device, whole or FSDP2's shards of it. Each rank records for itself: every call does its collectives once."""

    model: nn.Module

    def gathered(self, mine: Sequence[int]) -> list[list[int]]:
        return [list(mine)]

    def following(self, notes: list[Any]) -> AbstractContextManager[None]:
        return nullcontext()

    def held(self) -> list[Any]:
        return []

    def settle(self) -> None:
        return

    def abandon(self) -> None:
        if "torch.distributed.fsdp" in sys.modules:  # which takes a second to import
            from hexa_fx.steps.fully_sharded import forget_step

            forget_step(self.model)
