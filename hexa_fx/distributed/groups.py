"""Process groups of a plan, the check that all ranks agree on it, and which ranks are lost after a failure."""

from __future__ import annotations

import functools
import json
import logging
import time
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch.distributed as dist

from hexa_fx.distributed import lost
from hexa_fx.errors import HexaError, PlanError, RankError
from hexa_fx.plan import Plan

logger = logging.getLogger(__name__)

_incidents = 0

_LONGEST_GRACE = 30.0
_NOTICE_SECONDS = 2.0
_DEFAULT_TIMEOUT = timedelta(minutes=5)
_arrivals: Counter[str] = Counter()

# Communicators cost memory and sockets: one set a mesh. Weak, as torch's own table of groups owns them.
_made: WeakKeyDictionary[Any, dict[timedelta | None, Groups]] = WeakKeyDictionary()
_by_name: WeakValueDictionary[str, Groups] = WeakValueDictionary()


@dataclass(frozen=True)
class Groups:
    """Four communicators over the same ranks, since collectives of one communicator queue behind each other.

    Args:
        main: activations.
        gather: gathers of expert weights, which run beside the others.
        reduce: sums of expert gradients, likewise.
        host: Gloo, for numbers that the hosts exchange without touching the device.
    """

    main: Any
    gather: Any
    reduce: Any
    host: Any
    rank: int
    world: int
    timeout: timedelta

    @functools.cached_property
    def main_name(self) -> str:
        return str(self.main.group_name)

    @functools.cached_property
    def gather_name(self) -> str:
        return str(self.gather.group_name)

    @functools.cached_property
    def reduce_name(self) -> str:
        return str(self.reduce.group_name)


def make_groups(mesh: Any = None, timeout: timedelta | None = None) -> Groups:
    """Makes communicators over the ranks of ``mesh``. All of them must call it at the same point.

    Args:
        mesh: a 1-d DeviceMesh, a process group, or None for all ranks.
        timeout: how long a collective waits for a rank before it fails; None for the backend's default.

    Raises:
        PlanError: torch.distributed is not initialised, or the mesh has more than one dimension.
        RankError: a rank did not arrive in time.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise PlanError("a partition needs torch.distributed: start with torchrun and call init_process_group first")
    main = _group_of(mesh)
    known = _made.get(main, {})
    if timeout not in known:
        _arrive(main, (timeout or _DEFAULT_TIMEOUT).total_seconds())
        known = {**known, timeout: _new_groups(main, timeout)}
        _made[main] = known
    return known[timeout]


def _new_groups(main: Any, timeout: timedelta | None) -> Groups:
    ranks = dist.get_process_group_ranks(main)
    local = len(ranks) != dist.get_world_size()
    gather, reduce = (dist.new_group(ranks, timeout=timeout, use_local_synchronization=local) for _ in range(2))
    host = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=local)
    made = Groups(main, gather, reduce, host, dist.get_rank(main), len(ranks), timeout or _DEFAULT_TIMEOUT)
    for name in (made.main_name, made.gather_name, made.reduce_name):
        _by_name[name] = made
    return made


def _arrive(main: Any, seconds: float) -> None:
    """Waits for all ranks in the job's store. Creating a communicator would wait too, but not say for whom."""
    name = str(main.group_name)
    _arrivals[name] += 1
    key = f"hexa_fx/arrival/{name}/{_arrivals[name]}"
    missing = _missing(key, dist.get_rank(main), dist.get_world_size(main), seconds)
    if missing:
        raise RankError(
            f"ranks {missing} did not arrive within {seconds:g} s to partition the model: all ranks must call it"
        )


def _missing(key: str, rank: int, world: int, seconds: float) -> list[int]:
    """Leaves this rank's mark in the job's store. Returns the ranks whose marks do not appear in time."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{key}/{rank}", "here")
    end = time.monotonic() + seconds
    missing = []
    for other in range(world):
        try:
            store.wait([f"{key}/{other}"], timedelta(seconds=max(0.05, end - time.monotonic())))
        except RuntimeError:
            missing.append(other)
    return missing


def _group_of(mesh: Any) -> Any:
    if mesh is None:
        return dist.group.WORLD
    if not hasattr(mesh, "get_group"):
        return mesh
    if mesh.ndim != 1:
        raise PlanError(f"experts are split over one mesh dimension, got a mesh of shape {tuple(mesh.shape)}: slice it")
    return mesh.get_group()


def check_same_plan(plan: Plan, groups: Groups) -> None:
    """Raises on every rank, before any step: `RankError` when a rank is missing, `PlanError` when one holds another plan."""
    if plan.world != groups.world:
        raise PlanError(f"the plan is for {plan.world} ranks, the mesh has {groups.world}: plan again or load by file")
    join(groups, "before the plans were compared")
    texts: list[str] = [""] * groups.world
    dist.all_gather_object(texts, plan.to_json(), group=groups.host)
    if len(set(texts)) == 1:
        return
    plans = [Plan.from_json(text) for text in texts]
    prints = {rank: other.fingerprint for rank, other in enumerate(plans)}
    other = next(rank for rank, text in enumerate(texts) if text != texts[0])
    raise PlanError(
        f"ranks hold different plans, fingerprints {prints}; rank 0 and rank {other} differ in "
        f"{_first_difference(texts[0], texts[other])}. Plan on one rank and broadcast it (partition_model does)"
    )


def _first_difference(left: str, right: str) -> str:
    a, b = json.loads(left), json.loads(right)
    keys = [key for key in a if a[key] != b.get(key)]
    return "; ".join(f"{key}: {a[key]!r} and {b.get(key)!r}"[:400] for key in keys[:3])


def join(groups: Groups, when: str, timeout: timedelta | None = None) -> None:
    """A barrier between hosts. Raises `RankError` with the ranks that do not arrive."""
    if lost.alarm:
        lost.check(f"a barrier {when}", groups)
    try:
        dist.monitored_barrier(groups.host, timeout=timeout or groups.timeout, wait_all_ranks=True)
    except RuntimeError as error:
        raise RankError(f"not all ranks arrived {when}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """The first line of an error's text; torch appends a C++ stack to it."""
    return (str(error).splitlines() or [type(error).__name__])[0]


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
    missing = lost.find_lost(groups, _NOTICE_SECONDS) or _silent_ranks(groups, grace)
    found = f"ranks {missing} do not answer" if missing else "all ranks answer, so they issued different collectives"
    return RankError(f"a collective failed in {where} on rank {groups.rank}: {found}. Backend: {first_line(error)}")


def _silent_ranks(groups: Groups, grace: float) -> list[int]:
    global _incidents
    _incidents += 1
    try:
        return _missing(f"hexa_fx/incident/{_incidents}", groups.rank, groups.world, grace)
    except RuntimeError as error:
        logger.warning("the job's store is gone too, so lost ranks cannot be named: %s", first_line(error))
        return []


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
        if lost.alarm:
            lost.check(self.where, self.groups)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self._explain(error)
        elif lost.alarm and lost.is_aborted(self.groups):
            lost.check(self.where, self.groups)

    def _explain(self, error: BaseException) -> None:
        if isinstance(error, HexaError) or not isinstance(error, Exception):
            return
        known = _by_name.get(self.groups) if isinstance(self.groups, str) else self.groups
        if known is not None and (is_collective_failure(error) or lost.is_aborted(known)):
            raise explain_failure(error, self.where, known) from error
