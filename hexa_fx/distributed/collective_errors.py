"""What a failed collective is reported as: where it failed, and which ranks are lost."""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hexa_fx.distributed import rank_failures
from hexa_fx.distributed.groups import Groups, groups_named, marks_of_ranks
from hexa_fx.errors import HexaError, RankError, first_line

_incidents = 0

_LONGEST_GRACE = 30.0
_NOTICE_SECONDS = 2.0


def join(groups: Groups, when: str, timeout: timedelta | None = None) -> None:
    """A barrier between hosts. Raises `RankError` with the ranks that do not arrive."""
    if rank_failures.any_lost:
        rank_failures.check(f"a barrier {when}", groups)
    try:
        dist.monitored_barrier(groups.host, timeout=timeout or groups.timeout, wait_all_ranks=True)
    except RuntimeError as error:
        raise RankError(f"not all ranks arrived {when}: {first_line(error)}") from error


def is_collective_failure(error: BaseException) -> bool:
    """Whether a communication backend raised the exception. Gloo raises plain RuntimeErrors, recognised by their wording."""
    if isinstance(error, (dist.DistError, dist.DistBackendError)):
        return True
    words = ("gloo", "nccl", "connection", "timeout", "timed out", "socket", "pair closure", "broken pipe")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


def explain_failure(error: BaseException, where: str, groups: Groups) -> RankError:
    """The error to raise on a surviving rank: what failed, where, and which ranks no longer answer.

    Every survivor leaves a mark in the job's store and waits for those of the others. A survivor that waits for another
    survivor only notices the loss when its own collective times out, so the others wait as long, up to half a minute.
    """
    grace = min(groups.timeout.total_seconds(), _LONGEST_GRACE) + 3.0
    lost = rank_failures.find_lost(groups, _NOTICE_SECONDS)
    answers = {} if lost else _answers(groups, where, grace)
    if answers is None:
        found = "the job's store does not answer either, so the host that keeps it (of rank 0) is lost, or this one is cut off"
    elif missing := lost or [rank for rank in range(groups.world) if rank not in answers]:
        found = f"ranks {missing} do not answer"
    else:
        places = [f"rank {rank} was in {place}" for rank, place in answers.items() if place != where]
        found = "; ".join(["all ranks answer, so they issued different collectives", *places[:4]])
    return RankError(f"a collective failed in {where} on rank {groups.rank}: {found}. Backend: {first_line(error)}")


def _answers(groups: Groups, where: str, grace: float) -> dict[int, str] | None:
    """Where the ranks were that answer. None if the store itself does not; where a host is cut off, its client waits for ever."""
    global _incidents
    _incidents += 1
    key, found = f"hexa_fx/incident/{_incidents}", list[dict[int, str]]()

    def ask() -> None:
        with suppress(RuntimeError):
            found.append(marks_of_ranks(key, groups.rank, groups.world, grace, where))

    asking = threading.Thread(target=ask, name="hexa_fx who is lost", daemon=True)
    asking.start()
    asking.join(grace + _NOTICE_SECONDS)
    return found[0] if found and groups.rank in found[0] else None


class guarded:
    """A context that turns the error of a failed collective into one that says where it failed and who is lost.

    It raises at once if a rank is already known to be lost, and at the end if collectives were aborted in between. It has no
    state, so it may be entered many times.

    Args:
        where: what is being done, for the error.
        groups: the groups, or the name of one of their process groups. With an unknown name errors stay as they are.
    """

    __slots__ = ("groups", "where")

    def __init__(self, where: str, groups: Groups | str) -> None:
        self.where, self.groups = where, groups

    def __enter__(self) -> None:
        if rank_failures.any_lost:
            rank_failures.check(self.where, self.groups)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self._explain(error)
        elif rank_failures.any_lost and rank_failures.is_aborted(self.groups):
            rank_failures.check(self.where, self.groups)

    def _explain(self, error: BaseException) -> None:
        if isinstance(error, HexaError) or not isinstance(error, Exception):
            return
        known = groups_named(self.groups) if isinstance(self.groups, str) else self.groups
        if known is not None and (is_collective_failure(error) or rank_failures.is_aborted(known)):
            raise explain_failure(error, self.where, known) from error
