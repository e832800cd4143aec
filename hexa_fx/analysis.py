"""Every MoE block of a model, analysed: what `hexa_fx.optimize` installs and `hexa_fx.explain` reports."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hexa_fx.capture.host import namespaces_of
from hexa_fx.capture.observe import Candidate, Observation, observe, with_ancestors
from hexa_fx.capture.probes import probe_inputs
from hexa_fx.capture.side_effects import SideEffects
from hexa_fx.config import HexaConfig
from hexa_fx.describe import describe
from hexa_fx.errors import InputError
from hexa_fx.example_tokens import ExampleTokens
from hexa_fx.inspection.inspector import Inspector
from hexa_fx.ir import NEVER_SMALL, PythonRead, Refusal
from hexa_fx.isolation.torch_state import autocast_off
from hexa_fx.isolation.written_tensors import gradients_kept
from hexa_fx.observers import Listener, PassEvent, listening
from hexa_fx.passes import analyse, refused
from hexa_fx.passes.block_analysis import MODES, BlockAnalysis
from hexa_fx.passes.detect.free_body import FreeBody
from hexa_fx.passes.kernel_requests import kernels_requested
from hexa_fx.passes.memory.same_memory import in_same_memory, why_not_parted
from hexa_fx.passes.modes.autocast import with_dtypes
from hexa_fx.passes.modes.same_run import in_mode
from hexa_fx.passes.preconditions.unreadable import why_hidden
from hexa_fx.passes.structure import StructureCache, moved_to
from hexa_fx.progress import Bar, progress
from hexa_fx.report import OptimizationReport
from hexa_fx.runtime.linear_lora import LinearLora, taken_off
from hexa_fx.runtime.stacked_codes import reads_codes
from hexa_fx.runtime.warmup import Example
from hexa_fx.sources import linear4bit
from hexa_fx.sources.packed_parameters import unpacked

ExampleInputs: TypeAlias = torch.Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]


@dataclass(frozen=True)
class ModelAnalysis:
    """What the passes made of a model.

    Args:
        analyses: one for every block that looked like MoE, in model order.
        report: the same for people to read.
        examples: an example call, by path, of every rewritten block that is not identical to an earlier one.
        around: calls of every rewritten block and of the modules around it, innermost first, by the block's path.
        effects: what code reaches outside of modules, as it was before.
    """

    analyses: tuple[BlockAnalysis, ...]
    report: OptimizationReport
    examples: Mapping[str, Example]
    around: Mapping[str, Sequence[Observation]]
    effects: SideEffects

    @property
    def rewritten(self) -> list[BlockAnalysis]:
        """The blocks that can be replaced."""
        return [analysis for analysis in self.analyses if analysis.rewritten]

    @property
    def unusual_examples(self) -> dict[str, Example]:
        """Of `examples`, those of blocks with a region that is no `hexa::moe_ffn`, whose kernels only a run shows."""
        unusual = {
            analysis.path
            for analysis in self.rewritten
            if analysis.match and any(isinstance(region.body, FreeBody) for region in analysis.match.regions)
        }
        return {path: example for path, example in self.examples.items() if path in unusual}


def analyse_model(
    model: nn.Module,
    example_inputs: ExampleInputs,
    config: HexaConfig,
    inspector: Inspector,
    factors: bool = True,
) -> ModelAnalysis:
    """Runs the model once on the example inputs and takes every block that looks like MoE through the passes.

    What these runs append to lists, put into objects or count is taken out again. Caches and counts stay if rewritten blocks read
    some of them in every call. Autocast is off in these runs: what blocks give under it is found out for each of its dtypes
    (`hexa_fx.passes.modes.autocast`), and rounding would hide what is compared.

    Args:
        factors: whether rewritten blocks may be given low-rank additions to listed weights at run time. If not, adapters that
            are there are a part of the experts' code.
    """
    factors = factors and config.compute == "native"
    effects = SideEffects(model, namespaces_of(model))
    found: ModelAnalysis | None = None
    try:
        with autocast_off() as was_on, gradients_kept(model):
            how = " with torch.autocast off" if was_on else ""
            found = _analyse_model(model, example_inputs, config, inspector, factors, how, effects)
            return found
    finally:
        effects.undo_but_for(relied_on(model, found.rewritten if found else ()))


def _analyse_model(
    model: nn.Module,
    example_inputs: ExampleInputs,
    config: HexaConfig,
    inspector: Inspector,
    factors: bool,
    how: str,
    effects: SideEffects,
) -> ModelAnalysis:
    started = time.perf_counter()
    args, kwargs = call_arguments(example_inputs)
    cache = StructureCache()
    analyses, reports = [], []
    examples: dict[str, Example] = {}
    around: dict[str, Sequence[Observation]] = {}
    with progress("analysing MoE blocks", 1) as bar:
        bar.say("the model runs on the example inputs")
        made = isinstance(example_inputs, ExampleTokens)
        what = (
            "tokens made by its configuration (give example_inputs if it needs others)"
            if made
            else "the example inputs"
        )
        candidates = _observe(model, args, kwargs, what + how, effects)
        bar.total, shared = len(candidates), in_same_memory(model)
        for candidate in candidates:
            block = candidate.levels[0]
            if parted := why_not_parted(block.module, shared):
                candidate = replace(candidate, reason=parted)
            with listening(*_stages(bar)):
                analysis, same_as = _analyse_candidate(candidate, config, cache, factors)
            analyses.append(analysis := analysis.placed_in(model.get_submodule(analysis.path)))
            reports.append(describe(analysis, same_as, inspector))
            if analysis.rewritten:
                paths = set(with_ancestors(analysis.path))
                around[analysis.path] = [seen for seen in candidate.around if seen.path in paths]
            if analysis.rewritten and same_as is None:
                at_path = (seen for seen in candidate.levels if seen.path == analysis.path)
                examples |= {seen.path: (seen.args, seen.kwargs) for seen in at_path}
            bar.advance()
    report = OptimizationReport(tuple(reports), time.perf_counter() - started)
    return ModelAnalysis(tuple(analyses), report, examples, around, effects)


def relied_on(model: nn.Module, rewritten: Sequence[BlockAnalysis]) -> Iterator[tuple[nn.Module, PythonRead]]:
    """What rewritten blocks read from Python in every call, each with its block."""
    for analysis in rewritten:
        forms = analysis.rewritten.values()
        yield from ((model.get_submodule(analysis.path), read) for form in forms for read in form.reads)


def _stages(bar: Bar) -> list[Listener]:
    """What tells the bar which block is in which pass; nothing where there is no bar."""

    def see(event: PassEvent) -> None:
        if event.when == "before" and event.mode:
            bar.say(f"{event.path or 'the model'}: {event.name} ({event.mode})")

    return [see] if bar.shown else []


def _observe(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], what: str, effects: SideEffects
) -> list[Candidate]:
    try:
        return observe(model, args, kwargs, effects.restore)
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
    """Analyses a candidate's levels from the inside out: the first that can be rewritten in both modes, else in one, else the
    innermost refusal of a module that chooses. What a module is given may hold more than what it chose from, as weights of all
    experts do, or less, as sorted rows do.

    Also returns the path of the identical block whose analysis was reused, if there was one.
    """
    if candidate.reason:
        block = candidate.levels[0]
        hidden = why_hidden(block.module)
        return refused(Refusal(block.path, hidden or candidate.reason, None if hidden else candidate.location)), None
    best: tuple[BlockAnalysis, str | None] | None = None
    for observation in candidate.levels:
        found = _analyse_level(observation, config, cache, factors)
        more = best is None or len(found[0].rewritten) > len(best[0].rewritten)
        if best is None or more or (best[0].elsewhere and not found[0].elsewhere):
            best = found
        if found[0].settled or len(best[0].rewritten) == len(MODES):
            break
    assert best is not None
    return best


def _analyse_level(
    observation: Observation, config: HexaConfig, cache: StructureCache, factors: bool
) -> tuple[BlockAnalysis, str | None]:
    """Without LoRA that is handed over at run time, whatever is active then; else with it as a part of the code."""
    with taken_off(observation.module) if factors else nullcontext(frozenset[str]()) as paths:
        found = _analyse_known(observation, config, cache)
    forms = found[0].rewritten
    lora = LinearLora.of(*forms.values())
    if not paths or (len(forms) == len(MODES) and all(map(lora.reaches, paths))):
        return found
    return _analyse_known(observation, config, cache)


def _analyse_known(
    observation: Observation, config: HexaConfig, cache: StructureCache
) -> tuple[BlockAnalysis, str | None]:
    known = cache.find(observation)
    if known is not None:
        return moved_to(known, observation.path), known.path
    analysis = _analyse_dense(observation, config)
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
    for form in analysis.rewritten.values():
        if reason := linear4bit.why_not_in(module, form, analysis.reads):
            return refused(Refusal(observation.path, reason))
    if not packed + replaced:
        return analysis
    kinds = partial(linear4bit.with_kinds, module)
    rewritten = analysis.with_forms(lambda form: replace(form, reads=kinds(form.reads)))
    if packed or any(reads_codes(module, weight) for form in rewritten.values() for weight in form.packed):
        rewritten = {mode: replace(form, small=NEVER_SMALL) for mode, form in rewritten.items()}  # its own code unpacks
    if replaced:  # modules of codes give other dtypes under autocast than dense ones
        args, kwargs = probe_inputs(observation.args, observation.kwargs, config.probe_tokens)
        for mode, form in rewritten.items():
            with in_mode(module, mode == "train"), linear4bit.trained(module):
                rewritten[mode] = with_dtypes(module, analysis.captured[mode], form, args, kwargs)
    return replace(analysis, rewritten=rewritten, reads=kinds(analysis.reads))


def _dtype_of_rows(observation: Observation) -> torch.dtype | None:
    """Of the first floating tensor that a block is given."""
    leaves = pytree.tree_leaves((observation.args, observation.kwargs))
    return next((t.dtype for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point()), None)


def call_arguments(example_inputs: ExampleInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of the call that ``example_inputs`` stands for.

    Raises:
        InputError: it is text, or something that yields examples, such as a data loader.
    """
    if isinstance(example_inputs, torch.utils.data.DataLoader | Iterator):
        raise InputError(
            f"example_inputs is a {type(example_inputs).__name__}; expected what the model is called with once, such as "
            "next(iter(loader))"
        )
    if isinstance(example_inputs, str):
        raise InputError(
            f"example_inputs is {example_inputs!r}; expected a tensor, a tuple of positional arguments, or a mapping of keywords"
        )
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    return (example_inputs,), {}
