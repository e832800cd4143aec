"""How MoE layers are spread over ranks, from numbers alone: shares, shard sizes and mode of every layer in, `Plan` out.

Paper, section 3.4 (Eq. 1 and 2) for the shares; the mode is the cheaper one by `hexa_fx.passes.partition.plan_layers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Literal

from hexa_fx.allocation import DeviceCosts, Measured, even
from hexa_fx.errors import PlanError
from hexa_fx.isolation.module_tree import with_ancestors
from hexa_fx.plan import DataParallel, ExpertShape, GradDtype, LayerCost, LayerPlan, Mode, Plan, Reduce

_ID_BYTES = 8  # top_k_index is int64


def model_centric_bytes(
    shape: ExpertShape, tokens: int, world: int, *, dtype_bytes: int, reduce: Reduce = "reduce_scatter"
) -> float:
    """Bytes an average rank receives for one layer, forward and backward, model-centric.

    An all-reduce moves twice what a reduce-scatter does, and its backward is an all-reduce again.
    """
    share = (world - 1) / world
    activation = share * tokens * shape.hidden_size * dtype_bytes
    routing = share * tokens * shape.top_k * (_ID_BYTES + dtype_bytes)  # gathered once
    routing += share * tokens * shape.top_k * dtype_bytes  # gradient of the routing weights
    return (4 if reduce == "reduce_scatter" else 6) * activation + routing


def data_centric_bytes(shape: ExpertShape, world: int, *, gather_bytes: int, reduce_bytes: int) -> float:
    """Bytes an average rank receives for one layer, forward and backward, which gathers anew, data-centric."""
    return (world - 1) / world * shape.weight_numel * (2 * gather_bytes + reduce_bytes)


def layer_cost(
    shape: ExpertShape,
    tokens: int,
    world: int,
    *,
    dtype_bytes: int,
    reduce_bytes: int,
    slots: int,
    reduce: Reduce = "reduce_scatter",
    measured: Measured | None = None,
) -> tuple[Mode, LayerCost]:
    """The cheapest mode of one layer, and the numbers behind it.

    With `Measured`, the time that compute does not hide decides, else the bytes, which are the same for FSDP2 as data-centric. Ties
    go to model-centric, which needs no cache.
    """
    by_model = model_centric_bytes(shape, tokens, world, dtype_bytes=dtype_bytes, reduce=reduce)
    by_data = data_centric_bytes(shape, world, gather_bytes=dtype_bytes, reduce_bytes=reduce_bytes)
    if measured is None:
        mode: Mode = "model_centric" if by_model <= by_data else "data_centric"
        return mode, LayerCost(by_model, by_data, reason=f"fewer bytes for {tokens} tokens")
    exchange = by_model / measured.bandwidth + 8 * measured.latency if measured.exchange is None else measured.exchange
    time_model = exchange + measured.experts_model_centric
    moved = (dtype_bytes, reduce_bytes)
    time_data = measured.experts_data_centric + _data_centric_communication(by_data, measured, slots, *moved)
    times: dict[Mode, float] = {"model_centric": time_model, "data_centric": time_data}
    if measured.experts_fsdp is not None:
        times["fsdp"] = measured.experts_fsdp + _data_centric_communication(by_data, measured, 2, *moved)
    reason = f"less time for {tokens} tokens ({measured.describe()})"
    mode = min(times, key=lambda mode: times[mode])
    host = measured.host.get(mode) or None
    return mode, LayerCost(by_model, by_data, time_model, time_data, times.get("fsdp"), reason, host)


def _data_centric_communication(total: float, m: Measured, slots: int, gather_bytes: int, reduce_bytes: int) -> float:
    """Seconds that gathers, and the reduce-scatter of the gradients, add to a step.

    Forward hides a gather behind attention and router (1 slot), also behind the experts (2 slots). Backward takes twice as
    long and hides the second gather in the same way, and the reduce-scatter behind all of it.
    """
    unit = total / (2 * gather_bytes + reduce_bytes) / m.bandwidth
    gather, scatter = unit * gather_bytes + m.latency, unit * reduce_bytes + m.latency
    layer = m.attention + m.expert
    beside_gather = layer if slots > 1 else m.attention
    forward = max(0.0, gather - beside_gather)
    backward = max(0.0, gather - 2 * beside_gather, gather + scatter - 2 * layer)
    exposed = forward + backward
    return exposed + m.contention * (2 * gather + scatter - exposed)


Kind = Literal["auto", "data", "model", "fsdp"]
Strategy = Kind | Mapping[str, Kind]

_EXPECTED = "'auto', 'data', 'model' or 'fsdp', or a dict of them by path"
_LEAST = {
    "batch": 0,
    "tokens": 0,
    "tile": 1,
    "kernel_columns": 1,
    "least_channels": 0,
    "bytes_per_element": 1,
    "dtype_bytes": 1,
    "reduce_bytes": 1,
}
MODES: dict[Kind, Mode] = {"data": "data_centric", "model": "model_centric", "fsdp": "fsdp"}


@dataclass(frozen=True)
class PartitionConfig:
    """Options of a partition: what `hexa_fx.optimize_` needs to know beyond mesh, strategy and capacities.

    Args:
        batch: samples of the global batch, shared out by Eq. 1. Default: the first dimension of the example inputs
            (`hexa_fx.optimize_`), else the number of ranks.
        tokens: tokens of the global batch in one forward, for the cost model. Default: those that were measured, else ``batch``.
        static_tokens: fix T_i in the graph, by splitting ``tokens`` as ``batch`` is split. Ranks then need not exchange token
            counts at run time.
        reduce: how model-centric outputs are summed; ``all_reduce`` is the paper's formulation.
        slots: slots of the shared cache, 1 or 2. With 0 nothing is shared: every layer keeps its gathered weights for backward.
        prefetch: gather the next layer's weights ahead of their use.
        tile: h_i is a multiple of it, where the intermediate size allows.
        kernel_columns: columns of the first projection that a device's kernels compute at a time; h_i counts a begun step
            as a whole one. Default: 1, or the kernels' own on GPUs.
        least_channels: how many channels every rank gets at least, in whole tiles. Default: none, or a tile where the partition is
            one axis of a mesh: a rank without channels has empty gradients, which FSDP2 over the other axes does not take.
        memory_caps: bytes of expert state that each rank may hold at most, counted with ``bytes_per_element``; None for no limit.
        bytes_per_element: bytes of an expert parameter together with its gradient and optimizer state.
        data_parallel: how the gradients of all other parameters are combined: ``sum`` (nothing divides them) or ``mean``
            (DDP, FSDP2).
        grad_dtype: dtype in which data-centric weight gradients are summed over ranks. ``compute``, the autocast dtype and
            FSDP2's default, halves what travels and what the largest layer holds in backward; ``parameter`` rounds once less.
        dtype_bytes: bytes of a gathered element. reduce_bytes: bytes of an element of a reduced weight gradient.
        attention_seconds: forward time of what runs between two MoE layers on a rank's tokens, for ``auto``. Default:
            measured where the model can be run, else 0, so that nothing hides a gather.
        measure: measure bandwidth and experts for ``auto``; otherwise it compares bytes.
    """

    batch: int | None = None
    tokens: int | None = None
    static_tokens: bool = False
    reduce: Reduce = "reduce_scatter"
    slots: int = 2
    prefetch: bool = True
    tile: int = 64
    kernel_columns: int | None = None
    least_channels: int | None = None
    memory_caps: tuple[int, ...] | None = None
    bytes_per_element: int = 16
    data_parallel: DataParallel = "sum"
    grad_dtype: GradDtype = "parameter"
    dtype_bytes: int | None = None
    reduce_bytes: int | None = None
    attention_seconds: float | None = None
    measure: bool = True

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not _is_whole(value, least):
                raise PlanError(f"PartitionConfig: {name} is a whole number, {least} or more, got {value!r}")
        caps, attention = self.memory_caps, self.attention_seconds
        if caps is not None and (isinstance(caps, str) or not all(_is_whole(cap, 0) for cap in caps)):
            raise PlanError(f"PartitionConfig: memory_caps is the bytes of every rank, whole numbers, got {caps!r}")
        if attention is not None and not 0 <= attention < float("inf"):
            raise PlanError(f"PartitionConfig: attention_seconds is 0 or more, got {attention!r}")
        if self.data_parallel not in ("sum", "mean"):
            raise PlanError(f"PartitionConfig: data_parallel is 'sum' or 'mean', got {self.data_parallel!r}")


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, Integral) and int(value) >= least


# --- pure planning ---------------------------------------------------------------------------------------------------


def plan_layers(
    shapes: Mapping[str, ExpertShape],
    capacities: Sequence[float] | DeviceCosts,
    strategy: Strategy = "auto",
    config: PartitionConfig | None = None,
    measured: Measured | Mapping[str, Measured] | None = None,
) -> Plan:
    """Makes a plan from numbers alone: batch shares, and the shard sizes and mode of every layer.

    Args:
        shapes: sizes of every MoE layer by path, in execution order.
        capacities: t_i, seconds of the same task on rank i, or the measured costs of `profile_costs`.
        strategy: one for all layers, or by path of a layer or of a module that holds it (else ``auto``).
        measured: bandwidth and times, for all layers or by path; without them ``auto`` compares bytes.

    Raises:
        PlanError: no split fits the caps, or the strategy names an unknown layer or mode.
    """
    config = config or PartitionConfig()
    costs = capacities if isinstance(capacities, DeviceCosts) else DeviceCosts.proportional(capacities)
    world = len(costs.seconds)
    batch = batch_shares(costs, config.batch if config.batch is not None else world, config.tokens)
    tokens = _static_tokens(config, batch) if config.static_tokens else None
    wanted = wanted_modes(strategy, shapes)
    by_path = measured if isinstance(measured, Mapping) else dict.fromkeys(shapes, measured)
    layers = tuple(
        _plan_layer(path, shape, wanted[path], costs, config, by_path.get(path)) for path, shape in shapes.items()
    )
    return Plan(
        world=world,
        layers=layers,
        batch=batch,
        tokens=tokens,
        slots=config.slots,
        prefetch=config.prefetch,
        data_parallel=config.data_parallel,
        grad_dtype=config.grad_dtype,
        capacities=costs.seconds,
    )


def batch_shares(costs: DeviceCosts, batch: int, tokens: int | None) -> tuple[int, ...]:
    """B_i (Eq. 1). Times count as proportional to the share where nobody knows the ``tokens`` of the batch.

    Where times were measured every device gets a sample, if there are so many: not all models take an empty batch.
    """
    least = 1 if costs.measured and batch >= len(costs.seconds) else 0
    if tokens is None or batch == 0:
        return DeviceCosts.proportional(costs.seconds).by_tokens.split(batch, least=least)
    return costs.by_tokens.split(batch, tokens / batch, least=least)


def wanted_modes(strategy: Strategy, shapes: Mapping[str, ExpertShape]) -> dict[str, Kind]:
    if not isinstance(strategy, str | Mapping):
        raise PlanError(f"strategy is a {type(strategy).__name__}; expected {_EXPECTED}")
    given = {"": strategy} if isinstance(strategy, str) else dict(strategy)
    for path, kind in given.items():
        if kind != "auto" and kind not in MODES:
            where = f" of {path!r}" if path else ""
            raise PlanError(f"strategy {kind!r}{where}: expected {_EXPECTED}")
    around = {path: [*with_ancestors(path)] for path in shapes}
    unknown = given.keys() - {key for keys in around.values() for key in keys}
    if shapes and unknown:
        raise PlanError(f"strategy names layers {sorted(unknown)}; the model's MoE layers are {list(shapes)}")
    return {path: next((given[key] for key in keys if key in given), "auto") for path, keys in around.items()}


def _plan_layer(
    path: str,
    shape: ExpertShape,
    kind: Kind,
    costs: DeviceCosts,
    config: PartitionConfig,
    measured: Measured | None,
) -> LayerPlan:
    world = len(costs.seconds)
    caps = _channel_caps(shape, config, world)
    equal = even(shape.intermediate_size, world)
    fits = caps is None or all(share <= cap for share, cap in zip(equal, caps))
    if kind == "fsdp" and not fits:
        raise PlanError(f"{path!r}: FSDP2 gives every rank an equal part, more than memory_caps allow: use 'data'")
    mode, cost = _choose(shape, kind, world, config, measured if fits or measured is None else measured.without_fsdp())
    equal_share = shape.intermediate_size // world
    if mode == "model_centric":
        tile = min(config.tile, max(1, equal_share))
        step = shape.channels(config.kernel_columns or 1)
        least = min(-(-(config.least_channels or 0) // tile), equal_share // tile) * tile
        shards = costs.by_channels.split(shape.intermediate_size, tile=tile, step=step, caps=caps, least=least)
    elif mode == "fsdp":
        shards = equal
    else:  # every rank computes with all weights, so what it stores need not follow its speed
        least = min(config.least_channels or 0, equal_share)
        shards = even(shape.intermediate_size, world, caps=caps, least=least)
    owner = max(range(len(shards)), key=lambda rank: (shards[rank], -rank))
    return LayerPlan(path, mode, shape, shards, config.reduce, owner, cost)


def _choose(
    shape: ExpertShape, kind: Kind, world: int, config: PartitionConfig, measured: Measured | None
) -> tuple[Mode, LayerCost | None]:
    if kind != "auto":
        return MODES[kind], None
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
