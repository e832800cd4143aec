"""Makes sure that all ranks are at the same place of a step before they start what pairs up with anything.

Collectives of equal sizes pair up whatever they were meant for. A rank that makes one forward more than the others, in an
evaluation or in `generate`, would take the gathers of their backward for those of its forward, of other layers: wrong
numbers, a process that Gloo aborts, or a wait for ever. The same holds where one rank catches an error in a step and goes on with
the next. So hosts tell each other where they are when a pass and when a backward begins.

A collective that fails is reported as `RankError`, which says where this rank was. Who looks after processes is their launcher:
torchrun names the rank that ended and ends the others. A rank that stops without ending is named by a barrier between hosts
(`join`), and torch's flight recorder has the collectives of every rank.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _current_graph_task_id
from torch.autograd import Variable

from hexa_fx.distributed.groups import Groups, gather_even, groups_named
from hexa_fx.errors import HexaError, PlanError, RankError, first_line

_WORDS = ("gloo", "nccl", "connection", "timeout", "timed out", "socket", "pair closure", "broken pipe")


def join(groups: Groups, when: str, timeout: timedelta | None = None) -> None:
    """A barrier between hosts. Raises `RankError` with the ranks that do not arrive."""
    try:
        dist.monitored_barrier(groups.host, timeout=timeout or groups.timeout, wait_all_ranks=True)
    except RuntimeError as error:
        raise RankError(f"not all ranks arrived {when}: {first_line(error)}. torchrun says which rank ended") from error


def is_collective_failure(error: BaseException) -> bool:
    """Whether a communication backend raised the exception. Gloo raises plain RuntimeErrors, recognised by their wording."""
    if isinstance(error, (dist.DistError, dist.DistBackendError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _WORDS)


class guarded:
    """A context that turns the error of a failed collective into a `RankError` that says where it failed, and on which rank.

    It has no state, so it may be entered many times.

    Args:
        where: what is being done, for the error.
        barrier: ranks whose hosts wait for each other first. Those that do not come are named then, at the price of a round trip.
    """

    __slots__ = ("barrier", "where")

    def __init__(self, where: str, barrier: Groups | None = None) -> None:
        self.where, self.barrier = where, barrier

    def __enter__(self) -> None:
        if self.barrier is not None:
            join(self.barrier, f"before {self.where}")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, HexaError) or not is_collective_failure(error):
            return
        advice = (
            "another rank ended, does not come, or began another collective. torchrun says which one ended first, and a barrier "
            "before every step which one does not come: with session.guard('a step', barrier=True). "
        )
        raise RankError(
            f"a collective failed in {self.where} on rank {dist.get_rank()}: {advice}Backend: {first_line(error)}"
        ) from error


class Place(IntEnum):
    """Where hosts meet."""

    FORWARD = 0
    LAYER = 1
    BACKWARD = 2
    COUNT = 3
    SYNC = 4
    CHECKPOINT = 5
    NORM = 6
    PACE = 7
    PLAN = 8
    ANALYSIS = 9


_SAID = {
    Place.FORWARD: "the beginning of a forward",
    Place.LAYER: "the forward of a layer",
    Place.BACKWARD: "a backward",
    Place.COUNT: "the count of a step's samples or tokens",
    Place.SYNC: "the sum of a step's gradients",
    Place.CHECKPOINT: "a checkpoint",
    Place.NORM: "the norm of the gradients",
    Place.PACE: "the timing of the devices",
    Place.PLAN: "the exchange of plans",
    Place.ANALYSIS: "the analysis of a call of another kind",
}

_backwards: set[tuple[str, int]] = set()
"""Backwards that have begun, by process group and autograd's number. Autograd takes out those that end without an error."""


def meet(groups: Groups, place: Place, number: int = 0) -> list[int]:
    """Waits until all hosts are at this place, and returns the number that each of them brought.

    Raises:
        RankError: on all ranks, if some are at another place; or one does not come.
    """
    if groups.world == 1 or is_capturing():
        return [number]
    out = torch.empty((groups.world, 2), dtype=torch.int64, device="cpu")
    with guarded(_SAID[place]):
        gather_even(out, torch.tensor([[place, number]], device="cpu"), group=groups.host)
    places, numbers = out.t().tolist()
    if places.count(place) != groups.world:
        raise _apart(places, groups.rank)
    return numbers  # type: ignore[no-any-return]


_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_KINDS = (*itertools.product((True, False), _DTYPES, (None, *_DTYPES)),)


def kind_of_forward(model: nn.Module, weight: Tensor) -> int:
    """In what mode a model is, the dtype of its experts' weights and that of autocast, as a number; -1 for other dtypes."""
    device = weight.device.type
    cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    found = model.training, weight.dtype, cast
    return _KINDS.index(found) if found in _KINDS else -1


def begin_forward(groups: Groups, kind: Callable[[], int]) -> None:
    """Waits until all hosts begin a forward.

    Raises:
        PlanError: on all ranks, if they begin forwards of different kinds, which would exchange other numbers of bytes.
        RankError: some are at another place; or one does not come.
    """
    if groups.world == 1 or is_capturing():
        return
    kinds = meet(groups, Place.FORWARD, kind())
    if kinds.count(kinds[0]) != len(kinds):
        said = "; ".join(f"rank {rank} {_spelled(number)}" for rank, number in enumerate(kinds))
        raise PlanError(
            f"the ranks of the partition call the model in different ways: {said}. What they exchange would not fit: call it in "
            "one mode, with weights of one dtype and under one autocast on all of them"
        )


def _spelled(kind: int) -> str:
    if kind < 0:
        return "in another dtype"
    training, weights, cast = _KINDS[kind]
    autocast = f"autocast to {cast}" if cast else "no autocast"
    return f"in {'train' if training else 'eval'} mode, weights in {weights}, {autocast}"


class NotedCounts:
    """Numbers of tokens that hosts exchange, and those that they exchanged in the step before.

    A CUDA graph of a step has the same sizes as the step before it, on every rank, so hosts need not exchange them again.
    """

    def __init__(self) -> None:
        self._notes: list[list[int]] | None = None
        self._taken = 0

    @contextmanager
    def following(self, notes: list[list[int]]) -> Iterator[None]:
        """Within it counts are noted, or taken from the notes where a graph is recorded."""
        self._notes, self._taken = notes, 0
        try:
            yield
        finally:
            self._notes = None

    def exchange(self, groups: Groups, rows: int) -> list[int]:
        """Every rank's ``rows``.

        Raises:
            PlanError: a graph is being recorded of a step that was not noted, or had another number of rows.
            RankError: other ranks are elsewhere.
        """
        if not is_capturing():
            counts = meet(groups, Place.LAYER, rows)
            if self._notes is not None:
                self._notes.append(counts)
            return counts
        noted = (self._notes or [])[self._taken : self._taken + 1]
        self._taken += 1
        if not noted or noted[0][groups.rank] != rows:
            raise PlanError(
                "hosts exchange numbers of tokens, which a CUDA graph cannot repeat: record the step with model.partition.graphed, "
                "or plan with static_tokens=True"
            )
        return noted[0]


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


def is_capturing() -> bool:
    """Whether a CUDA graph is being recorded, which hosts that meet would not be in."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _apart(places: list[int], rank: int) -> RankError:
    where = {place: [r for r, at in enumerate(places) if at == place] for place in dict.fromkeys(places)}
    said = ", ".join(f"ranks {ranks} at {_SAID[Place(place)]}" for place, ranks in where.items())
    return RankError(
        f"the ranks of the partition have come apart, {said} (this is rank {rank}): every rank makes as many forwards and "
        "backwards as the others. One that has run out of samples calls the model with an empty batch, or all stop when the first "
        "one has; generate() takes synced_gpus=True; a step that one rank breaks off, all break off"
    )
