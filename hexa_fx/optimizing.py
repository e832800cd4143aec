"""Analyses a model, or a part of it when that is first called, and installs the rewritten blocks."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.fx
from torch import nn

from hexa_fx.analysis import ModelAnalysis, analyse_model
from hexa_fx.attached import attach
from hexa_fx.capture.host import compiled_as_python
from hexa_fx.config import HexaConfig
from hexa_fx.errors import HexaError, NothingRewritten, VerificationError, kind_and_line
from hexa_fx.example_inputs import Call, ExampleInputs
from hexa_fx.first_call import let_go
from hexa_fx.graphs import BlockGraphs, Graphs
from hexa_fx.inspection.block_report import BlockReport
from hexa_fx.inspection.inspector import Inspector
from hexa_fx.ir import RewrittenBlock, RoutingSite
from hexa_fx.isolation.module_tree import inside
from hexa_fx.isolation.shadow import PUT_ON, shadow_of
from hexa_fx.observers import listening
from hexa_fx.passes.block_analysis import BlockAnalysis, StructureCache
from hexa_fx.passes.kernel_requests import kernels_requested
from hexa_fx.passes.options import (
    NOT_FIXED,
    SAID,
    added_error,
    computes_in_fp8,
    fix_order,
    in_fp8,
    is_fixed,
    switch_off,
)
from hexa_fx.passes.preconditions import is_elsewhere
from hexa_fx.passes.rewrite import in_own_dtypes
from hexa_fx.report import OptimizationReport, with_compute, with_forwards, with_plan
from hexa_fx.routing.sites import find_sites
from hexa_fx.runtime.call_kinds import RefusedKind
from hexa_fx.runtime.forward import Analyst, HexaForward
from hexa_fx.runtime.install import install, installed_forward, is_installed, uninstall
from hexa_fx.runtime.sampled_check import SampledCheck
from hexa_fx.source_kernels import request_kernels_of_sources
from hexa_fx.sources import peft
from hexa_fx.sources.garbage import collected_after
from hexa_fx.sources.loaded import adopt_loaded
from hexa_fx.specialise import Specialiser, undisturbed
from hexa_fx.spread import Spread
from hexa_fx.tracing import tracing
from hexa_fx.undo import whole_or_not_at_all

if TYPE_CHECKING:
    from hexa_fx.passes.partition.install import Installed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """What is analysed of a model.

    Args:
        path: where it lies in the model that is optimized; empty for the model itself.
        later: where blocks are reported that are analysed when they are called.
        cache, graphs: analyses of other parts, which hold for blocks like theirs, and what people read of them. Copies and pickles
            begin anew.
    """

    path: str = ""
    later: dict[str, BlockReport] = field(default_factory=dict)
    cache: StructureCache = field(default_factory=StructureCache)
    graphs: dict[torch.fx.Graph, BlockGraphs] = field(default_factory=dict)

    def own(self, path: str | None) -> str | None:
        """A path in the model as the part has it; None if it lies in another one."""
        within = f"{self.path}." if self.path else ""
        return path.removeprefix(within) if path is not None and path.startswith(within) else None

    def __reduce__(self) -> tuple[Any, ...]:
        return Part, (self.path, self.later)


ONE_DEVICE = Spread(None, "auto", "measure", None, None)


def at_first_call(
    module: nn.Module,
    path: str,
    own_forward: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    config: HexaConfig,
    model: Part,
    graphs: Graphs,
    around: Sequence[nn.Module],
) -> None:
    """Analyses a model, or a part of it, on its first call: on its shadow, as other threads may call its parts, if its weights are
    all here.

    Args:
        model, graphs: to which what is found in a part is added.
        around: the data parallel wrapper that was optimized, if the model is inside of one.
    """
    part, beside = replace(model, path=path), None
    try:
        with undisturbed(), collected_after(module), compiled_as_python():
            # here, since the parameters of a shadow may want gradients, too
            if is_elsewhere(module):
                let_go(module)
            else:
                beside = shadow_of(module, frozenset({*PUT_ON, "report", "graphs"}), own_forward)
            found, made = analyse_and_install(module, Call(args, kwargs), config, ONE_DEVICE, beside, part)
    except Exception as error:
        why = f"its first call could not be analysed: {kind_and_line(error)}"
        for each in (module, *around) if not path else ():
            attach(each, "report", OptimizationReport((), later=model.later, unseen=why))
        raise
    graphs.add(made, path)
    if path:
        model.later.update({block.path: block for block in found.found})
        return
    for each in (module, *around):
        attach(each, "report", found)
        attach(each, "graphs", graphs)


def analyse_and_install(
    model: nn.Module,
    example_inputs: ExampleInputs,
    config: HexaConfig,
    spread: Spread,
    beside: nn.Module | None = None,
    part: Part | None = None,
) -> tuple[OptimizationReport, Graphs]:
    """Analyses a model, or the one ``beside`` it that is like it, and installs what was found.

    Raises:
        NothingRewritten, VerificationError: with ``strict``, as `hexa_fx.optimize`.
    """
    waits, part = part is not None, part or Part()
    adopt_loaded(model)
    inspector, alone = Inspector(), spread.mesh is None
    with (
        torch.inference_mode(False),
        tracing() as trace,
        kernels_requested(config.compute),
        whole_or_not_at_all(model, waits),
    ):
        most = config.probe_tokens if isinstance(example_inputs, Call) else None
        found = analyse_model(
            beside or model, example_inputs, config, inspector, not alone, most, part.cache.within(part.path)
        ).of(model)
        if config.strict and (error := _complaint(found, part)):
            trace.finish(found.report)
            raise error
        if alone:
            report = _install_all(model, found, config, part)
        else:
            sites = _sites_of_whole(model, found, config)
            with listening(inspector.see):
                analyst = partial(_analyst_of_spread, part=part, config=config, written=frozenset(found.written))
                session = spread.apply(
                    model, found, example_inputs, config, partial(_with_options, config=config), analyst
                )
            installed = {path: forward for path in sites if (forward := installed_forward(model.get_submodule(path)))}
            for path, forward in installed.items():
                forward.sites = sites[path]
            attach(model, "partition", session)
            report = with_compute(with_plan(found.report, session.plan, inspector.partitioned), _asked(found, config))
            report = with_forwards(report, installed, model)
        graphs = Graphs.of(found.analyses, inspector, part.graphs)
        if alone:
            peft.tell_of_tuners(request_kernels_in)
            ranks = peft.hand_over_in(model)
            same = {block.path: part.own(block.same_as) for block in found.report.blocks}
            find_sites(model, found.around, same, found.effects)
            request_kernels_of_sources(report.blocks, ranks)
        trace.finish(report, graphs)
    _announce(report, part)
    return report, graphs


def request_kernels_in(model: nn.Module) -> None:
    """Requests what the rewritten blocks of a model launch for weights and adapters that came after they were rewritten."""
    held = [value for module in model.modules() for value in vars(module).values()]
    blocks = [block for value in held if isinstance(value, OptimizationReport) for block in value.blocks]
    request_kernels_of_sources(blocks, peft.hand_over_in(model))


def _install_all(model: nn.Module, found: ModelAnalysis, config: HexaConfig, part: Part) -> OptimizationReport:
    """Installs what was found, and returns the report of it. Refused blocks are analysed again in calls of another kind."""
    specialiser = Specialiser(
        config, finished, part.cache, part.later, frozenset(inside(part.path, path) for path in found.written)
    )
    forms, installed, said = _finished_forms(found, config), dict[str, HexaForward](), dict[str, str]()
    analyses = [each for each in found.analyses if not is_installed(model.get_submodule(each.path))]
    for analysis in analyses:
        block, form = model.get_submodule(analysis.path), forms.get(analysis.path)
        let_go(block)
        if form is not None:
            said[analysis.path] = _added_error(block, analysis, form, found) or _said([form], config)
        if form is not None or analysis.reads:
            name = inside(part.path, analysis.path)
            installed[analysis.path] = install(block, form, path=name, analyst=specialiser)
        if form is None and analysis.refusal is not None and analysis.reads:
            example = found.calls[analysis.path]
            reason, reads = analysis.refusal.reason, analysis.reads
            installed[analysis.path].refuse(RefusedKind(block, *example, reason, reads, enough=config.probe_tokens))
    for waiting, around in found.waiting.items():
        installed[waiting] = install(model.get_submodule(waiting), path=inside(part.path, waiting), analyst=specialiser)
        installed[waiting].around = around
    for forward in installed.values() if config.check_every else ():
        forward.sampled = SampledCheck(config.check_every, config.strict)
    report = with_compute(found.report, said, _never_small(forms))
    blocks = (*report.found, *(BlockReport(waiting, "waiting") for waiting in found.waiting))
    report = with_forwards(replace(report, found=blocks, later=part.later), installed, model)
    return report.inside(part.path)


def _analyst_of_spread(installed: Installed, part: Part, config: HexaConfig, written: frozenset[str]) -> Analyst:
    from hexa_fx.spread_calls import SpreadSpecialiser  # here, since it loads DTensor

    return SpreadSpecialiser(installed, config, finished, part.cache, part.later, written)


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


def as_finished(found: ModelAnalysis, config: HexaConfig) -> OptimizationReport:
    """What would be installed on one device."""
    forms = _finished_forms(found, config)
    return with_compute(
        found.report, {path: _said([form], config) for path, form in forms.items()}, _never_small(forms)
    )


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


def _complaint(found: ModelAnalysis, part: Part) -> HexaError | None:
    """What ``strict`` raises, if anything: a block that differs, or no block at all in the whole model."""
    for analysis in found.analyses:
        if analysis.check is not None and not analysis.check.ok:
            return VerificationError(analysis.check.reason, path=analysis.path)
    return None if found.rewritten or found.waiting or part.path else NothingRewritten(f"{found.report}")


def _announce(report: OptimizationReport, part: Part) -> None:
    if part.path and not report.found:
        return
    if report.rewritten or any(b.status == "waiting" for b in report.blocks) or (report.blocks and not report.refused):
        if log.isEnabledFor(logging.INFO):  # it checks every block's conditions
            log.info("%s", report.summary())
    else:
        log.warning("hexa_fx rewrote nothing: %s", report)
