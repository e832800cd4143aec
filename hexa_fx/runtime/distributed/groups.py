"""Process groups of a plan; the check that all ranks agree on it; who is lost after a failure."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from hexa_fx.errors import PlanError, RankError
from hexa_fx.plan import Plan

logger = logging.getLogger(__name__)

_incidents = 0

# Communicators cost memory and sockets: one set a mesh. Weak, as torch's own table of groups owns them.
_made: WeakKeyDictionary[Any, dict[timedelta | None, Groups]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Groups:
    """The same ranks, three communicators: collectives of one communicator queue behind each other.

    Args:
        main: activations and gradients.
        gather: gathers of expert weights, which run beside the others.
        host: Gloo, for numbers that the hosts exchange without touching the device.
    """

    main: Any
    gather: Any
    host: Any
    rank: int
    world: int
    timeout: timedelta

    @property
    def main_name(self) -> str:
        return str(self.main.group_name)

    @property
    def gather_name(self) -> str:
        return str(self.gather.group_name)


def make_groups(mesh: Any = None, timeout: timedelta | None = None) -> Groups:
    """Communicators over the ranks of ``mesh``. All its ranks must call this at the same point.

    Args:
        mesh: a 1-d DeviceMesh, a process group, or None for all ranks.
        timeout: after which a collective that a rank does not join fails; None is torch's default of the backend.

    Raises:
        PlanError: torch.distributed is not initialised, or the mesh has more than one dimension.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise PlanError("a partition needs torch.distributed: start with torchrun and call init_process_group first")
    main = _group_of(mesh)
    known = _made.get(main, {})
    if timeout not in known:
        known = {**known, timeout: _new_groups(main, timeout)}
        _made[main] = known
    return known[timeout]


def _new_groups(main: Any, timeout: timedelta | None) -> Groups:
    ranks = dist.get_process_group_ranks(main)
    backend = dist.get_backend(main)
    local = len(ranks) != dist.get_world_size()
    gather = dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=local)
    host = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=local)
    return Groups(main, gather, host, dist.get_rank(main), len(ranks), timeout or timedelta(minutes=5))


def _group_of(mesh: Any) -> Any:
    if mesh is None:
        return dist.group.WORLD
    if not hasattr(mesh, "get_group"):
        return mesh
    if mesh.ndim != 1:
        raise PlanError(f"experts are split over one mesh dimension, got a mesh of shape {tuple(mesh.shape)}: slice it")
    return mesh.get_group()


def check_same_plan(plan: Plan, groups: Groups) -> None:
    """Raises on every rank, before any step, when a rank is missing or holds another plan."""
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
    """A barrier between hosts that names the ranks that do not come."""
    try:
        dist.monitored_barrier(groups.host, timeout=timeout or groups.timeout, wait_all_ranks=True)
    except RuntimeError as error:
        raise RankError(f"not all ranks arrived {when}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """The first line of an error's text; torch appends a C++ stack to it."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def is_collective_failure(error: BaseException) -> bool:
    """Whether an exception comes from a communication backend (which raises plain RuntimeError on Gloo)."""
    if isinstance(error, RankError):
        return False
    if isinstance(error, (dist.DistError, dist.DistBackendError)):
        return True
    text = str(error)
    marks = ("gloo", "Gloo", "NCCL", "nccl", "Connection closed", "Connection reset", "Timed out waiting")
    return isinstance(error, RuntimeError) and any(mark in text for mark in marks)


def explain_failure(error: BaseException, where: str, groups: Groups, grace: float = 3.0) -> RankError:
    """The error to raise on a surviving rank: what failed, where, and which ranks no longer answer.

    Every survivor leaves a mark in the job's store and waits ``grace`` seconds for the marks of the others.
    """
    missing = _silent_ranks(groups, grace)
    lost = f"ranks {missing} do not answer" if missing else "all ranks answer, so they issued different collectives"
    return RankError(f"a collective failed in {where} on rank {groups.rank}: {lost}. Backend: {first_line(error)}")


def _silent_ranks(groups: Groups, grace: float) -> list[int]:
    global _incidents
    _incidents += 1
    key = f"hexa_fx/incident/{_incidents}"
    missing = []
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{key}/{groups.rank}", "here")
        for rank in range(groups.world):
            try:
                store.wait([f"{key}/{rank}"], timedelta(seconds=grace))
            except RuntimeError:
                missing.append(rank)
    except RuntimeError as error:
        logger.warning("the job's store is gone too, so lost ranks cannot be named: %s", first_line(error))
    return missing
