"""What all ranks have to hold alike before a model is cut: what was asked for, the weights, the plan."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hexa_fx.distributed.groups import Groups
from hexa_fx.distributed.lockstep import join
from hexa_fx.errors import PlanError
from hexa_fx.plan import Plan


def check_same_request(request: Mapping[str, object], groups: Groups) -> None:
    """Raises `PlanError` on every rank if one asks for something else. By name, as text."""
    texts = {name: str(value) for name, value in request.items()}
    for rank, other in enumerate(_of_all(texts, groups.host)):
        for name in texts:
            if other[name] != texts[name]:
                raise PlanError(
                    f"all ranks partition the same model in the same way, but on rank {groups.rank} {name} is {texts[name][:200]} "
                    f"and on rank {rank} {other[name][:200]}: give the same on every rank (broadcast what was measured)"
                )


def check_same_weights(model: nn.Module, group: Any) -> None:
    """Raises `PlanError` on every rank if a parameter does not have the same bits on all ranks of a Gloo group."""
    sums = {name: _sum_of_bits(parameter) for name, parameter in model.named_parameters()}
    every = _of_all(sums, group)
    ranks = dist.get_process_group_ranks(group)
    for rank, other in zip(ranks, every):
        different = [name for name in every[0] if other.get(name) != every[0][name]] or [
            *other.keys() - every[0].keys()
        ]
        if different:
            raise PlanError(
                f"{different[0]!r} and {len(different) - 1} more parameters of rank {rank} are not those of rank {ranks[0]}, "
                "and each rank would keep a slice of its own: seed all ranks alike, load the same checkpoint, or "
                "torch.distributed.broadcast every parameter before optimize_"
            )


def _of_all(value: Any, group: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _sum_of_bits(parameter: Tensor) -> int:
    """Whole numbers, because sums of floating-point ones depend on the device that adds them."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    kind = bits.get(parameter.element_size(), torch.uint8)
    return int(parameter.detach().view(kind).sum(dtype=torch.int64))


def check_same_plan(plan: Plan, groups: Groups) -> None:
    """Raises on every rank, before any step: `RankError` when a rank is missing, `PlanError` when one holds another plan."""
    join(groups, "before the plans were compared")  # first: a rank that ends breaks off what others are connecting
    texts = _of_all(plan.to_json(), groups.host)
    if len(set(texts)) == 1 and plan.world == groups.world:
        return
    if len(set(texts)) == 1:
        raise PlanError(f"the plan is for {plan.world} ranks, the mesh has {groups.world}: plan again or load by file")
    prints = {rank: Plan.from_json(text).fingerprint for rank, text in enumerate(texts)}
    other = next(rank for rank, text in enumerate(texts) if text != texts[0])
    one, two = json.loads(texts[0]), json.loads(texts[other])
    said = [f"{key}: {one[key]!r} and {two.get(key)!r}"[:400] for key in one if one[key] != two.get(key)]
    raise PlanError(
        f"ranks hold different plans, fingerprints {prints}; rank 0 and rank {other} differ in {'; '.join(said[:3])}. Plan on one "
        "rank and broadcast it (partition_model does)"
    )
