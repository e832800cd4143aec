"""`optimize`, `optimize_` and `explain`: analyse a model's MoE blocks and install the rewritten ones."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import nn

from hexa_fx.analysis import ModelAnalysis, analyse_model
from hexa_fx.attached import attach, attached
from hexa_fx.capture.scripted import compiled_as_python
from hexa_fx.capture.sharing_copy import sharing_copy
from hexa_fx.config import HexaConfig
from hexa_fx.errors import HexaError, InputError, NothingRewritten, VerificationError
from hexa_fx.example_inputs import Call, ExampleInputs
from hexa_fx.example_tokens import example_tokens
from hexa_fx.first_call import own_forward, put_on, take_off
from hexa_fx.graphs import Graphs
from hexa_fx.inspection.block_report import BlockReport
from hexa_fx.inspection.inspector import Inspector
from hexa_fx.inspection.kernel_requests import request_kernels_of_sources
from hexa_fx.ir import RewrittenBlock, RoutingSite
from hexa_fx.isolation.garbage import collections_are_cheap
from hexa_fx.isolation.shadow import shadow_of
from hexa_fx.observers import listening
from hexa_fx.passes.block_analysis import BlockAnalysis
from hexa_fx.passes.kernel_requests import kernels_requested
from hexa_fx.passes.options.batch_invariance import NOT_FIXED, SAID, fix_order, is_fixed
from hexa_fx.passes.options.fp8_compute import added_error, computes_in_fp8, in_fp8
from hexa_fx.passes.options.switches import switch_off
from hexa_fx.passes.partition.plan_layers import PartitionConfig, Strategy
from hexa_fx.passes.preconditions.unreadable import is_elsewhere
from hexa_fx.passes.rewrite.input_guards import in_own_dtypes
from hexa_fx.report import OptimizationReport, with_compute, with_forwards, with_plan
from hexa_fx.routing.sites import find_sites
from hexa_fx.runtime.forward import HexaForward
from hexa_fx.runtime.install import install, installed_forward, uninstall
from hexa_fx.runtime.preflight import called_in, check_model, check_values
from hexa_fx.runtime.refused import RefusedKind
from hexa_fx.runtime.sampled_check import SampledCheck
from hexa_fx.runtime.saved_alone import as_before, follow
from hexa_fx.runtime.slots import PUT_ON
from hexa_fx.runtime.warmup import request_kernels_of_steps
from hexa_fx.sources import peft
from hexa_fx.sources.loaded import adopt_loaded
from hexa_fx.sources.packed_parameters import collecting
from hexa_fx.specialise import Specialiser, undisturbed
from hexa_fx.spread import Spread
from hexa_fx.tracing import tracing
from hexa_fx.undo import whole_or_not_at_all

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger(__name__)
Model = TypeVar("Model", bound=nn.Module)


def optimize(model: Model, example_inputs: ExampleInputs | None = None, config: HexaConfig | None = None) -> Model:
    """Returns a new model whose MoE blocks run on expert-specific operators; ``model`` itself keeps its code.

    The new model has the same class, parameter names and ``state_dict``, and shares parameters and buffers with ``model``. It
    carries ``.report`` (`hexa_fx.report.OptimizationReport`) and ``.graphs`` (`hexa_fx.graphs.Graphs`), or ``.hexa_report`` and
    ``.hexa_graphs`` where the model already has attributes of those names. A block that cannot be rewritten keeps running its
    own code; if that is true of all blocks, a warning says why. To spread experts over devices, which cuts parameters, use
    `optimize_`.

    Args:
        model: any module that contains MoE blocks.
        example_inputs: arguments of one call: a tensor, a tuple or list of positional arguments, or a mapping of keyword
            arguments, on the model's device. Any size will do. Without an example the model is analysed when it is first called;
            with one it is analysed at once, so that there is a report before. Either way calls of another kind (mode, dtypes,
            autocast, settings) are analysed when they come.
        config: options; by default `HexaConfig.from_environment()`.

    Raises:
        InputError: an argument is of no use, or the model has to be prepared differently (it is compiled, scripted or already
            optimized).
        NothingRewritten: with ``strict``, no block was rewritten.
        VerificationError: with ``strict``, a rewritten block differs from its original.
        Exception: whatever the model raises on the example inputs.
    """
    check_model(model)
    made = optimize_(sharing_copy(model), example_inputs, config)
    follow(model, made)
    return made


@collecting
@collections_are_cheap()
@compiled_as_python()
def optimize_(
    model: Model,
    example_inputs: ExampleInputs | None = None,
    config: HexaConfig | None = None,
    *,
    mesh: DeviceMesh | None = None,
    strategy: Strategy = "auto",
    capacities: Literal["measure"] | Sequence[float] | None = "measure",
    partition: PartitionConfig | None = None,
    data_mesh: DeviceMesh | None = None,
) -> Model:
    """Does what `optimize` does, but in place, and returns ``model`` itself. With a mesh it also spreads the experts over devices.

    With a mesh, every rank calls it with the same model and inputs, before any optimizer, DDP or FSDP2 is built. Expert weights
    are then cut into shards by device speed, and the blocks exchange tokens or weights (docs/partition.md). The running session
    is ``model.partition`` (``.hexa_partition`` where that name is taken); ``model.report`` shows its plan. The example inputs
    stand for the global batch: unless ``partition`` says otherwise, their first dimension is the batch that is shared out.

    Args:
        model, example_inputs, config: as for `optimize`.
        mesh: one-dimensional device mesh to spread the MoE blocks over, or one axis of a larger mesh, ``mesh["hexa"]``, whose
            equal shares are then DTensors; None for one device.
        strategy: ``"data"`` (weights travel), ``"model"`` (tokens travel), ``"fsdp"`` (weights travel, by torch's FSDP2 on the
            rewritten blocks), ``"auto"`` (whichever is cheapest for a layer), or a mapping from block path to one of these.
        capacities: seconds that each device takes for the same task, ``"measure"`` to time the experts on each, or None if
            all devices are alike.
        partition: everything else about the partition, such as the global batch, cache slots and who averages gradients.
        data_mesh: the data-parallel axes of that larger mesh. Given, counts, sums and checkpoints of the session are over these
            too; else they are left to FSDP2, which averages over them.

    Raises:
        InputError: as for `optimize`; or an argument about the partition was given without a mesh.
        PlanError: the blocks cannot be partitioned as asked, or no block was rewritten.
        NothingRewritten, VerificationError: as for `optimize`.
        Exception: as for `optimize`. Whatever ends the call, ctrl-C too, the model then runs its own code as before; cut over
            devices it may be left in parts.
    """
    check_model(model)
    config = _checked(config)
    if example_inputs is not None:
        check_values(model)
    spread = Spread(mesh, strategy, capacities, partition, data_mesh)
    spread.check(example_inputs)
    if config.skip.strip() == "*" and mesh is None:
        attach(model, "report", OptimizationReport(()))
        return model
    if example_inputs is not None or mesh is not None:
        _optimize(model, example_tokens(model) if example_inputs is None else example_inputs, config, spread)
        return model
    called = called_in(model)
    put_on(called, _at_first_call if called is model else partial(_at_first_call, wrapper=model), config)
    attach(model, "report", OptimizationReport((), waiting=True))
    return model


def _at_first_call(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    config: HexaConfig,
    wrapper: nn.Module | None = None,
) -> None:
    """Analyses a model on its first call: on its shadow, as other threads may call its parts, if its weights are all here.

    ``wrapper``: what was optimized, if the model is inside of a data parallel wrapper.
    """
    beside = None
    if is_elsewhere(model):
        take_off(model)
    else:
        beside = shadow_of(model, frozenset({*PUT_ON, "report"}), own_forward(model))
    with undisturbed(), collections_are_cheap(), compiled_as_python():
        _optimize(model, Call(args, kwargs), config, Spread(None, "auto", "measure", None, None), beside)
    if wrapper is not None:
        attach(wrapper, "report", attached(model, "report"))
        attach(wrapper, "graphs", attached(model, "graphs"))


def _optimize(
    model: nn.Module, example_inputs: ExampleInputs, config: HexaConfig, spread: Spread, beside: nn.Module | None = None
) -> None:
    """Analyses a model, or another one that is like it, and installs what was found."""
    adopt_loaded(model)
    inspector, alone = Inspector(), spread.mesh is None
    with (
        torch.inference_mode(False),
        tracing() as trace,
        kernels_requested(config.compute),
        whole_or_not_at_all(model),
    ):
        most = config.probe_tokens if isinstance(example_inputs, Call) else None
        found = analyse_model(beside or model, example_inputs, config, inspector, not alone, most).of(model)
        if config.strict and (error := _complaint(found)):
            trace.finish(found.report)
            raise error
        if alone:
            report = _install_all(model, found, config)
        else:
            sites = _sites_of_whole(model, found, config)
            with listening(inspector.see):
                session = spread.apply(model, found, example_inputs, config, partial(_with_options, config=config))
            for path, known in sites.items():
                if (forward := installed_forward(model.get_submodule(path))) is not None:
                    forward.sites = known
            attach(model, "partition", session)
            report = with_compute(with_plan(found.report, session.plan, inspector.partitioned), _asked(found, config))
        graphs = Graphs.of(found.analyses, inspector)
        attach(model, "report", report)
        attach(model, "graphs", graphs)
        if alone:
            ranks = peft.hand_over_in(model)
            find_sites(model, found.around, {block.path: block.same_as for block in report.blocks}, found.effects)
            request_kernels_of_sources(report.blocks, ranks)
        trace.finish(report, graphs)
    _announce(report)


def _install_all(model: nn.Module, found: ModelAnalysis, config: HexaConfig) -> OptimizationReport:
    """Installs what was found, and returns the report of it. Refused blocks are analysed again in calls of another kind."""
    if any(not analysis.path for analysis in found.analyses):
        take_off(model)
    specialiser = Specialiser(config, finished, found.cache)
    forms, installed, said = _finished_forms(found, config), dict[str, HexaForward](), dict[str, str]()
    for analysis in found.analyses:
        block, form = model.get_submodule(analysis.path), forms.get(analysis.path)
        if form is not None:
            said[analysis.path] = _added_error(block, analysis, form, found) or _said([form], config)
        if form is not None or analysis.reads:
            installed[analysis.path] = install(block, form, path=analysis.path, analyst=specialiser)
        if form is None and analysis.refusal is not None and analysis.reads:
            example = found.calls[analysis.path]
            reads = () if analysis.settled else analysis.reads
            refuse = RefusedKind(block, *example, analysis.refusal.reason, reads, enough=config.probe_tokens)
            installed[analysis.path].refuse(refuse)
    for path in found.waiting:
        installed[path] = install(model.get_submodule(path), path=path, analyst=specialiser)
    for forward in installed.values() if config.check_every else ():
        forward.sampled = SampledCheck(config.check_every, config.strict)
    request_kernels_of_steps(model, found.unusual_examples)
    waiting = tuple(BlockReport(path, "waiting") for path in found.waiting)
    report = with_compute(found.report, said, _never_small(forms))
    report = replace(report, found=(*report.found, *waiting), later=specialiser.reports)
    return with_forwards(report, installed)


def _sites_of_whole(
    model: nn.Module, found: ModelAnalysis, config: HexaConfig
) -> dict[str, dict[bool, RoutingSite | str]]:
    """Where the experts of every block are chosen, by path. Tried before weights are cut, when a call needs no other ranks."""
    made = {path: [finished(form, config) for form in forms.values()] for path, forms in found.forms.items()}
    installed = {path: install(model.get_submodule(path), *forms) for path, forms in made.items()}
    find_sites(model, found.around, {block.path: block.same_as for block in found.report.blocks}, found.effects)
    for path in installed:
        uninstall(model.get_submodule(path))
    return {path: forward.sites for path, forward in installed.items()}


def _finished_forms(found: ModelAnalysis, config: HexaConfig) -> dict[str, RewrittenBlock]:
    """The rewritten blocks as they are installed on one device, by path."""
    return {a.path: finished(a.rewritten, config) for a in found.rewritten if a.rewritten is not None}


def _never_small(forms: Mapping[str, RewrittenBlock]) -> set[str]:
    """Paths of the blocks that run their own code for no size of their inputs."""
    return {path for path, form in forms.items() if not any(form.small)}


def finished(block: RewrittenBlock, config: HexaConfig) -> RewrittenBlock:
    """The block as it is installed on one device, for calls in its dtypes."""
    return in_own_dtypes(_with_options(block, config))


def _with_options(block: RewrittenBlock, config: HexaConfig) -> RewrittenBlock:
    return in_fp8(fix_order(switch_off(block, config), config), config)


def _added_error(block: nn.Module, analysis: BlockAnalysis, form: RewrittenBlock, found: ModelAnalysis) -> str:
    """What is said of a block's compute: the error that it adds. Empty if it computes exactly."""
    if analysis.rewritten is None or not computes_in_fp8(form):
        return ""
    return added_error(block, analysis.rewritten, form, found.calls[analysis.path])


def _said(forms: Collection[RewrittenBlock], config: HexaConfig) -> str:
    """What is said of the compute of a block's finished forms, without what it adds to outputs; empty if nothing was asked for."""
    if config.batch_invariant:
        return SAID if all(map(is_fixed, forms)) else NOT_FIXED
    return "multiplies in FP8" if any(map(computes_in_fp8, forms)) else ""


def _asked(found: ModelAnalysis, config: HexaConfig) -> dict[str, str]:
    """What is said of the compute of blocks that are spread."""
    if config.compute == "native":
        return {}
    said = f"asked to multiply in {config.compute}; the error that this adds is not measured on blocks that are spread"
    return {analysis.path: said for analysis in found.rewritten}


@collecting
@collections_are_cheap()
@compiled_as_python()
def explain(
    model: nn.Module, example_inputs: ExampleInputs | None = None, config: HexaConfig | None = None
) -> OptimizationReport:
    """Reports what `optimize` would rewrite, and why it would leave the rest alone. The model is not changed.

    Args:
        model, example_inputs, config: as for `optimize`; ``strict`` has no effect.

    Raises:
        InputError: as for `optimize`.
        Exception: whatever the model raises on the example inputs.
    """
    check_model(model)
    config = _checked(config)
    example_inputs = example_tokens(model) if example_inputs is None else example_inputs
    with torch.inference_mode(False), tracing() as trace, as_before(model):
        found = analyse_model(model, example_inputs, config, Inspector())
        forms = _finished_forms(found, config)
        said = {path: _said([form], config) for path, form in forms.items()}
        report = with_compute(found.report, said, _never_small(forms))
        trace.finish(report)
    return report


def _checked(config: HexaConfig | None) -> HexaConfig:
    if not isinstance(config, HexaConfig | None):
        raise InputError(f"config is a {type(config).__name__}; expected a hexa_fx.HexaConfig")
    return config or HexaConfig.from_environment()


def _complaint(found: ModelAnalysis) -> HexaError | None:
    """What ``strict`` raises, if anything: a block that differs, or no block at all."""
    for analysis in found.analyses:
        if analysis.check is not None and not analysis.check.ok:
            return VerificationError(analysis.check.reason, path=analysis.path)
    return None if found.rewritten or found.waiting else NothingRewritten(f"{found.report}")


def _announce(report: OptimizationReport) -> None:
    if report.rewritten or any(b.status == "waiting" for b in report.blocks) or (report.blocks and not report.refused):
        if log.isEnabledFor(logging.INFO):  # it checks every block's conditions
            log.info("%s", report.summary())
    else:
        log.warning("hexa_fx rewrote nothing: %s", report)
