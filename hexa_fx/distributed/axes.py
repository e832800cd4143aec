"""The data-parallel dimensions of a mesh of which the partition is another: what is summed over them, and by whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hexa_fx.distributed.groups import Groups, new_group_of
from hexa_fx.errors import PlanError


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
        size = 1
        for group in self.groups:
            size *= dist.get_world_size(group)
        return size


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
    here = set(torch.as_tensor(tensor.device_mesh.mesh).flatten().tolist())
    return set(dist.get_process_group_ranks(group)) <= here


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, in the same memory."""
    held: Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return held
