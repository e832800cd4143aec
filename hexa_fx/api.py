"""`optimize`, `optimize_` and `explain`: observe the model, take every candidate block through the passes, install."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import nn

from hexa_fx.analysis import ExampleInputs, analyse_model, call_arguments
from hexa_fx.capture.copies import copied
from hexa_fx.config import HexaConfig
from hexa_fx.errors import InputError, NothingRewritten, VerificationError
from hexa_fx.graphs import Graphs
from hexa_fx.inspection.inspector import Inspector
from hexa_fx.inspection.watch import watching
from hexa_fx.observers import listening
from hexa_fx.passes.partition import apply_partition
from hexa_fx.passes.plan_layers import PartitionConfig, Strategy
from hexa_fx.passes.switches import switch_off
from hexa_fx.report import OptimizationReport, with_plan
from hexa_fx.runtime.cuda_warmup import prebuild_blocks
from hexa_fx.runtime.install import install
from hexa_fx.runtime.preflight import check_model

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger(__name__)
Model = TypeVar("Model", bound=nn.Module)


def optimize(model: Model, example_inputs: ExampleInputs, config: HexaConfig | None = None) -> Model:
    """A new model whose MoE blocks run on expert-specific operators; ``model`` keeps its code.

    The two share parameters and buffers. To partition the experts over devices, which cuts parameters, use `optimize_`. The
    result is of the same class, with the same state_dict and parameter names, and has ``.report`` (`OptimizationReport`) and
    ``.graphs`` (`hexa_fx.graphs.Graphs`).

    Args:
        model: any module with MoE blocks in it, on its device, in any floating point type.
        example_inputs: what to call it with once: a tensor, a tuple of positional arguments, or a mapping of keywords.
        config: see `HexaConfig`; by default from the environment.

    Raises:
        InputError: the model cannot be worked on as it is (meta device, wrapped, quantised, already optimized).
        NothingRewritten: under ``strict`` when no block was rewritten.
        Exception: the model's own, when it rejects the inputs.
    """
    check_model(model)
    return optimize_(_sharing_copy(model), example_inputs, config)


def optimize_(
    model: Model,
    example_inputs: ExampleInputs,
    config: HexaConfig | None = None,
    *,
    mesh: DeviceMesh | None = None,
    strategy: Strategy = "auto",
    capacities: Literal["measure"] | Sequence[float] | None = "measure",
    partition: PartitionConfig | None = None,
) -> Model:
    """As `optimize`, in place: returns ``model`` itself.

    With a mesh every rank calls it with the same model and inputs, before optimizers, DDP or FSDP2 are built. The expert weights
    are cut into device-weighted shards, and the blocks exchange tokens or weights (docs/partition.md). The session with the
    plan is ``model.partition``; the plan is in ``model.report`` too. The inputs stand for the global batch: their first
    dimension is what ``auto`` weighs and what B_i sums to, unless ``partition`` says otherwise.

    Args:
        mesh: one-dimensional device mesh over which MoE blocks are partitioned.
        strategy: ``data``, ``model``, ``auto``, or one of the first two by block path.
        capacities: seconds of the same task on every device, ``"measure"`` to run the operator on each, or None for equal ones.
        partition: everything else about the partition: global batch, cache slots, who averages gradients.

    Raises:
        PlanError: the blocks cannot be partitioned as asked.
    """
    check_model(model)
    config = config or HexaConfig.from_environment()
    inspector = Inspector()
    with watching() as watch, listening(inspector.see):
        found = analyse_model(model, example_inputs, config, inspector)
        report, rewritten = found.report, found.rewritten
        if mesh is not None and rewritten:
            args, kwargs = call_arguments(example_inputs)
            session = apply_partition(
                model,
                [analysis.rewritten for analysis in rewritten],
                mesh,
                strategy,
                capacities,
                _partition_config(partition, config, args, kwargs),
                finish=functools.partial(switch_off, config=config),
                example=lambda: model(*args, **kwargs),
            )
            model.__dict__["partition"] = session
            report = with_plan(report, session.plan, inspector.partitioned)
        else:
            for analysis in rewritten:
                block = model.get_submodule(analysis.path)
                forms = {mode: switch_off(form, config) for mode, form in analysis.rewritten.items()}
                install(block, forms.get("train"), forms.get("eval"))
            prebuild_blocks(model, found.examples)
        model.__dict__["report"] = report
        model.__dict__["graphs"] = Graphs.of(found.analyses, inspector)
        watch.finish(report, model.__dict__["graphs"])
    _announce(report, config)
    return model


def _partition_config(
    given: PartitionConfig | None, config: HexaConfig, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> PartitionConfig:
    """What was asked for, less what ``config`` switches off; the global batch is the example's unless it is given."""
    given = given or PartitionConfig()
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.dim())
    first = next(tensors, None)
    batch = first.shape[0] if given.batch is None and first is not None else given.batch
    slots = given.slots if config.shared_cache else 0
    return replace(given, batch=batch, slots=slots, prefetch=given.prefetch and config.overlap)


def explain(model: nn.Module, example_inputs: ExampleInputs, config: HexaConfig | None = None) -> OptimizationReport:
    """What `optimize` would do. The model is not changed."""
    check_model(model)
    with watching() as watch:
        report = analyse_model(model, example_inputs, config or HexaConfig.from_environment(), Inspector()).report
        watch.finish(report)
    return report


def _sharing_copy(model: Model) -> Model:
    """A copy with the model's own parameters and buffers, and its own process groups, locks and the like."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    try:
        return copy.deepcopy(model, dict(shared))
    except (TypeError, RuntimeError) as error:
        log.info("copying the model: %s; what cannot be copied is shared", error)
    held = [value for module in model.modules() for value in vars(module).values()]
    shared |= {id(value): value for value in held if not isinstance(value, nn.Module) and copied(value) is value}
    try:
        return copy.deepcopy(model, shared)
    except (TypeError, RuntimeError) as error:
        raise InputError(f"the model cannot be copied ({error}); hexa_fx.optimize_ rewrites it in place") from error


def _announce(report: OptimizationReport, config: HexaConfig) -> None:
    for block in report.refused:
        if config.strict and "differs from the original" in block.reason:
            raise VerificationError(block.reason, path=block.path)
    if report.rewritten:
        log.info("%s", report.summary())
        return
    if config.strict:
        raise NothingRewritten(f"{report}")
    log.warning("hexa_fx rewrote nothing: %s", report)
