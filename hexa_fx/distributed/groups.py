"""Process groups over the ranks of a mesh."""

from __future__ import annotations

import functools
import math
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hexa_fx.errors import PlanError, RankError

# torch 2.13 renames it; 2.11 knows only the old name.
gather_even = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_LONGEST_ARRIVAL = timedelta(minutes=5)
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
        timeout: how long hosts wait for each other where no collective is under way.
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
        timeout: how long a collective waits for a rank before it fails; None for what init_process_group was given.

    Raises:
        PlanError: torch.distributed is not initialised, or the mesh has more than one dimension.
        RankError: a rank did not arrive in time.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise PlanError("a partition needs torch.distributed: start with torchrun and call init_process_group first")
    main = _group_of(mesh)
    known = _made.get(main, {})
    if timeout not in known:
        of_job = _timeout_of_job()
        patience = timeout or min(of_job or _LONGEST_ARRIVAL, _LONGEST_ARRIVAL)
        _arrive(main, patience.total_seconds())
        known = {**known, timeout: _new_groups(main, timeout or of_job, patience)}
        _made[main] = known
    return known[timeout]


def _timeout_of_job() -> timedelta | None:
    """What init_process_group was given, or the backend's default. New groups get the default, whatever was given."""
    world: Any = dist.group.WORLD
    backend = world._get_backend(world._device_types[0])
    found: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
    return found


def _new_groups(main: Any, timeout: timedelta | None, patience: timedelta) -> Groups:
    ranks = dist.get_process_group_ranks(main)
    gather, reduce = (new_group_of(ranks, timeout=timeout) for _ in range(2))
    host = new_group_of(ranks, timeout=timeout, backend="gloo")
    made = Groups(main, gather, reduce, host, dist.get_rank(main), len(ranks), patience)
    for name in (made.main_name, made.gather_name, made.reduce_name):
        _by_name[name] = made
    return made


def new_group_of(ranks: Sequence[int], **options: Any) -> Any:
    """A process group that these ranks make, and no others, at the same point."""
    local = len(ranks) != dist.get_world_size()
    if local:
        _level(ranks)
    return dist.new_group(list(ranks), use_local_synchronization=local, **options)


def _level(ranks: Sequence[int]) -> None:
    """Makes the ranks members of equally many groups, by which torch names a new one: else none finds the others."""
    key = f"hexa_fx/members/{','.join(map(str, ranks))}"
    _arrivals[key] += 1
    mine = len(dist.distributed_c10d._world.pg_names)
    seconds = min(_timeout_of_job() or _LONGEST_ARRIVAL, _LONGEST_ARRIVAL).total_seconds()
    place = ranks.index(dist.get_rank())
    counts = marks_of_ranks(f"{key}/{_arrivals[key]}", place, len(ranks), seconds, str(mine))
    for _ in range(max(map(int, counts.values())) - mine):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


def _arrive(main: Any, seconds: float) -> None:
    """Waits for all ranks in the job's store. Creating a communicator would wait too, but not say for whom."""
    name = str(main.group_name)
    _arrivals[name] += 1
    key = f"hexa_fx/arrival/{name}/{_arrivals[name]}"
    world = dist.get_world_size(main)
    missing = sorted(set(range(world)) - set(marks_of_ranks(key, dist.get_rank(main), world, seconds)))
    if missing:
        raise RankError(
            f"ranks {missing} did not arrive within {seconds:g} s to partition the model: all ranks must call it"
        )


def marks_of_ranks(key: str, rank: int, world: int, seconds: float, mark: str = "here") -> dict[int, str]:
    """Leaves this rank's mark in the job's store. Returns the marks of the ranks that appear in time."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{key}/{rank}", mark)
    end = time.monotonic() + seconds
    marks = {}
    for other in range(world):
        with suppress(RuntimeError):
            store.wait([f"{key}/{other}"], timedelta(seconds=max(0.05, end - time.monotonic())))
            marks[other] = store.get(f"{key}/{other}").decode()
    return marks


def _group_of(mesh: Any) -> Any:
    if mesh is None:
        return dist.group.WORLD
    if mesh is dist.GroupMember.NON_GROUP_MEMBER or (isinstance(mesh, DeviceMesh) and mesh.get_coordinate() is None):
        raise PlanError(f"rank {dist.get_rank()} is not in the mesh: only its ranks partition the model over it")
    if isinstance(mesh, dist.ProcessGroup):
        return mesh
    if not isinstance(mesh, DeviceMesh):
        raise PlanError(
            f"mesh is a {type(mesh).__name__}; expected a DeviceMesh (init_device_mesh makes one) or a process group"
        )
    if mesh.ndim != 1:
        raise PlanError(
            f"experts are split over one mesh dimension, got a mesh of shape {tuple(mesh.shape)}: slice it, as in "
            f"mesh[{(mesh.mesh_dim_names or ('hexa',))[-1]!r}]"
        )
    return mesh.get_group()


def check_there(groups: Groups) -> None:
    """Raises `PlanError` if the process groups were destroyed. New ones have their names, and perhaps other ranks."""
    if groups.host not in dist.distributed_c10d._world.pg_map:
        raise PlanError(
            "the process groups of this partition were destroyed: close the session before (model.partition.close()), and after "
            "init_process_group build the model anew, optimize_ it and load a checkpoint"
        )


def is_axis(mesh: Any) -> bool:
    """Whether a mesh is one dimension of a DeviceMesh of several."""
    return isinstance(mesh, DeviceMesh) and mesh._get_root_mesh().ndim > 1


def mesh_over(mesh: Any, groups: Groups, device: torch.device) -> DeviceMesh:
    """The mesh of a partition, which was perhaps given as a process group or not at all."""
    return mesh if isinstance(mesh, DeviceMesh) else DeviceMesh.from_group(groups.main, device.type)


def ranks_of(mesh: DeviceMesh) -> set[int]:
    """All ranks of a mesh."""
    return set(mesh.mesh.flatten().tolist())


def groups_named(name: str) -> Groups | None:
    """The groups of which a process group has this name, if they are still in use."""
    return _by_name.get(name)


@dataclass(frozen=True)
class DataAxes:
    """Communicators along the data-parallel dimensions.

    Args:
        groups: one a dimension, for tensors.
        hosts: the same over Gloo.
        everyone: Gloo, all ranks of these dimensions and of the partition; None stands for the partition's own.
    """

    groups: tuple[Any, ...] = ()
    hosts: tuple[Any, ...] = ()
    everyone: Any = None

    @property
    def size(self) -> int:
        """Number of replicas of the partition."""
        return math.prod(map(dist.get_world_size, self.groups))


def data_axes(mesh: Any, groups: Groups) -> DataAxes:
    """The axes of ``mesh``, a DeviceMesh of any number of dimensions, none of them the partition's. A collective call.

    Raises:
        PlanError: it is no DeviceMesh, or shares ranks with the partition.
    """
    if mesh is None:
        return DataAxes()
    if not isinstance(mesh, DeviceMesh):
        raise PlanError(f'data_mesh is a {type(mesh).__name__}; expected the data axes of a DeviceMesh, mesh["data"]')
    ranks = set(dist.get_process_group_ranks(groups.main))
    found = tuple(mesh.get_all_groups())
    for group in found:
        if ranks & set(dist.get_process_group_ranks(group)) != {dist.get_rank()}:
            raise PlanError(
                f"data_mesh {mesh} shares ranks {sorted(ranks)} with the mesh of the partition: slice one mesh, "
                'mesh["data"] and mesh["hexa"]'
            )
    hosts = tuple(_host(dist.get_process_group_ranks(group)) for group in found)
    everyone = sorted(ranks)
    for host in hosts:
        parts: list[Any] = [None] * dist.get_world_size(host)
        dist.all_gather_object(parts, everyone, group=host)
        everyone = sorted({rank for part in parts for rank in part})
    return DataAxes(found, hosts, _host(everyone))


def _host(ranks: Sequence[int]) -> Any:
    return new_group_of(ranks, backend="gloo")


def summed_elsewhere(tensor: Tensor, group: Any) -> bool:
    """Whether a gradient is a DTensor over a mesh that has the ranks of a group, so that FSDP2 has combined it over them."""
    if not isinstance(tensor, DTensor):
        return False
    return set(dist.get_process_group_ranks(group)) <= ranks_of(tensor.device_mesh)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, in the same memory."""
    held: Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return held
