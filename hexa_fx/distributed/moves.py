"""Moves what is cut from one plan to another while a job runs: parameters, and what optimizers keep of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hexa_fx.distributed import slice_states
from hexa_fx.distributed.collectives import all_reduce_
from hexa_fx.distributed.geometry import taken
from hexa_fx.distributed.groups import Groups, local_part
from hexa_fx.distributed.plan_agreement import check_same_request
from hexa_fx.distributed.shards import ShardedParameter, distributed, exchange
from hexa_fx.distributed.slice_states import check_element_wise
from hexa_fx.errors import PlanError


def check_movable(
    shards: Sequence[ShardedParameter], optimizers: Sequence[torch.optim.Optimizer], groups: Groups
) -> None:
    """Raises `PlanError` if a parameter is not this package's alone, or its state cannot be moved or is in another optimizer."""
    for shard in shards:
        if shard.parameter is not shard.original:
            raise PlanError(
                f"{shard.name!r} is held by FSDP2, whose shares are fixed: save a checkpoint and load it under the new plan"
            )
    given = {id(optimizer.state) for optimizer in optimizers}
    for optimizer in slice_states.optimizers_of(shards):
        if id(optimizer.state) not in given:
            raise PlanError(
                f"{type(optimizer).__name__} has state of the experts and was not given: replan moves the state of the optimizers "
                "that it gets. Of one that is no longer needed call state.clear()"
            )
    found: dict[str, list[list[str]]] = {}
    for shard in shards:
        kept = [optimizer.state.get(shard.parameter, {}) for optimizer in optimizers]
        for state in kept:
            check_element_wise(state, shard)
        found[f"the state of {shard.name!r} in optimizers"] = [_moved(state, shard) for state in kept]
    check_same_request(found, groups)


def unite(shards: Iterable[ShardedParameter], groups: Groups) -> None:
    """Makes parameters whole again, on every rank. A collective call."""
    for shard in shards:
        parameter = shard.parameter
        whole = put_together(local_part(parameter).detach(), shard, groups)
        if isinstance(parameter, DTensor):
            shard.owner.register_parameter(shard.key, nn.Parameter(whole, requires_grad=parameter.requires_grad))
        else:
            exchange(parameter, whole)


def put_together(held: Tensor, shard: ShardedParameter, groups: Groups) -> Tensor:
    """A tensor of which every rank holds the chunks of ``shard``, whole. A collective call."""
    out = held.new_zeros(shard.whole)
    for chunk in shard.chunks:
        out.narrow(chunk.dim, chunk.start, chunk.length).copy_(held.narrow(chunk.dim, chunk.local, chunk.length))
    return all_reduce_(out, groups.main_name)


def move_state(
    optimizer: torch.optim.Optimizer, old: Iterable[ShardedParameter], new: Iterable[ShardedParameter], groups: Groups
) -> None:
    """Brings an optimizer to the parameters of ``new``. A collective call: every rank's optimizer has the same kind of state.

    Tensors of the shape of a parameter's old slice are cut anew; others, such as a step's number, stay.
    """
    after = {shard.name: shard for shard in new}
    for shard in old:
        before, to = shard.original, after[shard.name]
        for group in optimizer.param_groups:
            group["params"] = [to.original if p is before else p for p in group["params"]]
        state: dict[str, Any] = optimizer.state.pop(before, {})
        for key in _moved(state, shard):
            whole = put_together(local_part(state[key]), shard, groups)
            local = taken(whole, to.chunks)
            mesh = getattr(to.original, "device_mesh", None)
            state[key] = local if mesh is None else distributed(local, to.whole, to.chunks, mesh)
        if state:
            optimizer.state[to.original] = state


def _moved(state: Mapping[str, Any], shard: ShardedParameter) -> list[str]:
    """What an optimizer keeps of every element of a slice."""
    shape = shard.held_shape
    return [key for key, value in state.items() if isinstance(value, Tensor) and list(local_part(value).shape) == shape]
