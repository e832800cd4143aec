"""Every MoE block of a model, analysed: what `hexa_fx.optimize` installs and `hexa_fx.explain` reports."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hexa_fx.capture.observe import Candidate, Observation, observe
from hexa_fx.capture.probes import probe_inputs
from hexa_fx.config import HexaConfig
from hexa_fx.describe import describe
from hexa_fx.example_inputs import ExampleInputs, call_arguments
from hexa_fx.example_tokens import ExampleTokens
from hexa_fx.inspection.inspector import Inspector
from hexa_fx.ir import NEVER_SMALL, Refusal, RewrittenBlock
from hexa_fx.isolation.contents import Sandbox
from hexa_fx.isolation.module_tree import with_ancestors
from hexa_fx.isolation.size import float64_bytes
from hexa_fx.isolation.torch_state import autocast_off, autocast_uncached, one_thread, random_state_kept, training_mode
from hexa_fx.isolation.written_tensors import gradients_kept
from hexa_fx.lora import LinearLora, taken_off
from hexa_fx.observers import Listener, PassEvent, listening
from hexa_fx.passes import NotRecorded, analyse
from hexa_fx.passes.block_analysis import BlockAnalysis, Mode, StructureCache, mode_of, moved_to, refused
from hexa_fx.passes.kernel_requests import kernels_requested
from hexa_fx.passes.preconditions import is_elsewhere, why_hidden, why_partitioned
from hexa_fx.passes.rewrite.autocast import under_any_autocast, under_this_autocast
from hexa_fx.progress import Bar, progress
from hexa_fx.report import OptimizationReport
from hexa_fx.runtime.listed_experts import reads_codes
from hexa_fx.sources import linear4bit
from hexa_fx.sources.packed_parameters import unpacked

_LITTLE = 1 << 26
"""Bytes of a block's weights in float64 below which its operations are too small for several threads."""


@dataclass(frozen=True)
class ModelAnalysis:
    """What the passes made of a model.

    Args:
        analyses: one for every block that looked like MoE, in model order.
        report: the same for people to read.
        calls: (args, kwargs) of every block that was analysed, by path.
        around: calls of every rewritten block and of the modules around it, innermost first, by the block's path.
        effects: what code reaches outside of modules, as it was before.
        waiting: paths of blocks whose weights are elsewhere, until they are called, and of the modules around each that may be the
            block in its place.
        written: paths of blocks whose inputs are written to after the call.
        forms: what runs in each mode, by path, of blocks that are to be spread over devices.
    """

    analyses: tuple[BlockAnalysis, ...]
    report: OptimizationReport
    calls: Mapping[str, tuple[tuple[Any, ...], dict[str, Any]]]
    around: Mapping[str, Sequence[Observation]]
    effects: Sandbox
    waiting: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    written: frozenset[str] = frozenset()
    forms: Mapping[str, Mapping[Mode, RewrittenBlock]] = field(default_factory=dict)

    def of(self, model: nn.Module) -> ModelAnalysis:
        """The same of a model that is like the one that was analysed."""
        around = {
            path: [replace(seen, module=model.get_submodule(seen.path)) for seen in calls]
            for path, calls in self.around.items()
        }
        return replace(self, around=around)

    @property
    def rewritten(self) -> list[BlockAnalysis]:
        """The blocks that can be replaced."""
        return [analysis for analysis in self.analyses if analysis.rewritten is not None]


def analyse_model(
    model: nn.Module,
    example_inputs: ExampleInputs,
    config: HexaConfig,
    inspector: Inspector,
    spread: bool = False,
    most_tokens: int | None = None,
    cache: StructureCache | None = None,
) -> ModelAnalysis:
    """Runs the model once on the example inputs and takes every block that looks like MoE through the passes.

    Blocks are analysed as they are called: in the present mode, under the present autocast, in their dtypes. What these runs
    append to lists or put into objects is taken out again. Caches and counts behind global names stay, as after any call.

    Args:
        spread: whether blocks are to be spread over devices, after which no call can be analysed any more. They are then
            analysed in both modes and for any autocast, and adapters that are there are a part of the experts' code.
        most_tokens: of what a block is given that are kept as its example; None for all.
        cache: earlier analyses, which hold for blocks like theirs.
    """
    autocast: AbstractContextManager[object] = autocast_off() if spread else autocast_uncached()
    with Sandbox(model) as effects, autocast, gradients_kept(model):
        return _analyse_model(model, example_inputs, config, inspector, spread, effects, most_tokens, cache)


def _analyse_model(
    model: nn.Module,
    example_inputs: ExampleInputs,
    config: HexaConfig,
    inspector: Inspector,
    spread: bool,
    effects: Sandbox,
    most_tokens: int | None,
    known: StructureCache | None,
) -> ModelAnalysis:
    started = time.perf_counter()
    args, kwargs = call_arguments(example_inputs)
    cache, factors = known or StructureCache(), not spread and config.compute == "native"
    analyses, reports, waiting = [], [], dict[str, tuple[str, ...]]()
    forms: dict[str, Mapping[Mode, RewrittenBlock]] = {}
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    around: dict[str, Sequence[Observation]] = {}
    written: set[str] = set()
    with progress("analysing MoE blocks", 1) as bar:
        bar.say("the model runs on the example inputs")
        made = isinstance(example_inputs, ExampleTokens)
        what = (
            "tokens made by its configuration (give example_inputs if it needs others)"
            if made
            else "the example inputs"
        )
        unseen = why_partitioned(model)
        candidates = [] if unseen else _observe(model, args, kwargs, what, effects, most_tokens)
        bar.total = len(candidates)
        for candidate in candidates:
            block = candidate.levels[0]
            if config.skips(block.path):
                candidate = replace(candidate, reason="it is left out by HexaConfig(skip=...)")
            if not candidate.reason and is_elsewhere(block.module):
                waiting[block.path] = tuple(seen.path for seen in candidate.levels[1:])
                bar.advance()
                continue
            with listening(*_stages(bar)):
                analysis, same_as = _analyse_candidate(candidate, config, cache, factors)
                if spread and analysis.rewritten is not None:
                    forms[analysis.path] = _forms_of(candidate, analysis, same_as, config, cache, forms)
            analyses.append(analysis := analysis.placed_in(model.get_submodule(analysis.path)))
            reports.append(describe(analysis, same_as, inspector))
            written |= {seen.path for seen in candidate.levels if seen.written}
            calls |= {seen.path: (seen.args, seen.kwargs) for seen in candidate.levels if seen.path == analysis.path}
            if analysis.rewritten is not None:
                paths = set(with_ancestors(analysis.path))
                around[analysis.path] = [seen for seen in candidate.around if seen.path in paths]
            bar.advance()
    cache.forget_runs()
    report = OptimizationReport(tuple(reports), time.perf_counter() - started, unseen=unseen)
    return ModelAnalysis(tuple(analyses), report, calls, around, effects, waiting, frozenset(written), forms)


def _stages(bar: Bar) -> list[Listener]:
    """What tells the bar which block is in which pass; nothing where there is no bar."""

    def see(event: PassEvent) -> None:
        if event.when == "before" and event.mode:
            bar.say(f"{event.path or 'the model'}: {event.name} ({event.mode})")

    return [see] if bar.shown else []


def _observe(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    what: str,
    effects: Sandbox,
    most_tokens: int | None,
) -> list[Candidate]:
    try:
        return observe(model, args, kwargs, effects.restore, most_tokens)
    except Exception as error:
        given = ", ".join([*map(_kind, args), *(f"{name}={_kind(value)}" for name, value in kwargs.items())])
        error.add_note(f"hexa_fx called the model on {what}: {type(model).__name__}({given})")
        raise


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device}"
    return type(value).__name__


def _analyse_candidate(
    candidate: Candidate, config: HexaConfig, cache: StructureCache, factors: bool
) -> tuple[BlockAnalysis, str | None]:
    """Analyses a candidate's levels from the inside out: the first that can be rewritten, else the innermost refusal of a module
    that chooses. What a module is given may hold more than what it chose from, as weights of all experts do, or less, as sorted
    rows do.

    Also returns the path of the identical block whose analysis was reused, if there was one.
    """
    if candidate.reason:
        block = candidate.levels[0]
        hidden = why_hidden(block.module)
        return refused(Refusal(block.path, hidden or candidate.reason, None if hidden else candidate.location)), None
    best: tuple[BlockAnalysis, str | None] | None = None
    for observation in candidate.levels:
        found = analyse_level(observation, config, cache, factors)
        if best is None or found[0].rewritten is not None or (best[0].elsewhere and not found[0].elsewhere):
            best = found
        if found[0].settled or found[0].rewritten is not None:
            break
    assert best is not None
    return best


def _forms_of(
    candidate: Candidate,
    analysis: BlockAnalysis,
    same_as: str | None,
    config: HexaConfig,
    cache: StructureCache,
    known: Mapping[str, Mapping[Mode, RewrittenBlock]],
) -> Mapping[Mode, RewrittenBlock]:
    """What runs in each mode of a block that is to be spread, for any autocast; one form where it does not depend on the mode.

    Args:
        same_as: path of the identical block whose analysis was reused. known: forms of the blocks before, by path.
    """
    observation = next(seen for seen in candidate.levels if seen.path == analysis.path)
    block, forms = observation.module, dict[Mode, RewrittenBlock]()
    example = probe_inputs(observation.args, observation.kwargs, config.probe_tokens)
    for training in (block.training, not block.training)[: 1 if analysis.training is None else 2]:
        with training_mode(block, training), random_state_kept():
            found, like = _analyse_known(observation, config, cache) if forms else (analysis, same_as)
            mode, same = mode_of(block), known.get(like or "", {})
            if mode in same:
                forms[mode] = replace(same[mode], path=analysis.path)
            elif found.rewritten is not None and found.captured is not None:
                forms[mode] = under_any_autocast(block, found.captured, found.rewritten, *example)
    return forms


def analyse_level(
    observation: Observation, config: HexaConfig, cache: StructureCache, factors: bool
) -> tuple[BlockAnalysis, str | None]:
    """A block as it was called, without LoRA that is handed over at run time, whatever is active then; else with it as a part of
    the code. Also returns the path of the identical block whose analysis was reused, if there was one."""
    with one_thread() if float64_bytes(observation.module) < _LITTLE else nullcontext():
        with taken_off(observation.module) if factors else nullcontext(frozenset[str]()) as paths:
            found = _analyse_known(observation, config, cache)
        form = found[0].rewritten
        if not paths or (form is not None and all(map(LinearLora.of(form).reaches, paths))):
            return found
        return _analyse_known(observation, config, cache)


def _analyse_known(
    observation: Observation, config: HexaConfig, cache: StructureCache
) -> tuple[BlockAnalysis, str | None]:
    known = cache.find(observation)
    if known is not None:
        return moved_to(known, observation.path), known.path
    analysis = _analyse_dense(observation, config)
    if not isinstance(analysis.refusal, NotRecorded):
        cache.add(observation, analysis)
    return analysis, None


def _analyse_dense(observation: Observation, config: HexaConfig) -> BlockAnalysis:
    """Analyses a block with its packed weights in dense form."""
    module = observation.module
    try:
        with (
            unpacked(module) as packed,
            linear4bit.as_dense(module, _dtype_of_rows(observation)) as replaced,
            kernels_requested("") if packed + replaced else nullcontext(),
        ):
            analysis = analyse(observation, config)
    except linear4bit.OtherNumbers as error:
        return refused(Refusal(observation.path, str(error)))
    form = analysis.rewritten
    if form is None or analysis.captured is None:
        return analysis
    if reason := linear4bit.why_not_in(module, form, analysis.reads):
        return refused(Refusal(observation.path, reason))
    if not packed + replaced:
        return analysis
    kinds = partial(linear4bit.with_kinds, module)
    form = replace(form, reads=kinds(form.reads))
    if packed or any(reads_codes(module, weight) for weight in form.packed):
        form = replace(form, small=NEVER_SMALL)  # its own code unpacks
    if replaced:  # modules of codes give other dtypes under autocast than dense ones
        example = probe_inputs(observation.args, observation.kwargs, config.probe_tokens)
        with linear4bit.trained(module), random_state_kept():
            form = under_this_autocast(module, form, *example)
    return replace(analysis, rewritten=form, reads=kinds(analysis.reads))


def _dtype_of_rows(observation: Observation) -> torch.dtype | None:
    """Of the first floating tensor that a block is given."""
    leaves = pytree.tree_leaves((observation.args, observation.kwargs))
    return next((t.dtype for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point()), None)
