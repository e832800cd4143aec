"""Notices a step that an error has broken off on this rank, before the next one starts.

The other ranks may wait in the collectives of that step, and would take those of the next one for them: who catches an error (out
of memory, say) on one rank and goes on with the next batch mixes layers, or hangs. Where all ranks broke off at the same place,
they go on.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

from torch._C import _current_graph_task_id
from torch.autograd import Variable

from hexa_fx.distributed.groups import Groups, groups_named, marks_of_ranks
from hexa_fx.distributed.lockstep import Place, meet
from hexa_fx.errors import RankError

_PATIENCE = 30.0

_agreements: Counter[str] = Counter()
_backwards: set[tuple[str, int]] = set()
"""Backwards that have begun, by process group and autograd's number. Autograd takes out those that end without an error."""


def in_backward_of(group: str) -> None:
    """Called before anything communicates that backward does, or the forward that it runs again. Does nothing outside of backward.

    Raises:
        RankError: other ranks are elsewhere.
    """
    running = group, _current_graph_task_id()
    if running not in _backwards and running[1] != -1:
        _backwards.add(running)
        Variable._execution_engine.queue_callback(functools.partial(_backwards.discard, running))
        if (groups := groups_named(group)) is not None:
            meet(groups, Place.BACKWARD)


class BrokenSteps:
    """Whether a forward or backward has begun and not ended."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self.in_forward = False

    def found(self) -> bool:
        """Whether there is one. It is asked of outside of forward and backward."""
        return self.in_forward or (bool(_backwards) and self._groups.main_name in dict(_backwards))

    def forget(self) -> None:
        """The ranks have agreed on it elsewhere."""
        self.in_forward = False
        for running in [running for running in _backwards if running[0] == self._groups.main_name]:
            _backwards.discard(running)

    def agree(self) -> None:
        """Waits until all ranks have broken off a step.

        Raises:
            RankError: some have not, or elsewhere.
        """
        groups = self._groups
        _agreements[groups.main_name] += 1
        key = f"hexa_fx/broken/{groups.main_name}/{_agreements[groups.main_name]}"
        started = ",".join(map(_collectives_of, (groups.gather, groups.reduce, groups.host)))
        seconds = min(_PATIENCE, groups.timeout.total_seconds())
        marks = marks_of_ranks(key, groups.rank, groups.world, seconds, started)
        others = [rank for rank in range(groups.world) if marks.get(rank) != started]
        if others:
            raise RankError(
                f"an error broke off the last step on rank {groups.rank}, and ranks {others} did not break off there: they wait in "
                "a collective for the rest of it. A step that one rank skips all have to skip: agree on it before the forward, or "
                "end the job and go on from a checkpoint"
            )
        self.forget()


def _collectives_of(group: Any) -> str:
    """How many collectives a process group has begun. Not every backend counts them."""
    try:
        return str(group._get_sequence_number_for_group())
    except RuntimeError:
        return "?"
