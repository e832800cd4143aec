"""Refuses DDP, FSDP and FSDP2 where they would mix the ranks' slices of the experts, or average gradients that the plan sums.

Nothing would be noticed otherwise: slices of equal shares have equal shapes. Tensor parallelism over the same ranks is said.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hexa_fx.distributed.groups import Groups, ranks_of
from hexa_fx.distributed.shards import ShardedParameter, other_parameters
from hexa_fx.errors import PlanError
from hexa_fx.plan import Plan
from hexa_fx.steps.fully_sharded import sharded_groups

log = logging.getLogger(__name__)


class Wrappers:
    """What is known of the wrappers around a partitioned model.

    Args:
        groups: of the partition.
        summed: ranks over which the plan expects that nobody averages gradients; those of the partition and of the data-parallel
            axes that the session knows, or none.
    """

    def __init__(self, groups: Groups, summed: Iterable[int]) -> None:
        self._ranks, self._summed = set(dist.get_process_group_ranks(groups.main)), set(summed)
        self._idle: dict[str, tuple[int, ...]] = {}
        self._model: Callable[[], nn.Module | None] = lambda: None
        self._kind: type | None = None
        self._shards: tuple[ShardedParameter, ...] = ()
        self._firsts: list[tuple[ShardedParameter, str, tuple[int, ...]]] = []
        self._others: list[tuple[nn.Module, str]] = []
        self._fine: set[str] = set()
        self._known: WeakSet[nn.Module] = WeakSet()

    def watch(
        self, model: Callable[[], nn.Module | None], layers: Mapping[str, tuple[ShardedParameter, ...]], plan: Plan
    ) -> None:
        """Notes what was cut of a model, by layer."""
        cut = [layer for layer in layers.values() if layer]
        self._idle = {shards[0].name: plan.layer(path).idle for path, shards in layers.items() if shards}
        self._model, self._shards = model, tuple(shard for layer in cut for shard in layer)
        self._firsts = [(layer[0], layer[0].key, tuple(layer[0].original.shape)) for layer in cut]
        self._fine = {shard.name for shard, *_ in self._firsts if isinstance(shard.original, DTensor)}
        # Nothing tells over which ranks FSDP averages; over those that the plan sums over it does where there are no others.
        if len(self._summed) == dist.get_world_size() > 1:
            others = other_parameters(held, self._shards) if (held := model()) is not None else ()
            self._others = [(owner, key) for _, owner, key in islice(others, 1)]

    def check(self) -> None:
        """Called when a forward of the model begins.

        Raises:
            PlanError: DDP, FSDP or FSDP2 works on experts over ranks of the partition, or averages what the plan sums; or whole
                weights are in place of slices.
        """
        for shard, name, shape in self._firsts:
            held = shard.owner._parameters.get(name)
            if getattr(held, "_fsdp_flattened", name in shard.owner.__dict__):
                raise PlanError(
                    f"FullyShardedDataParallel has flattened {shard.name!r} with the rest of the model: use fully_shard (FSDP2), "
                    "or ignored_states=hexa_fx.distributed.gradients.expert_parameters(session)"
                )
            if held is not None and (
                held.shape != shape or isinstance(shard.original, DTensor) > isinstance(held, DTensor)
            ):
                raise PlanError(
                    f"{shard.name!r} is {tuple(held.shape)} here, a {type(held).__name__}; this rank's slice is {shape}, a "
                    f"{type(shard.original).__name__}: torch.func.functional_call and assignments take slices, of the names "
                    "and kinds that model.named_parameters() has; hexa_fx.distributed.checkpoint.load takes whole weights"
                )
            if held is not shard.original and shard.name not in self._fine:
                self._check_sharded(shard)
        for owner, name in self._others:
            if getattr(owner._parameters.get(name), "_fsdp_flattened", name in owner.__dict__):
                raise _averages("FullyShardedDataParallel")
        model = self._model()
        if model is not None and type(model) is not self._kind:  # fully_shard changes it
            if self._kind is None:
                self._say_tensor_parallel(model)
            self._kind = type(model)
            self._check_sums(model)
        active = DistributedDataParallel._get_active_ddp_module()
        if active is not None and active not in self._known:
            self._check_averaged(active)
            self._known.add(active)

    def _check_sharded(self, shard: ShardedParameter) -> None:
        mesh = _mesh_of(self._model(), shard.parameter)
        if mesh is not None and _share(self._ranks, ranks_of(mesh)):
            raise PlanError(
                f"fully_shard cut {shard.name!r} over ranks of the partition, each of which has a slice of its own, so the rest of "
                "it is lost: build the model anew and call fully_shard with "
                "ignored_params=hexa_fx.distributed.gradients.expert_parameters(session), or over the other axes of a mesh"
            )
        if idle := self._idle[shard.name]:
            raise PlanError(
                f"fully_shard holds {shard.name!r}, of which ranks {list(idle)} of the plan have no channels, and takes no empty "
                "gradients: plan with PartitionConfig(least_channels=1), or leave these ranks out"
            )
        self._fine.add(shard.name)

    def _check_averaged(self, active: DistributedDataParallel) -> None:
        ranks = dist.get_process_group_ranks(active.process_group)
        wrapped = set(map(id, active._module_parameters))
        name = next((shard.name for shard in self._shards if id(shard.parameter) in wrapped), None)
        if name is not None and _share(self._ranks, ranks):
            raise PlanError(
                f"DistributedDataParallel gave every rank the slice of {name!r} that its first rank has, so the others are lost: "
                "build the model anew and call hexa_fx.distributed.gradients.ignore_in_ddp(model, session) before wrapping it"
            )
        if _share(self._summed, ranks):
            raise _averages("DistributedDataParallel")

    def _check_sums(self, model: nn.Module) -> None:
        for group in sharded_groups(model) if self._summed else ():
            if group.gradient_divide_factor is None and _share(self._summed, ranks_of(group.mesh_info.mesh)):
                raise _averages("fully_shard")

    def _say_tensor_parallel(self, model: nn.Module) -> None:
        """Says once if something else than FSDP2 keeps DTensors on ranks of the partition."""
        of_fsdp = {id(param.sharded_param) for group in sharded_groups(model) for param in group.fsdp_params}
        held: Iterator[tuple[str, Any]] = (
            (name, owner._parameters[key]) for name, owner, key in other_parameters(model, self._shards)
        )
        spread = ((name, p.device_mesh) for name, p in held if isinstance(p, DTensor) and id(p) not in of_fsdp)
        name = next((name for name, mesh in spread if _share(self._ranks, ranks_of(mesh))), None)
        if name is None:
            return
        world = len(self._ranks)
        tokens, wrong = (
            ("different tokens (sequence parallel)", f"1/{world}") if self._summed else ("the same tokens", str(world))
        )
        log.warning(
            "%r is a DTensor on ranks of the partition (tensor parallel): its gradient is right only if these ranks have %s, else "
            "it is %s times as large. Give tensor parallelism an axis of its own, beside the partition's",
            *(name, tokens, wrong),
        )


def _share(ranks: set[int], others: Iterable[int]) -> bool:
    """Whether there is a rank in both but this one."""
    return bool(ranks & set(others) - {dist.get_rank()})


def _averages(who: str) -> PlanError:
    return PlanError(
        f"{who} averages gradients over ranks for which the plan sums them: optimize_ with "
        "partition=PartitionConfig(data_parallel='mean')"
    )


def _mesh_of(model: nn.Module | None, held: Tensor) -> DeviceMesh | None:
    """The mesh over which FSDP2 keeps a parameter; None if it does not."""
    if isinstance(held, DTensor):
        return held.device_mesh
    for group in sharded_groups(model) if model is not None else ():
        if any(getattr(param, "_unsharded_param", None) is held for param in group.fsdp_params):
            mesh: DeviceMesh = group.mesh_info.mesh
            return mesh
    return None
