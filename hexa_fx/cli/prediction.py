"""A partition plan and its predicted times from a model's shapes, without any device (docs/partition.md has the model)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from hexa_fx.allocation import KERNEL_COLUMNS, Measured, allocate
from hexa_fx.errors import PlanError
from hexa_fx.passes.partition.plan_layers import layer_cost
from hexa_fx.plan import ExpertShape, LayerPlan, Mode, Plan

_BYTES = 2
"""Of an element that travels: half precision."""


@dataclass(frozen=True)
class Machine:
    """What is assumed of the devices: bytes a second that one receives, FLOP/s of the fastest."""

    bandwidth: float
    flops: float


@dataclass(frozen=True)
class ModeCost:
    """One mode of one layer, forward and backward: bytes a device receives, seconds of the exchange that nothing hides, and of
    the slowest device's experts."""

    bytes: float
    exchange: float
    experts: float

    @property
    def total(self) -> float:
        """Seconds."""
        return self.exchange + self.experts


@dataclass(frozen=True)
class Predicted:
    """One layer of the plan with its sizes and both modes' costs."""

    path: str
    shape: ExpertShape
    mode: Mode
    shards: tuple[int, ...]
    costs: Mapping[Mode, ModeCost]

    @property
    def seconds(self) -> float:
        """Of the chosen mode."""
        return self.costs[self.mode].total

    @property
    def like(self) -> tuple[Any, ...]:
        """Equal for layers that are planned alike."""
        return self.shape, self.mode, self.shards

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"path": self.path, "seconds": self.seconds, **{m: asdict(cost) for m, cost in self.costs.items()}}


@dataclass(frozen=True)
class PredictedMemory:
    """Bytes on every device, in half precision, of what the experts keep there.

    Args:
        weights: of the device's own slices.
        gradients: of the same slices, until the optimizer has used them.
        gathered_weights: slots of the shared cache, each as large as the largest data-centric layer.
    """

    weights: tuple[int, ...]
    gradients: tuple[int, ...]
    gathered_weights: tuple[int, ...]

    def as_dict(self) -> dict[str, list[int]]:
        """Plain values."""
        return {name: list(values) for name, values in asdict(self).items()}


def memory_of(made: Plan, layers: Sequence[Predicted]) -> PredictedMemory:
    """What the experts of these layers keep on every device of the plan, activations and optimizer states aside."""
    own = tuple(sum(_weight_bytes(layer.shape, layer.shards[rank]) for layer in layers) for rank in range(made.world))
    gathered = [_weight_bytes(x.shape, x.shape.intermediate_size) for x in layers if x.mode == "data_centric"]
    cache = min(made.slots, len(gathered)) * max(gathered, default=0)
    return PredictedMemory(own, own, (cache,) * made.world)


def _weight_bytes(shape: ExpertShape, channels: int) -> int:
    """Of ``channels`` channels of I of every expert's matrices."""
    return _BYTES * shape.num_experts * shape.matrices * shape.hidden_size * channels


def predict(
    target: str,
    capacities: Sequence[float],
    strategy: Literal["auto", "data", "model"],
    *,
    batch: int,
    tokens: int,
    slots: int,
    machine: Machine,
) -> tuple[Plan, tuple[Predicted, ...]]:
    """The plan for a target's MoE layers and what every layer takes.

    Raises:
        InputError: there is no such target. PlanError: nothing was rewritten, or no split is possible.
    """
    from hexa_fx.passes.partition.plan_layers import PartitionConfig, plan_layers

    shapes = layer_shapes(target)
    shares = allocate(capacities, batch)
    measured = {path: _measured(shape, capacities, shares, tokens, machine) for path, shape in shapes.items()}
    config = PartitionConfig(
        batch=batch,
        tokens=tokens,
        slots=slots,
        dtype_bytes=_BYTES,
        reduce_bytes=_BYTES,
        kernel_columns=KERNEL_COLUMNS,
    )
    made = plan_layers(shapes, capacities, strategy, config, measured)
    return made, tuple(_predicted(layer, made, measured[layer.path], tokens) for layer in made.layers)


def layer_shapes(target: str) -> dict[str, ExpertShape]:
    """Sizes of a target's MoE layers at its full widths, by path. Only a model with tiny widths is run.

    Raises:
        InputError: there is no such target. PlanError: none of its blocks is rewritten.
    """
    from hexa_fx.analysis import analyse_model
    from hexa_fx.config import HexaConfig
    from hexa_fx.inspection.inspector import Inspector
    from hexa_fx.passes.partition.layers import read_layers
    from hexa_fx.targets import full_size, load_whole

    model, inputs = load_whole(target)
    analyses = analyse_model(model, inputs, HexaConfig(verify=False), Inspector()).analyses
    whole = full_size(target) or model
    found: dict[str, ExpertShape] = {}
    for analysis in analyses:
        if analysis.rewritten is None or analysis.match is None or analysis.path not in _paths(whole):
            continue
        for layer in read_layers(whole, analysis.rewritten):
            found[layer.path] = replace(layer.geometry.shape, top_k=_top_k(analysis.match.routing.top_k, whole))
    if not found:
        raise PlanError(f"no MoE block of {target} can be partitioned; `hexa-fx explain {target}` says why")
    return found


def _paths(model: Any) -> set[str]:
    return {path for path, _ in model.named_modules()}


def _top_k(found: int, whole: Any) -> int:
    """The configuration's own number of experts per token, if it has one."""
    config = getattr(whole, "config", None)
    text = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    return int(getattr(text, "num_experts_per_tok", None) or found)


def _measured(
    shape: ExpertShape, capacities: Sequence[float], shares: Sequence[int], tokens: int, machine: Machine
) -> Measured:
    """What a device would measure if its rate were the machine's: compute follows FLOPs and t_i."""
    forward = 2 * tokens * shape.top_k * shape.hidden_size * shape.intermediate_size * shape.matrices / machine.flops
    slowness = [t / min(capacities) for t in capacities]
    tile = min(64, max(1, shape.intermediate_size // len(capacities)))
    channels = allocate(capacities, shape.intermediate_size, tile=tile, step=shape.channels(KERNEL_COLUMNS))
    by_channels = max(s * h / shape.intermediate_size for s, h in zip(slowness, channels))
    by_samples = max(s * b / max(1, sum(shares)) for s, b in zip(slowness, shares))
    return Measured(
        bandwidth=machine.bandwidth,
        expert=forward * by_samples,
        experts_model_centric=3 * forward * by_channels,
        experts_data_centric=3 * forward * by_samples,
    )


def _predicted(layer: LayerPlan, made: Plan, measured: Measured, tokens: int) -> Predicted:
    _, cost = layer_cost(
        layer.shape, tokens, made.world, dtype_bytes=_BYTES, reduce_bytes=_BYTES, slots=made.slots, measured=measured
    )
    by_model, by_data = cost.seconds_model_centric or 0.0, cost.seconds_data_centric or 0.0
    model, data = measured.experts_model_centric, measured.experts_data_centric
    costs: dict[Mode, ModeCost] = {
        "model_centric": ModeCost(cost.bytes_model_centric, by_model - model, model),
        "data_centric": ModeCost(cost.bytes_data_centric, by_data - data, data),
    }
    return Predicted(layer.path, layer.shape, layer.mode, layer.shards, costs)
