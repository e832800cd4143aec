"""The partition plan: which rank keeps, computes and receives what. Frozen, fingerprinted, and stored as JSON.

Every rank of a job must hold the same plan. `Plan.fingerprint` is compared before the first step, because collectives
that disagree about sizes may finish silently with wrong data (docs/partition.md).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields, replace
from html import escape
from typing import Any, Literal

from hexa_fx.errors import PlanError, named

Mode = Literal["data_centric", "model_centric", "fsdp"]
Reduce = Literal["reduce_scatter", "all_reduce"]
GradDtype = Literal["parameter", "compute"]
DataParallel = Literal["sum", "mean"]

PLAN_VERSION = 2


@dataclass(frozen=True)
class ExpertShape:
    """Sizes of one MoE layer: E experts D -> I -> D, each with ``matrices`` matrices of D x I (3 if gated)."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    matrices: int = 2
    top_k: int = 1

    @property
    def weight_numel(self) -> int:
        """Elements of all projection matrices of the layer (biases left out)."""
        return self.matrices * self.num_experts * self.hidden_size * self.intermediate_size

    def channels(self, columns: int) -> int:
        """Channels in so many columns of the first projection, which has two a channel when gated; 1 or more."""
        return max(1, columns // (self.matrices - 1))


_LIMITS = 0.8
"""Of a layer's time: whoever takes more is what the others wait for."""


@dataclass(frozen=True)
class LayerCost:
    """The numbers behind the choice of a layer's mode: bytes that the busiest rank receives, seconds, and the reason.

    Args:
        seconds_host: what the host takes to start the layer's work in the mode that was taken; None on a CPU, which does it.
    """

    bytes_model_centric: float
    bytes_data_centric: float
    seconds_model_centric: float | None = None
    seconds_data_centric: float | None = None
    seconds_fsdp: float | None = None
    reason: str = ""
    seconds_host: float | None = None

    def lines(self) -> list[str]:
        """In words: both modes beside each other, and why one was taken."""
        received = {"model-centric": self.bytes_model_centric, "data-centric": self.bytes_data_centric}
        said = [f"received: {', '.join(f'{mode} {number / 1e6:.3g} MB' for mode, number in received.items())}"]
        taken = (self.seconds_model_centric, self.seconds_data_centric, self.seconds_fsdp)
        times = [f"{m} {1e3 * t:.3g} ms" for m, t in zip((*received, "fsdp"), taken) if t is not None]
        said += [f"experts and what no compute hides of the exchange: {', '.join(times)}"] if times else []
        said += [f"chosen: {self.reason}"] if self.reason else []
        if self.seconds_host is not None:
            limit = self.seconds_host > _LIMITS * min((t for t in taken if t is not None), default=0.0)
            remedy = ", and is the limit: model.partition.graphed(step) starts whole steps at once, as CUDA graphs"
            said.append(f"the host takes {1e3 * self.seconds_host:.3g} ms to start that{remedy if limit else ''}")
        return said


@dataclass(frozen=True)
class LayerPlan:
    """One MoE layer.

    Args:
        path: the block's path in the model.
        mode: ``model_centric`` (tokens move), ``data_centric`` (weights move), or ``fsdp`` (weights move, by torch's FSDP2).
        shape: sizes of the layer.
        shards: h_i, the slice of the intermediate size that rank i stores (and computes, when model-centric). Of ``fsdp`` only
            the share: FSDP2 cuts every parameter along its first dimension.
        reduce: how model-centric outputs are summed. ``all_reduce`` is the paper's formulation.
        bias_owner: the rank whose model-centric partial sum carries the output bias.
        cost: numbers behind the choice; None when the user gave the mode.
    """

    path: str
    mode: Mode
    shape: ExpertShape
    shards: tuple[int, ...]
    reduce: Reduce = "reduce_scatter"
    bias_owner: int = 0
    cost: LayerCost | None = None

    @property
    def idle(self) -> tuple[int, ...]:
        """The ranks that store nothing of the layer's experts."""
        return tuple(rank for rank, share in enumerate(self.shards) if not share)


@dataclass(frozen=True)
class Plan:
    """How a model's MoE layers are spread over ``world`` ranks.

    Args:
        world: number of ranks.
        layers: one entry per MoE layer, in execution order.
        batch: B_i, samples of the global batch that rank i processes (Eq. 1).
        tokens: T_i if token counts are fixed; None if hosts exchange them at run time.
        slots: slots of the pipeline-shared cache, 1 or 2. With 0 nothing is shared: every layer keeps its own until backward.
        prefetch: gather the next layer's weights ahead of their use.
        data_parallel: whether the gradients of all other parameters are summed, or averaged by a wrapper (DDP, FSDP2).
        grad_dtype: dtype in which gathered weights' gradients are summed over ranks: the parameters', or that of the compute.
        capacities: t_i, seconds of the proxy task on rank i.
    """

    world: int
    layers: tuple[LayerPlan, ...]
    batch: tuple[int, ...]
    tokens: tuple[int, ...] | None = None
    slots: int = 1
    prefetch: bool = True
    data_parallel: DataParallel = "sum"
    grad_dtype: GradDtype = "parameter"
    capacities: tuple[float, ...] = ()
    version: int = field(default=PLAN_VERSION)

    def __post_init__(self) -> None:
        _check(self)

    @property
    def grad_scale(self) -> float:
        """Factor on expert gradients, which nobody else divides."""
        return 1.0 / self.world if self.data_parallel == "mean" else 1.0

    def layer(self, path: str) -> LayerPlan:
        """The layer at this path; raises `PlanError` if there is none."""
        for layer in self.layers:
            if layer.path == path:
                return layer
        raise PlanError(f"the plan has no layer {path!r}; it has {[layer.path for layer in self.layers]}")

    def to_json(self) -> str:
        """The plan as JSON with sorted keys, so that equal plans give equal text."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote; raises `PlanError` on another version or an unknown key."""
        data: dict[str, Any] = json.loads(text)
        if data.get("version") != PLAN_VERSION:
            raise PlanError(f"plan version {data.get('version')!r} is not {PLAN_VERSION}: plan again with this release")
        data["layers"] = tuple(_layer_from(entry) for entry in data["layers"])
        plan: Plan = _build(cls, data)
        return plan

    @property
    def fingerprint(self) -> str:
        """16 hex digits over everything in the plan."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def describe(self) -> str:
        """Readable lines, for the report; layers that are alike are described once."""
        head = f"plan {self.fingerprint}: {self.world} ranks, samples of the batch by rank B_i {list(self.batch)}"
        if any(layer.mode == "data_centric" for layer in self.layers):
            head += f", {self.slots or len(self.layers)} slots for gathered weights"
        lines = [head]
        alike: dict[LayerPlan, list[LayerPlan]] = {}
        for layer in self.layers:
            alike.setdefault(replace(layer, path=""), []).append(layer)
        for first, *others in alike.values():
            lines.append(describe_layer(first, len(others)))
            lines += [] if first.cost is None else [f"      {line}" for line in first.cost.lines()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """For notebooks."""
        head, *_ = self.describe().splitlines()
        rows = ""
        for layer in self.layers:
            cells = (
                named(layer.path),
                layer.mode.replace("_", "-"),
                "FSDP2's shares" if layer.mode == "fsdp" else list(layer.shards),
                layer.cost.reason if layer.cost else "",
            )
            rows += f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in cells)}</tr>"
        names = "".join(f"<th>{name}</th>" for name in ("layer", "mode", "channels of every rank", "reason"))
        return f"<p>{escape(head)}</p><table><tr>{names}</tr>{rows}</table>"


def describe_layer(layer: LayerPlan, alike: int = 0) -> str:
    """One readable line on a layer and ``alike`` more."""
    more = f" and {alike} more" if alike else ""
    text = f"  {named(layer.path)}{more}: {layer.mode.replace('_', '-')}"
    if layer.mode == "fsdp":
        return f"{text}, every parameter in equal parts"
    travels = f"tokens travel, {layer.reduce}" if layer.mode == "model_centric" else "weights travel"
    return f"{text} ({travels}), channels of every expert by rank h_i {list(layer.shards)}"


def _layer_from(entry: dict[str, Any]) -> LayerPlan:
    cost = entry["cost"]
    shape = _build(ExpertShape, entry["shape"])
    cost = None if cost is None else _build(LayerCost, cost)
    layer: LayerPlan = _build(LayerPlan, {**entry, "shape": shape, "cost": cost})
    return layer


def _build(cls: type[Any], data: dict[str, Any]) -> Any:
    unknown = set(data) - {f.name for f in fields(cls)}
    if unknown:
        raise PlanError(f"{cls.__name__} has no fields {sorted(unknown)}: plan again with this release")
    return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in data.items()})


def _check(plan: Plan) -> None:
    if plan.world < 1:
        raise PlanError(f"a plan needs at least one rank, got world={plan.world}")
    if plan.slots not in (0, 1, 2):
        raise PlanError(f"the shared cache has 1 or 2 slots, or 0 for one a layer, got {plan.slots}")
    if plan.grad_dtype not in ("parameter", "compute"):
        raise PlanError(f"grad_dtype is 'parameter' or 'compute', got {plan.grad_dtype!r}")
    if plan.data_parallel not in ("sum", "mean"):
        raise PlanError(f"data_parallel is 'sum' or 'mean', got {plan.data_parallel!r}")
    _check_sizes("batch", plan.batch, plan.world)
    if plan.tokens is not None:
        _check_sizes("tokens", plan.tokens, plan.world)
    if len({layer.path for layer in plan.layers}) != len(plan.layers):
        raise PlanError(f"layer paths repeat: {[layer.path for layer in plan.layers]}")
    for layer in plan.layers:
        _check_layer(layer, plan.world)


def _check_layer(layer: LayerPlan, world: int) -> None:
    if layer.mode not in ("data_centric", "model_centric", "fsdp"):
        raise PlanError(f"{layer.path!r}: mode {layer.mode!r} is neither data_centric, model_centric nor fsdp")
    if layer.reduce not in ("reduce_scatter", "all_reduce"):
        raise PlanError(f"{layer.path!r}: reduce {layer.reduce!r} is neither reduce_scatter nor all_reduce")
    _check_sizes(f"shards of {layer.path!r}", layer.shards, world)
    if sum(layer.shards) != layer.shape.intermediate_size:
        raise PlanError(
            f"shards {list(layer.shards)} of {layer.path!r} sum to {sum(layer.shards)}, "
            f"the intermediate size is {layer.shape.intermediate_size}"
        )
    if not 0 <= layer.bias_owner < world:
        raise PlanError(f"bias_owner {layer.bias_owner} of {layer.path!r} is no rank; there are 0 to {world - 1}")
    if layer.shards[layer.bias_owner] == 0:
        raise PlanError(
            f"bias_owner {layer.bias_owner} of {layer.path!r} has h_i = 0, so it computes nothing; name another"
        )


def _check_sizes(what: str, sizes: tuple[int, ...], world: int) -> None:
    if len(sizes) != world:
        raise PlanError(f"{what} has {len(sizes)} entries {list(sizes)}, the plan has {world} ranks")
    if any(size < 0 for size in sizes):
        raise PlanError(f"{what} has a negative size: {list(sizes)}")


class AttachedPartition:
    """What a model that is spread over devices has as its attribute ``partition``, told without loading torch's DTensor: a
    `hexa_fx.distributed.session.PartitionSession`.
    """
