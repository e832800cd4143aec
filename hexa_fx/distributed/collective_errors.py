"""What a failed collective is reported as: where this rank was, and how to learn which rank failed first.

Who looks after processes is their launcher: torchrun names the rank that ended and ends the others. A rank that stops without
ending is named by a barrier between hosts (`join`), and torch's flight recorder has the collectives of every rank.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hexa_fx.distributed.groups import Groups
from hexa_fx.errors import HexaError, RankError, first_line

_WORDS = ("gloo", "nccl", "connection", "timeout", "timed out", "socket", "pair closure", "broken pipe")
_NEVER_SENT = 1 << 20
"""A tag of messages between hosts."""
_NAMES = "failed to pass"
"""In the error of a barrier that names who did not come."""


def join(groups: Groups, when: str, timeout: timedelta | None = None) -> None:
    """A barrier between hosts. Raises `RankError` with the ranks that do not arrive."""
    try:
        dist.monitored_barrier(groups.host, timeout=timeout or groups.timeout, wait_all_ranks=True)
    except RuntimeError as error:
        named = "" if _NAMES in str(error) else _ended(groups.host)
        raise RankError(f"not all ranks arrived {when}: {named}{first_line(error)}") from error


def _ended(group: dist.ProcessGroup) -> str:
    """Names ranks whose connections are closed, which torch's error does not where they were closed before the barrier began."""
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    for _ in range(20):
        if ended := [dist.get_global_rank(group, rank) for rank in others if not _connected(group, rank)]:
            return "".join(f"Rank {rank} ended. " for rank in ended)
        time.sleep(0.05)  # sockets of one process are seen to close one after the other
    return ""


def _connected(group: dist.ProcessGroup, rank: int) -> bool:
    """Gloo refuses to receive over a closed connection. Over an open one nothing is ever sent for this: the caller raises."""
    try:
        dist.irecv(torch.empty(1, device="cpu"), group=group, group_src=rank, tag=_NEVER_SENT)
    except RuntimeError:
        return False
    return True


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
        ended = "" if self.barrier is None else _ended(self.barrier.host)
        raise RankError(
            f"a collective failed in {self.where} on rank {dist.get_rank()}: {ended or advice}Backend: {first_line(error)}"
        ) from error
