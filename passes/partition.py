"""Plans how a model's MoE layers are spread over ranks, and installs a plan.

`partition_model` decides (capacities, shares, mode of every layer) and returns a `Plan` that is equal on all ranks.
`install_plan` cuts the parameters, rewrites the blocks' graphs and returns the session that runs them.
`plan_layers` is the pure part: numbers in, `Plan` out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist
import torch.fx as fx
from torch import Tensor, nn

from hexa_fx.allocation import allocate, even
from hexa_fx.errors import PlanError
from hexa_fx.ir import RewrittenBlock
from hexa_fx.observers import at_block, notify
from hexa_fx.passes.collectives import Placement, partition_graph
from hexa_fx.passes.cost_model import Measured, layer_cost
from hexa_fx.passes.overlap import overlap
from hexa_fx.passes.partition_layers import read_layers
from hexa_fx.plan import ExpertShape, LayerCost, LayerPlan, Mode, Plan, Reduce
from hexa_fx.runtime.distributed.geometry import Geometry
from hexa_fx.runtime.distributed.groups import Groups, join, make_groups
from hexa_fx.runtime.distributed.profile import measure_bandwidth, measure_modes, profile_devices
from hexa_fx.runtime.distributed.session import PartitionSession
from hexa_fx.runtime.distributed.shards import LayerWeights, ShardedParameter, cut_layer, find_tensor
from hexa_fx.runtime.install import install

Modes = Mapping[Any, RewrittenBlock]
"""One block's rewritten forms by mode (train, eval). They read the same weights."""

Strategy = Literal["auto", "data", "model"] | Mapping[str, Literal["auto", "data", "model"]]

_MODES: dict[str, Mode] = {"data": "data_centric", "model": "model_centric"}


@dataclass(frozen=True)
class PartitionConfig:
    """What a user may say about a partition.

    Args:
        batch: samples of the global batch, split by Eq. 1. Default: the number of ranks.
        tokens: tokens of the global batch in one forward, for the cost model. Default: taken as ``batch``.
        static_tokens: fix T_i in the graph (``tokens`` split as ``batch`` is). Token counts are then not exchanged at
            run time.
        reduce: how model-centric outputs are summed; ``all_reduce`` is the paper's formulation.
        slots: slots of the shared cache, 1 or 2.
        prefetch: gather the next layer's weights ahead of their use.
        tile: h_i are multiples of it, where the intermediate size allows.
        memory_caps: most bytes of expert state each rank may hold, or None. Relative to ``bytes_per_element``.
        bytes_per_element: of an expert parameter with its gradient and optimizer state.
        data_parallel: what averages the gradients of the other parameters: ``sum`` (nobody divides), ``mean`` (DDP,
            FSDP2).
        dtype_bytes, reduce_bytes: of what is gathered, and of reduced weight gradients.
        attention_seconds, expert_seconds: measured forward times of a layer, for ``auto``; without them bytes decide.
        measure: measure the bandwidth for ``auto``.
    """

    batch: int | None = None
    tokens: int | None = None
    static_tokens: bool = False
    reduce: Reduce = "reduce_scatter"
    slots: int = 2
    prefetch: bool = True
    tile: int = 64
    memory_caps: tuple[int, ...] | None = None
    bytes_per_element: int = 16
    data_parallel: Literal["sum", "mean"] = "sum"
    dtype_bytes: int | None = None
    reduce_bytes: int | None = None
    attention_seconds: float = 0.0
    expert_seconds: float = 0.0
    measure: bool = True


# --- pure planning ---------------------------------------------------------------------------------------------------


def plan_layers(
    shapes: Mapping[str, ExpertShape],
    capacities: Sequence[float],
    strategy: Strategy = "auto",
    config: PartitionConfig | None = None,
    measured: Measured | None = None,
) -> Plan:
    """Shares and modes from numbers alone.

    Args:
        shapes: sizes of every MoE layer by path, in execution order.
        capacities: t_i, seconds of the same task on rank i.
        strategy: one for all layers, or by path (``auto`` where a path is missing).
        measured: bandwidth and times; without it ``auto`` compares bytes.

    Raises:
        PlanError: no split fits the caps, or the strategy names an unknown layer or mode.
    """
    config = config or PartitionConfig()
    world = len(capacities)
    batch = allocate(capacities, config.batch if config.batch is not None else world)
    tokens = _static_tokens(config, batch) if config.static_tokens else None
    wanted = _wanted(strategy, shapes)
    layers = tuple(
        _plan_layer(path, shape, wanted[path], capacities, config, measured) for path, shape in shapes.items()
    )
    return Plan(
        world=world,
        layers=layers,
        batch=batch,
        tokens=tokens,
        slots=config.slots,
        prefetch=config.prefetch,
        grad_scale=1.0 / world if config.data_parallel == "mean" else 1.0,
        capacities=tuple(float(t) for t in capacities),
    )


def _wanted(strategy: Strategy, shapes: Mapping[str, ExpertShape]) -> dict[str, str]:
    given = dict.fromkeys(shapes, strategy) if isinstance(strategy, str) else dict(strategy)
    unknown = set(given) - set(shapes)
    if unknown:
        raise PlanError(f"strategy names layers {sorted(unknown)}; the model's MoE layers are {list(shapes)}")
    for path, kind in given.items():
        if kind not in ("auto", "data", "model"):
            raise PlanError(f"strategy {kind!r} of {path!r} is none of 'auto', 'data', 'model'")
    return {path: str(given.get(path, "auto")) for path in shapes}


def _plan_layer(
    path: str,
    shape: ExpertShape,
    kind: str,
    capacities: Sequence[float],
    config: PartitionConfig,
    measured: Measured | None,
) -> LayerPlan:
    mode, cost = _choose(shape, kind, len(capacities), config, measured)
    caps = _channel_caps(shape, config, len(capacities))
    tile = min(config.tile, max(1, shape.intermediate_size // len(capacities)))
    if mode == "model_centric":
        shards = allocate(capacities, shape.intermediate_size, tile=tile, caps=caps)
    else:  # every rank computes with all weights, so what it stores need not follow its speed
        shards = even(shape.intermediate_size, len(capacities), caps=caps)
    owner = max(range(len(shards)), key=lambda rank: (shards[rank], -rank))
    return LayerPlan(path, mode, shape, shards, config.reduce, owner, cost)


def _choose(
    shape: ExpertShape, kind: str, world: int, config: PartitionConfig, measured: Measured | None
) -> tuple[Mode, LayerCost | None]:
    if kind != "auto":
        return _MODES[kind], None
    tokens = config.tokens if config.tokens is not None else (config.batch or world)
    dtype_bytes = config.dtype_bytes or 2
    return layer_cost(
        shape,
        tokens,
        world,
        dtype_bytes=dtype_bytes,
        reduce_bytes=config.reduce_bytes or dtype_bytes,
        slots=config.slots,
        reduce=config.reduce,
        measured=measured,
    )


def _channel_caps(shape: ExpertShape, config: PartitionConfig, world: int) -> list[int] | None:
    """Most channels of this layer that each rank may hold; layers share a rank's bytes in proportion to their size."""
    if config.memory_caps is None:
        return None
    if len(config.memory_caps) != world:
        raise PlanError(f"{len(config.memory_caps)} memory_caps for {world} ranks")
    channel = shape.weight_numel // shape.intermediate_size * config.bytes_per_element
    return [cap // channel for cap in config.memory_caps]


def _static_tokens(config: PartitionConfig, batch: tuple[int, ...]) -> tuple[int, ...]:
    total = sum(batch)
    if config.tokens is None or total == 0 or config.tokens % total:
        raise PlanError(
            f"static_tokens needs tokens as a multiple of the global batch, got tokens={config.tokens}, batch={total}"
        )
    return tuple(size * (config.tokens // total) for size in batch)


# --- on a model ------------------------------------------------------------------------------------------------------


def partition_model(
    model: nn.Module,
    blocks: Sequence[RewrittenBlock | Modes],
    mesh: Any = None,
    strategy: Strategy = "auto",
    capacities: Literal["measure"] | Sequence[float] | None = "measure",
    config: PartitionConfig | None = None,
) -> Plan:
    """The plan for a model's rewritten blocks. A collective call: made on rank 0 and broadcast, so equal on all ranks.

    Args:
        model: the user's model, with whole expert weights on every rank.
        blocks: its rewritten blocks in execution order, each alone or by mode; their graphs hold the canonical nodes.
        mesh: a 1-d DeviceMesh, a process group, or None for all ranks.
        strategy: ``auto``, ``data``, ``model``, or one of them by block path.
        capacities: ``measure`` (`profile_devices` on the first layer), t_i by rank, or None for equal devices.
        config: everything else.

    Raises:
        PlanError: no process group, no canonical node, or an impossible split.
    """
    config = config or PartitionConfig()
    layers = [layer for block in blocks for layer in read_layers(model, _any_mode(block))]
    if not layers:
        raise PlanError("nothing to partition: no block holds the canonical operator")
    groups = make_groups(mesh)
    join(groups, "to plan the partition")
    sample = _first_tensor(model, layers[0])
    times = _capacities(capacities, layers[0].geometry, sample, groups)
    config = _with_dtypes(config, sample)
    measured = None
    if strategy != "data" and strategy != "model" and config.measure and groups.world > 1:
        bandwidth, latency = measure_bandwidth(groups, sample.device)
        tokens = config.tokens if config.tokens is not None else (config.batch or groups.world)
        modes = measure_modes(layers[0].geometry.shape, tokens, dtype=sample.dtype, device=sample.device, groups=groups)
        measured = Measured(bandwidth, latency, config.attention_seconds, config.expert_seconds, *modes)
    shapes = {layer.path: layer.geometry.shape for layer in layers}
    plan = plan_layers(shapes, times, strategy, _scaled_caps(config, layers), measured)
    box = [plan.to_json()]
    dist.broadcast_object_list(box, src=dist.get_global_rank(groups.host, 0), group=groups.host)
    return Plan.from_json(box[0])


def _capacities(
    capacities: Literal["measure"] | Sequence[float] | None, geometry: Geometry, sample: Tensor, groups: Groups
) -> tuple[float, ...]:
    if capacities is None:
        return (1.0,) * groups.world
    if isinstance(capacities, str):
        if capacities != "measure":
            raise PlanError(f"capacities is 'measure', a sequence of seconds or None, got {capacities!r}")
        return profile_devices(
            geometry.shape, gated=geometry.gated, dtype=sample.dtype, device=sample.device, groups=groups
        )
    if len(capacities) != groups.world:
        raise PlanError(f"{len(capacities)} capacities for {groups.world} ranks")
    return tuple(float(t) for t in capacities)


def _with_dtypes(config: PartitionConfig, sample: Tensor) -> PartitionConfig:
    size = sample.element_size()
    return replace(config, dtype_bytes=config.dtype_bytes or size, reduce_bytes=config.reduce_bytes or size)


def _scaled_caps(config: PartitionConfig, layers: Sequence[LayerWeights]) -> PartitionConfig:
    """memory_caps of all layers -> of one layer, in proportion; layers of one model are mostly of one size."""
    if config.memory_caps is None:
        return config
    return replace(config, memory_caps=tuple(cap // len(layers) for cap in config.memory_caps))


def _first_tensor(model: nn.Module, layer: LayerWeights) -> Tensor:
    name = layer.sources["w1"].parts[0][0]
    return find_tensor(model, f"{layer.root}.{name}" if layer.root else name)


@dataclass(frozen=True)
class Installed:
    """What `install_plan` gives back.

    Args:
        session: run-time of the plan. Bind every patched block to it (`PartitionSession.bind`) and keep it with the
            model.
        blocks: the rewritten blocks with partitioned graphs, by mode, to be installed like any rewritten block.
        shards: every parameter that was cut.
    """

    session: PartitionSession
    blocks: tuple[dict[Any, RewrittenBlock], ...]
    shards: tuple[ShardedParameter, ...]


def install_plan(
    model: nn.Module,
    blocks: Sequence[RewrittenBlock | Modes],
    plan: Plan,
    mesh: Any = None,
    timeout: timedelta | None = None,
) -> Installed:
    """Cuts the model's expert parameters to this rank's slices and puts the plan's collectives into the blocks' graphs.

    A collective call. Changes the parameters in place; call it before building optimizers and before DDP or FSDP2.

    Args:
        timeout: after which a rank that does not join a collective is an error.

    Raises:
        PlanError: ranks hold different plans, or the plan is for another model.
        RankError: a rank did not arrive.
    """
    layers = [(block, layer) for block in blocks for layer in _same_in_all_modes(model, block)]
    if [layer.path for _, layer in layers] != [layer.path for layer in plan.layers]:
        raise PlanError(
            f"the plan is for layers {[layer.path for layer in plan.layers]}, "
            f"the model has {[layer.path for _, layer in layers]}"
        )
    for (_, layer), planned in zip(layers, plan.layers):
        if replace(layer.geometry.shape, top_k=planned.shape.top_k) != planned.shape:  # top_k only enters costs
            raise PlanError(f"the plan has {planned.shape} for {layer.path!r}, the model {layer.geometry.shape}")
    session = PartitionSession(plan, {layer.path: layer.geometry for _, layer in layers}, mesh, timeout)
    shards: list[ShardedParameter] = []
    for (_, layer), planned in zip(layers, plan.layers):
        lo = sum(planned.shards[: session.rank])
        shards += cut_layer(model, layer, lo, lo + planned.shards[session.rank])
    placement = Placement(session.rank, session.name, session.groups.main_name)
    done = []
    for block in blocks:
        planned_here = [plan.layer(layer.path) for owner, layer in layers if owner is block]
        done.append(
            {mode: _partition_block(form, planned_here, plan, placement) for mode, form in _modes(block).items()}
        )
    session.shards = tuple(shards)
    return Installed(session, tuple(done), session.shards)


def apply_partition(
    model: nn.Module,
    blocks: Sequence[Modes],
    mesh: Any = None,
    strategy: Strategy = "auto",
    capacities: Literal["measure"] | Sequence[float] | None = "measure",
    config: PartitionConfig | None = None,
    plan: Plan | None = None,
    timeout: timedelta | None = None,
) -> PartitionSession:
    """Plans (unless ``plan`` is given), cuts, rewrites and patches the model's blocks. What `hexa_fx.optimize` calls.

    Args:
        blocks: the rewritten forms of every block, by mode (``train``, ``eval``), not yet installed.

    Returns:
        The session, which the model must keep; see `partition_model` and `install_plan` for the rest.
    """
    plan = plan or partition_model(model, blocks, mesh, strategy, capacities, config)
    installed = install_plan(model, blocks, plan, mesh, timeout)
    for forms in installed.blocks:
        path = _any_mode(forms).path
        module = model.get_submodule(path)
        install(module, forms.get("train"), forms.get("eval"))
        installed.session.bind(module, path)
    return installed.session


def _modes(block: RewrittenBlock | Modes) -> Modes:
    return {"any": block} if isinstance(block, RewrittenBlock) else block


def _any_mode(block: RewrittenBlock | Modes) -> RewrittenBlock:
    return next(iter(_modes(block).values()))


def _same_in_all_modes(model: nn.Module, block: RewrittenBlock | Modes) -> list[LayerWeights]:
    found = [read_layers(model, form) for form in _modes(block).values()]
    if any(other != found[0] for other in found[1:]):
        raise PlanError(f"{_any_mode(block).path!r} reads other expert weights in training than in evaluation")
    return found[0]


def _partition_block(
    block: RewrittenBlock, layers: Sequence[LayerPlan], plan: Plan, placement: Placement
) -> RewrittenBlock:
    with at_block(block.path):
        notify("partition", "before", block.graph)
        graph = partition_graph(_copy(block.graph), layers, plan, placement)
        if plan.prefetch:
            overlap(graph, plan.slots)
        notify("partition", "after", graph)
    return replace(block, graph=graph)


def _copy(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph(tracer_cls=graph._tracer_cls)
    copy.output(copy.graph_copy(graph, val_map={}))
    return copy
