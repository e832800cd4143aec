"""Decides how a model's MoE layers are spread over ranks: what is measured, and the `Plan` that is equal on all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any, Literal

import torch.distributed as dist
import torch.fx as fx
from torch import Tensor, nn

from hexa_fx.allocation import KERNEL_COLUMNS, DeviceCosts, Measured
from hexa_fx.distributed.geometry import Geometry
from hexa_fx.distributed.groups import Groups, is_axis, make_groups
from hexa_fx.distributed.lockstep import join
from hexa_fx.distributed.plan_agreement import check_same_request
from hexa_fx.distributed.profile import BlockTimes, measure_bandwidth, measure_blocks, measure_modes, profile_costs
from hexa_fx.distributed.shards import LayerWeights, find_tensor
from hexa_fx.errors import PlanError
from hexa_fx.ir import RewrittenBlock
from hexa_fx.passes.partition.layers import Modes, any_mode, observed_tokens, read_layers
from hexa_fx.passes.partition.plan_layers import PartitionConfig, Strategy, plan_layers, wanted_modes
from hexa_fx.plan import Plan

log = logging.getLogger(__name__)


def partition_model(
    model: nn.Module,
    blocks: Sequence[RewrittenBlock | Modes],
    mesh: Any = None,
    strategy: Strategy = "auto",
    capacities: Literal["measure"] | Sequence[float] | None = "measure",
    config: PartitionConfig | None = None,
    example: Callable[[], object] | None = None,
    by_block: Sequence[Sequence[LayerWeights]] | None = None,
) -> Plan:
    """The plan for a model's rewritten blocks. A collective call: made on rank 0 and broadcast, so equal on all ranks.

    Args:
        model: the user's model, with whole expert weights on every rank.
        blocks: its rewritten blocks in execution order, each alone or by mode; their graphs hold the canonical nodes.
        mesh: a 1-d DeviceMesh, a process group, or None for all ranks.
        strategy: ``auto``, ``data``, ``model``, ``fsdp``, or one of them by path of the block or of a module around it.
        capacities: ``measure`` (`profile_costs` on the first layer), t_i by rank, or None for equal devices.
        config: everything else.
        example: runs the model's forward once on the global batch, for the times and token counts of ``auto``.
        by_block: the layers of every block, of a model whose weights may be cut already; None to read them.

    Raises:
        PlanError: no process group, no canonical node, or an impossible split.
    """
    by_block = [read_layers(model, any_mode(block)) for block in blocks] if by_block is None else by_block
    config = config or PartitionConfig()
    layers = [layer for found in by_block for layer in found]
    groups = make_groups(mesh)
    join(groups, "to plan the partition")
    asked = {field.name: getattr(config, field.name) for field in fields(config)}
    asked |= {"strategy": strategy, "capacities": _spelled(capacities)}
    asked["the list of expert layers"] = [(layer.path, layer.geometry) for layer in layers]
    check_same_request(asked, groups)
    if not layers:
        raise PlanError(
            "nothing to partition: no rewritten block multiplies its experts' own weights in one operator (adapters on single "
            "experts keep their products apart, for example); wrap the model in FSDP2 after optimize_ without mesh="
        )
    sample = find_tensor(model, layers[0].names(layers[0].sources["w1"])[0])
    recorded = next((tokens for tokens in map(observed_tokens, map(any_mode, blocks)) if tokens), None)
    config = _with_tokens(_for_device(config, sample), recorded)
    costs = _capacities(capacities, layers[0].geometry, config.tokens, sample, groups)
    shapes = {layer.path: layer.geometry.shape for layer in layers}
    measured: dict[str, Measured] = {}
    if "auto" in wanted_modes(strategy, shapes).values() and config.measure and groups.world > 1:
        modules = [model.get_submodule(any_mode(block).path) for block in blocks]
        seen = None if example is None else measure_blocks(example, modules, sample.device, groups)
        config = _with_tokens(config, seen.tokens if seen else config.batch)
        measured = _measure(layers, config, seen, sample, groups)
        measured |= {path: measured[path].without_fsdp() for path in _never_fsdp(model, by_block, mesh)}
    plan = plan_layers(shapes, costs, strategy, _scaled_caps(config, layers), measured)
    box = [plan.to_json()]
    dist.broadcast_object_list(box, src=dist.get_global_rank(groups.host, 0), group=groups.host)
    made = Plan.from_json(box[0])
    _warn_of_idle_ranks(made)
    return made


def _warn_of_idle_ranks(plan: Plan) -> None:
    if idle := [rank for rank, samples in enumerate(plan.batch) if not samples]:
        log.warning(
            "of the %d samples of the global batch ranks %s get none, and have to call the model with an empty batch: plan with a "
            "larger one (PartitionConfig(batch=...)), or leave these devices out",
            *(sum(plan.batch), idle),
        )


def _spelled(capacities: object) -> object:
    if isinstance(capacities, str) or not isinstance(capacities, Iterable):
        return capacities
    try:
        return [float(seconds) for seconds in capacities]
    except (TypeError, ValueError):
        raise PlanError(f"capacities is 'measure', a sequence of seconds or None, got {capacities!r}") from None


def _never_fsdp(model: nn.Module, by_block: Sequence[Sequence[LayerWeights]], mesh: Any) -> list[str]:
    """Layers that ``auto`` never gives to FSDP2: on one axis of a mesh, where it has the others; several of a block or graph."""
    never = is_axis(mesh) or isinstance(model, fx.GraphModule)
    return [layer.path for found in by_block if never or len(found) > 1 for layer in found]


def _with_tokens(config: PartitionConfig, tokens: int | None) -> PartitionConfig:
    return config if config.tokens is not None else replace(config, tokens=tokens or None)


def _measure(
    layers: Sequence[LayerWeights], config: PartitionConfig, seen: BlockTimes | None, sample: Tensor, groups: Groups
) -> dict[str, Measured]:
    """What `layer_cost` needs of every layer; layers of one layout are measured once."""
    tokens = config.tokens if config.tokens is not None else (config.batch or groups.world)
    elements = max(layer.geometry.shape.weight_numel for layer in layers)
    bandwidth, latency = measure_bandwidth(groups, sample.device, elements * sample.element_size() // groups.world)
    attention = config.attention_seconds
    if attention is None:
        attention = seen.between * tokens / groups.world / seen.tokens if seen and seen.tokens else 0.0
    known: dict[Geometry, Measured] = {}
    for layer in layers:
        if layer.geometry not in known:
            where: dict[str, Any] = {"dtype": sample.dtype, "device": sample.device, "groups": groups}
            modes = measure_modes(layer.geometry, tokens, **where, reduce=config.reduce)
            known[layer.geometry] = replace(modes, bandwidth=bandwidth, latency=latency, attention=attention)
    return {layer.path: known[layer.geometry] for layer in layers}


def _capacities(
    capacities: Literal["measure"] | Sequence[float] | None,
    geometry: Geometry,
    tokens: int | None,
    sample: Tensor,
    groups: Groups,
) -> DeviceCosts:
    if capacities is None:
        return DeviceCosts.proportional((1.0,) * groups.world)
    if isinstance(capacities, str) or not isinstance(capacities, Iterable):
        if capacities != "measure":
            raise PlanError(f"capacities is 'measure', a sequence of seconds or None, got {capacities!r}")
        dtype, device = sample.dtype, sample.device
        return profile_costs(
            geometry.shape, gated=geometry.gated, tokens=tokens, dtype=dtype, device=device, groups=groups
        )
    if len(capacities) != groups.world:
        raise PlanError(f"{len(capacities)} capacities for {groups.world} ranks")
    return DeviceCosts.proportional(capacities)


def _for_device(config: PartitionConfig, sample: Tensor) -> PartitionConfig:
    size, columns = sample.element_size(), KERNEL_COLUMNS if sample.is_cuda else 1
    return replace(
        config,
        dtype_bytes=config.dtype_bytes or size,
        reduce_bytes=config.reduce_bytes or size,
        kernel_columns=config.kernel_columns or columns,
    )


def _scaled_caps(config: PartitionConfig, layers: Sequence[LayerWeights]) -> PartitionConfig:
    """memory_caps of all layers -> of one layer, in proportion; layers of one model are mostly of one size."""
    if config.memory_caps is None:
        return config
    return replace(config, memory_caps=tuple(cap // len(layers) for cap in config.memory_caps))
