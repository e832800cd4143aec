"""`optimize`, `optimize_`, `explain` and `undo_`: observe the model, take every candidate block through the passes, install."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import nn

from hexa_fx.analysis import ExampleInputs, analyse_model, call_arguments
from hexa_fx.capture.copies import copied, deepcopied
from hexa_fx.config import HexaConfig
from hexa_fx.errors import InputError, NothingRewritten, PlanError, VerificationError
from hexa_fx.graphs import Graphs
from hexa_fx.inspection.inspector import Inspector
from hexa_fx.inspection.watch import watching
from hexa_fx.observers import listening
from hexa_fx.passes.partition import apply_partition
from hexa_fx.passes.plan_layers import PartitionConfig, Strategy
from hexa_fx.passes.switches import switch_off
from hexa_fx.report import OptimizationReport, with_plan
from hexa_fx.runtime.cuda_warmup import prebuild_blocks
from hexa_fx.runtime.distributed.session import PartitionSession
from hexa_fx.runtime.install import install, is_installed, uninstall
from hexa_fx.runtime.preflight import check_model

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger(__name__)
Model = TypeVar("Model", bound=nn.Module)


def optimize(model: Model, example_inputs: ExampleInputs, config: HexaConfig | None = None) -> Model:
    """A new model whose MoE blocks run on expert-specific operators; ``model`` keeps its code.

    The two share parameters and buffers. To partition the experts over devices, which cuts parameters, use `optimize_`. The
    result is of the same class, with the same state_dict and parameter names, and has ``.report`` (`OptimizationReport`) and
    ``.graphs`` (`hexa_fx.graphs.Graphs`); where the model has an attribute of that name, ``.hexa_report`` and ``.hexa_graphs``.
    Where no block could be rewritten the result runs the model's own code, and a warning says why.

    Args:
        model: any module with MoE blocks in it, on its device, in any floating point type.
        example_inputs: what to call it with once: a tensor, a tuple or list of positional arguments, or a mapping of keywords,
            on the model's device. Any size will do; the rewritten model takes others.
        config: see `HexaConfig`; by default from the environment.

    Raises:
        InputError: an argument that cannot be worked with, or a model that has to be prepared differently (on the meta device,
            wrapped, compiled, scripted, quantised, already optimized).
        NothingRewritten: under ``strict`` when no block was rewritten.
        VerificationError: under ``strict`` when a rewritten block differs from its original.
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
    plan is ``model.partition`` (``.hexa_partition`` where the name is taken); the plan is in ``model.report`` too. The inputs
    stand for the global batch: their first dimension is what ``auto`` weighs and what B_i sums to, unless ``partition`` says
    otherwise.

    Args:
        mesh: one-dimensional device mesh over which MoE blocks are partitioned.
        strategy: ``data``, ``model``, ``auto``, or one of the first two by block path.
        capacities: seconds of the same task on every device, ``"measure"`` to run the operator on each, or None for equal ones.
        partition: `hexa_fx.PartitionConfig`, everything else about the partition: global batch, cache slots, who averages
            gradients.

    Raises:
        InputError: as `optimize`; or an argument about a partition was given without a mesh.
        PlanError: the blocks cannot be partitioned as asked, or there is none.
    """
    check_model(model)
    config = _checked(config)
    if mesh is None and (strategy != "auto" or capacities != "measure" or partition is not None):
        raise InputError("strategy, capacities and partition say how to spread the model over devices; give mesh= too")
    if not isinstance(partition, PartitionConfig | None):
        raise InputError(f"partition is a {type(partition).__name__}; expected a hexa_fx.PartitionConfig")
    inspector = Inspector()
    with torch.inference_mode(False), watching() as watch, listening(inspector.see):
        found = analyse_model(model, example_inputs, config, inspector)
        report, rewritten = found.report, found.rewritten
        if mesh is not None and not rewritten:
            raise PlanError(f"there is nothing to spread over devices: {report}")
        if mesh is not None:
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
            _attach(model, "partition", session)
            report = with_plan(report, session.plan, inspector.partitioned)
        else:
            for analysis in rewritten:
                block = model.get_submodule(analysis.path)
                forms = {mode: switch_off(form, config) for mode, form in analysis.rewritten.items()}
                install(block, forms.get("train"), forms.get("eval"))
            prebuild_blocks(model, found.examples)
        graphs = Graphs.of(found.analyses, inspector)
        _attach(model, "report", report)
        _attach(model, "graphs", graphs)
        watch.finish(report, graphs)
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
    """What `optimize` would do, and why it would leave the rest. The model is not changed.

    Args:
        model, example_inputs, config: as for `optimize`.

    Raises:
        InputError: as `optimize`.
        Exception: the model's own, when it rejects the inputs.
    """
    check_model(model)
    config = _checked(config)
    with torch.inference_mode(False), watching() as watch:
        report = analyse_model(model, example_inputs, config, Inspector()).report
        watch.finish(report)
    return report


def undo_(model: Model) -> Model:
    """Gives every block of ``model`` its own forward back, in place, and returns ``model``. Values of parameters stay.

    After it `optimize_` may be called again, with other inputs or on a block that was edited.

    Raises:
        InputError: the model is spread over devices; its expert weights are cut, so that its own code cannot run.
    """
    for module in model.modules():
        if any(isinstance(vars(module).get(name), PartitionSession) for name in ("partition", "hexa_partition")):
            raise InputError(
                "the model's expert weights are cut over devices; save it (docs/partition.md) and load it into a new model"
            )
    for module in model.modules():
        if is_installed(module):
            uninstall(module)
        for name, kind in _ATTACHED.items():
            for key in (name, f"hexa_{name}"):
                if isinstance(vars(module).get(key), kind):
                    del module.__dict__[key]
    return model


_ATTACHED: dict[str, type] = {"report": OptimizationReport, "graphs": Graphs, "partition": PartitionSession}


def _attach(model: nn.Module, name: str, value: Any) -> None:
    """As an attribute of this instance, unless the model has one of that name: the user's stays."""
    if hasattr(model, name) and not isinstance(vars(model).get(name), _ATTACHED[name]):
        log.warning("%s has an attribute %r of its own; hexa_fx's is .hexa_%s", type(model).__name__, name, name)
        name = f"hexa_{name}"
    model.__dict__[name] = value


def attached(model: nn.Module, name: Literal["report", "graphs", "partition"]) -> Any:
    """What `optimize` left on a model, whichever attribute it stands in."""
    return vars(model).get(f"hexa_{name}") or vars(model)[name]


def _checked(config: HexaConfig | None) -> HexaConfig:
    if not isinstance(config, HexaConfig | None):
        raise InputError(f"config is a {type(config).__name__}; expected a hexa_fx.HexaConfig")
    return config or HexaConfig.from_environment()


def _sharing_copy(model: Model) -> Model:
    """A copy with the model's own parameters and buffers, and its own process groups, locks and the like."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    try:
        return deepcopied(model, dict(shared))
    except (TypeError, RuntimeError) as error:
        log.info("copying the model: %s; what cannot be copied is shared", error)
    held = [value for module in model.modules() for value in vars(module).values()]
    shared |= {id(value): value for value in held if not isinstance(value, nn.Module) and copied(value) is value}
    try:
        return deepcopied(model, shared)
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
