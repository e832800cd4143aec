"""Refuses DDP and FSDP2 where they would mix the ranks' slices of the experts, or average gradients that the plan sums.

Nothing would be noticed otherwise: slices of equal shares have equal shapes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hexa_fx.distributed.groups import Groups
from hexa_fx.distributed.shards import ShardedParameter
from hexa_fx.errors import PlanError


class Wrappers:
    """What is known of the wrappers around a partitioned model.

    Args:
        groups: of the partition.
        summed: whether the plan expects that nobody averages gradients over its ranks.
    """

    def __init__(self, groups: Groups, summed: bool) -> None:
        self._ranks, self._summed = set(dist.get_process_group_ranks(groups.main)), summed
        self._known: WeakSet[nn.Module] = WeakSet()
        self._fine: set[str] = set()

    def check(self, model: nn.Module, shards: Iterable[tuple[ShardedParameter, ...]]) -> None:
        """Called when a forward of the model begins, with what was cut, by layer.

        Raises:
            PlanError: DDP or FSDP2 works on experts over ranks of the partition, or DDP averages what the plan sums.
        """
        layers = [layer for layer in shards if layer]
        for shard in (layer[0] for layer in layers):
            held = shard.parameter
            if held is not shard.original and not isinstance(shard.original, DTensor) and shard.name not in self._fine:
                self._check_sharded(shard.name, _mesh_of(model, held))
                self._fine.add(shard.name)
        active = DistributedDataParallel._get_active_ddp_module()
        if active is not None and active not in self._known:
            self._check_averaged(active, (shard for layer in layers for shard in layer))
            self._known.add(active)

    def _check_sharded(self, name: str, mesh: DeviceMesh | None) -> None:
        if mesh is not None and self._shares(mesh.mesh.flatten().tolist()):
            raise PlanError(
                f"fully_shard cut {name!r} over ranks of the partition, each of which has a slice of its own, so the rest of it is "
                "lost: build the model anew and call fully_shard with "
                "ignored_params=hexa_fx.distributed.gradients.expert_parameters(session), or over the other axes of a mesh"
            )

    def _check_averaged(self, active: DistributedDataParallel, shards: Iterable[ShardedParameter]) -> None:
        if not self._shares(dist.get_process_group_ranks(active.process_group)):
            return
        wrapped = set(map(id, active._module_parameters))
        name = next((shard.name for shard in shards if id(shard.parameter) in wrapped), None)
        if name is not None:
            raise PlanError(
                f"DistributedDataParallel gave every rank the slice of {name!r} that its first rank has, so the others are lost: "
                "build the model anew and call hexa_fx.distributed.gradients.ignore_in_ddp(model, session) before wrapping it"
            )
        if self._summed:
            raise PlanError(
                "DistributedDataParallel averages gradients over ranks for which the plan sums them: optimize_ with "
                "partition=PartitionConfig(data_parallel='mean')"
            )

    def _shares(self, ranks: Iterable[int]) -> bool:
        return self._ranks & set(ranks) != {dist.get_rank()}


def _mesh_of(model: nn.Module, held: Tensor) -> DeviceMesh | None:
    """The mesh over which FSDP2 keeps a parameter; None if it does not."""
    if isinstance(held, DTensor):
        return held.device_mesh
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = (
                module._get_fsdp_state()
            )  # nothing public tells it of a parameter that is gathered at the moment
            several = hasattr(state, "_fsdp_param_groups")  # from torch 2.13 on
            for group in state._fsdp_param_groups if several else [state._fsdp_param_group]:
                if group and any(getattr(param, "_unsharded_param", None) is held for param in group.fsdp_params):
                    mesh: DeviceMesh = group.mesh_info.mesh
                    return mesh
    return None
