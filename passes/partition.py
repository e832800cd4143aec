"""Plans how a model's MoE layers are spread over ranks, and applies a plan.

`partition_model` decides (capacities, shares, mode of every layer) and returns a `Plan` that is equal on all ranks.
`install_plan` (partition_install.py) cuts the parameters, rewrites the blocks' graphs and returns the session that runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist
import torch.fx as fx
from torch import Tensor, nn

from hexa_fx.allocation import KERNEL_COLUMNS, DeviceCosts
from hexa_fx.distributed.collective_errors import join
from hexa_fx.distributed.fully_sharded import shard_blocks
from hexa_fx.distributed.geometry import Geometry
from hexa_fx.distributed.groups import Groups, is_axis, make_groups
from hexa_fx.distributed.mode_times import BlockTimes, measure_blocks, measure_modes
from hexa_fx.distributed.profile import measure_bandwidth, profile_costs
from hexa_fx.distributed.session import PartitionSession
from hexa_fx.distributed.shards import LayerWeights, find_tensor
from hexa_fx.errors import PlanError
from hexa_fx.ir import RewrittenBlock
from hexa_fx.passes.cost_model import Measured
from hexa_fx.passes.overlap import Seconds
from hexa_fx.passes.partition_install import Finish, Installed, install_plan
from hexa_fx.passes.partition_layers import Modes, any_mode, observed_tokens, read_layers
from hexa_fx.passes.plan_layers import PartitionConfig, Strategy, plan_layers, wanted_modes
from hexa_fx.plan import Plan
from hexa_fx.runtime.install import install

__all__ = ["Installed", "apply_partition", "apply_to_graph_module", "install_plan", "partition_model"]


def partition_model(
    model: nn.Module,
    blocks: Sequence[RewrittenBlock | Modes],
    mesh: Any = None,
    strategy: Strategy = "auto",
    capacities: Literal["measure"] | Sequence[float] | None = "measure",
    config: PartitionConfig | None = None,
    example: Callable[[], object] | None = None,
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

    Raises:
        PlanError: no process group, no canonical node, or an impossible split.
    """
    config = config or PartitionConfig()
    by_block = [read_layers(model, any_mode(block)) for block in blocks]
    layers = [layer for found in by_block for layer in found]
    if not layers:
        raise PlanError("nothing to partition: no block holds the canonical operator")
    groups = make_groups(mesh)
    join(groups, "to plan the partition")
    sample = _first_tensor(model, layers[0])
    config = _with_tokens(_for_device(config, sample), _recorded_tokens(blocks))
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
    return Plan.from_json(box[0])


def _never_fsdp(model: nn.Module, by_block: Sequence[Sequence[LayerWeights]], mesh: Any) -> list[str]:
    """Layers that ``auto`` never gives to FSDP2: on one axis of a mesh, where it has the others; several of a block or graph."""
    never = is_axis(mesh) or isinstance(model, fx.GraphModule)
    return [layer.path for found in by_block if never or len(found) > 1 for layer in found]


def _with_tokens(config: PartitionConfig, tokens: int | None) -> PartitionConfig:
    return config if config.tokens is not None else replace(config, tokens=tokens or None)


def _recorded_tokens(blocks: Sequence[RewrittenBlock | Modes]) -> int | None:
    return next((n for n in map(observed_tokens, map(any_mode, blocks)) if n), None)


def _measure(
    layers: Sequence[LayerWeights], config: PartitionConfig, seen: BlockTimes | None, sample: Tensor, groups: Groups
) -> dict[str, Measured]:
    """What `layer_cost` needs of every layer; layers of one layout are measured once."""
    tokens = config.tokens if config.tokens is not None else (config.batch or groups.world)
    bandwidth, latency = measure_bandwidth(groups, sample.device)
    attention = config.attention_seconds
    if attention is None:
        attention = seen.between * tokens / groups.world / seen.tokens if seen and seen.tokens else 0.0
    known: dict[Geometry, Measured] = {}
    for layer in layers:
        if layer.geometry not in known:
            where: dict[str, Any] = {"dtype": sample.dtype, "device": sample.device, "groups": groups}
            modes = measure_modes(layer.geometry, tokens, **where, reduce=config.reduce)
            times = (
                modes.forward,
                modes.model_centric,
                modes.data_centric,
                modes.contention,
                modes.exchange,
                modes.fsdp,
            )
            known[layer.geometry] = Measured(bandwidth, latency, attention, *times)
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
    if isinstance(capacities, str):
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


def _first_tensor(model: nn.Module, layer: LayerWeights) -> Tensor:
    name = layer.sources["w1"].parts[0][0]
    return find_tensor(model, f"{layer.root}.{name}" if layer.root else name)


def apply_partition(
    model: nn.Module,
    blocks: Sequence[Modes],
    mesh: Any = None,
    strategy: Strategy = "auto",
    capacities: Literal["measure"] | Sequence[float] | None = "measure",
    config: PartitionConfig | None = None,
    plan: Plan | None = None,
    timeout: timedelta | None = None,
    finish: Finish | None = None,
    example: Callable[[], object] | None = None,
    data_mesh: Any = None,
) -> PartitionSession:
    """Plans (unless ``plan`` is given), cuts, rewrites and patches the model's blocks. What `hexa_fx.optimize` calls.

    Args:
        blocks: the rewritten forms of every block, by mode (``train``, ``eval``), not yet installed.

    Returns:
        The session, which the model must keep; see `partition_model` and `install_plan` for the rest.
    """
    plan = plan or partition_model(model, blocks, mesh, strategy, capacities, config, example)
    installed = install_plan(model, blocks, plan, mesh, timeout, finish, data_mesh=data_mesh)
    for forms in installed.blocks:
        path = any_mode(forms).path
        module = model.get_submodule(path)
        install(module, forms.get("train"), forms.get("eval"))
        if path not in installed.fsdp:
            installed.session.bind(module, path)
    shard_blocks(model, installed.session, installed.fsdp, mesh)
    installed.session.follow(model)
    return installed.session


def apply_to_graph_module(
    module: fx.GraphModule,
    mesh: Any = None,
    strategy: Strategy = "auto",
    capacities: Literal["measure"] | Sequence[float] | None = "measure",
    config: PartitionConfig | None = None,
    plan: Plan | None = None,
    timeout: timedelta | None = None,
    seconds: Seconds | None = None,
) -> Installed:
    """As `apply_partition`, for an optimized model as one graph: ``torch.export.export(model, ...).module()``, or make_fx.

    Collectives are scheduled over the whole graph: a gather starts as soon as its slot is free, before the attention and
    router of its layer, whatever module they belong to. Layers are named after the module that owns their weights. Each rank
    exports its own batch size; the order of the nodes is the same.

    Args:
        seconds: estimated time of a node, equal on all ranks, which says what may wait; see `hexa_fx.passes.overlap.overlap`.
    """
    block = RewrittenBlock("", module.graph)
    plan = plan or partition_model(module, [block], mesh, strategy, capacities, config)
    if any(layer.mode == "fsdp" for layer in plan.layers):
        raise PlanError("a model as one graph is cut or left alone: 'fsdp' is for modules, which FSDP2 hooks")
    installed = install_plan(module, [block], plan, mesh, timeout, seconds=seconds)
    module.graph = any_mode(installed.blocks[0]).graph
    installed.session.bind(module)
    return installed
