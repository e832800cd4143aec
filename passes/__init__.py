"""Takes one block through the passes. This module is their table of contents.

1. `hexa_fx.capture.capture`      what the block did on example inputs, as a straight-line graph
2. `hexa_fx.passes.canonicalize`  fused expressions, taken apart;
   `hexa_fx.passes.detect`        the MoE region in it, or a refusal;
   `hexa_fx.passes.cover`         nothing of the run is lost with it
3. `hexa_fx.passes.rewrite`       the region as one `hexa::moe_ffn` node (or, for an unusual expert, as expert-specific
                                  operators at once), the rest for any size and routing
4. `hexa_fx.passes.verify`        original against rewritten, forward and gradients, before anything is accepted;
                                  meanwhile kernels build (`hexa_fx.passes.kernel_requests`)
5. `hexa_fx.passes.options`       other operators in the node's place, where `HexaConfig` asks for them;
   `hexa_fx.passes.partition`     collectives, if experts are spread over devices; its `overlap` starts them early
6. `hexa_fx.passes.lowering`      the node as expert-specific operators, forward and backward, for a device; what runs

They are taken for one kind of call, with its mode, dtypes and autocast. A call of another kind is taken through them when it comes
(`hexa_fx.specialise`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

from torch.fx import Graph

from hexa_fx.capture import CapturedBlock, capture
from hexa_fx.capture.calls import raised_at
from hexa_fx.capture.observe import Observation
from hexa_fx.capture.overlooked import NOT_REACHED
from hexa_fx.capture.probes import overflow_inputs, overflow_sizes, probe_inputs
from hexa_fx.capture.record import Replacements, counted, other_numbers
from hexa_fx.config import HexaConfig
from hexa_fx.cuda.modes import torch_operators
from hexa_fx.errors import CaptureError
from hexa_fx.ir import NEVER_SMALL, PythonRead, Refusal, RewrittenBlock
from hexa_fx.isolation.lookup import number_at
from hexa_fx.isolation.plain_experts import as_set, in_plain_form
from hexa_fx.isolation.torch_state import random_state_kept
from hexa_fx.isolation.written_tensors import put_back
from hexa_fx.observers import announced, at_block, muted
from hexa_fx.passes.block_analysis import BlockAnalysis, mode_of, refused
from hexa_fx.passes.canonicalize import canonicalize_block
from hexa_fx.passes.cover import detect_all
from hexa_fx.passes.detect import MoEMatch
from hexa_fx.passes.detect.free import expert_dropouts
from hexa_fx.passes.detect.verdict import Refuse
from hexa_fx.passes.inputs.distinct_tokens import after_refusal, all_differ, examples, has_no_tokens, mostly_alike
from hexa_fx.passes.kernel_requests import request_kernels
from hexa_fx.passes.lowering.pipelines import CPU, CUDA
from hexa_fx.passes.memory import check_recorded, with_few_enough_tokens
from hexa_fx.passes.preconditions import (
    ASKED_FIRST,
    asks_first,
    depends_on_mode,
    refusal_of_host,
    why_not_finite,
    why_packed,
    why_unreadable,
)
from hexa_fx.passes.rewrite import not_on_nothing, rewrite_block
from hexa_fx.passes.rewrite.autocast import under_this_autocast
from hexa_fx.passes.verify import VerificationResult, verify_block, why_refused
from hexa_fx.passes.verify.cases import changes_itself, differs_on_nothing, settings_of, unlike
from hexa_fx.runtime.attribute_guards import called_in

log = logging.getLogger(__name__)

PASSES = {
    "capture": "the block runs once on the example and is recorded as a graph",
    "canonicalize": "fused expressions are taken apart",
    "detect": "the mixture of experts is found, or refused; changes no graph",
    "rewrite": "the block's new forward, with one hexa::moe_ffn",
    "verify": "original against rewritten; changes no graph",
    "partition": "collectives are inserted, if experts are spread over devices",
    "overlap": "collectives start early",
    "lower": "hexa::moe_ffn as expert-specific operators, forward and backward",
    **{each.name: each.summary for pipeline in (CUDA, CPU) for each in pipeline.passes},
}
"""Every pass by the name under which `hexa_fx.observers` reports it, in order."""


@dataclass
class _Runs:
    """What the recorded runs of one call read, and whether their code asks for the block's mode."""

    reads: list[PythonRead] = field(default_factory=list)
    by_mode: bool = False


class NotRecorded(Refusal):
    """The block raised an error on the inputs. What its code read by then is unknown, so that this holds for no other block."""


_ALIKE = (
    "most tokens of the example are alike here, which hides what goes where: give example inputs with different tokens"
)


def analyse(observation: Observation, config: HexaConfig) -> BlockAnalysis:
    """Takes one block through the passes as it was called, and again with other probes if the result differs.

    Mode, dtypes and autocast are those of the call. The block is not changed. A failure of the passes themselves is a refusal too,
    so that it does not keep the user from the rest of the model.
    """
    reason = why_unreadable(observation.module) or (NOT_REACHED if has_no_tokens(observation) else "")
    if reason:
        return refused(Refusal(observation.path, reason))
    try:
        with random_state_kept():
            found = with_few_enough_tokens(_analyse_experts, observation, config)
            if not isinstance(found, Refusal) and found.check is not None and changes_itself(found.check.cases):
                found = with_few_enough_tokens(_analyse_experts, observation, config)  # perhaps its cache is full now
            return refused(found) if isinstance(found, Refusal) else found
    except Exception as error:
        log.exception("hexa_fx failed on %s; please report this", observation.path or "the model")
        return refused(Refusal(observation.path, f"hexa_fx itself failed here with {type(error).__name__}: {error}"))


def _analyse_experts(observation: Observation, config: HexaConfig) -> BlockAnalysis:
    """Analyses the block as it runs; where that is refused, with transformers' experts as their class spells them. The block as it
    runs has to agree with what is made of that."""
    analysis = _analyse(observation, config)
    if analysis.refusal is None or analysis.settled:
        return analysis
    with in_plain_form(observation.module) as otherwise:
        plain = _analyse(observation, config) if otherwise else analysis
    if plain.rewritten is None or plain.captured is None:
        return analysis
    form = replace(plain.rewritten, reads=as_set(plain.rewritten.reads, otherwise))
    found = replace(plain, rewritten=form, reads=as_set(plain.reads, otherwise))
    with at_block(observation.path, mode_of(observation.module)):
        example = probe_inputs(observation.args, observation.kwargs, config.probe_tokens)
        found = _checked(found, observation, example, config)
    put_back(plain.captured.held, plain.captured.written)
    return analysis if found.refusal else found


def _analyse(observation: Observation, config: HexaConfig) -> BlockAnalysis:
    """Analyses the block on the example, or on others like it if its tokens cannot be told apart."""
    args, kwargs = probe_inputs(observation.args, observation.kwargs, config.probe_tokens)
    tried: list[tuple[Observation, BlockAnalysis]] = []
    left: Iterator[Observation] = examples(replace(observation, args=args, kwargs=kwargs, given=(args, kwargs)))
    while (example := next(left, None)) is not None:
        analysis = _analyse_example(example, config)
        if analysis.refusal is None or analysis.settled:
            return analysis
        tried.append((example, analysis))
        if len(tried) == 1:
            left = chain(left, after_refusal(analysis.refusal.reason, example, differs=analysis.check is not None))
    if packed := why_packed(observation.module):
        return refused(Refusal(observation.path, packed))
    recorded = [(e, a) for e, a in tried if not isinstance(a.refusal, NotRecorded)]
    for told_apart in (all_differ, lambda example: not mostly_alike(example)):
        for example, analysis in recorded:
            if told_apart(example):
                return _with_hint(analysis, why_not_finite(example.module))
    example, last = tried[-1]
    return _with_hint(last, _ALIKE) if mostly_alike(example) else last


def _with_hint(analysis: BlockAnalysis, hint: str) -> BlockAnalysis:
    """The analysis with a hint behind its refusal, if there is one."""
    if not hint or analysis.refusal is None:
        return analysis
    return replace(analysis, refusal=replace(analysis.refusal, reason=f"{analysis.refusal.reason}; {hint}"))


_EQUAL = 1e-6
"""Relative to a tensor's scale, up to which only gradients differ."""


def _analyse_example(observation: Observation, config: HexaConfig) -> BlockAnalysis:
    """Analyses the block on one example. If what was found differs from the block, it is looked for once more in another way."""
    probe = probe_inputs(observation.args, observation.kwargs, config.probe_tokens)
    first = _analyse_on(observation, config, probe)
    if first.captured is not None and first.check is not None and any(case.changed for case in first.check.cases):
        numbers = {**counted(first.captured), **observation.numbers}
        is_new = numbers.keys() > observation.numbers.keys()
        again = _analyse_example(replace(observation, numbers=numbers), config) if is_new else first
        return first if again.refusal else again
    if first.match is None or first.settled or first.check is None or first.check.ok:
        return first
    assert first.captured is not None
    different = next((case for case in first.check.cases if case.outcome == "different"), None)
    if different is not None and (different.raised or different.forward_error <= _EQUAL < different.gradient_error):
        # of two tensors with the same numbers one is detached, or is not there in every call; or a loop goes over other sequences
        again = _analyse_on(observation, config, probe, prefer_earliest=True)
    else:  # so that a capacity that the code names is exceeded
        probe = overflow_inputs(*probe, overflow_sizes(first.captured.graph)[-1])
        again = _analyse_on(observation, config, probe)
    return first if again.refusal else again


def _analyse_on(
    observation: Observation,
    config: HexaConfig,
    probe: tuple[tuple[Any, ...], dict[str, Any]],
    prefer_earliest: bool = False,
) -> BlockAnalysis:
    started, path, runs = time.perf_counter(), observation.path, _Runs()
    with at_block(path, mode_of(observation.module)):
        outcome = _rewrite(observation, *probe, config, prefer_earliest, runs)
        seconds, reads = time.perf_counter() - started, tuple(runs.reads)
        mode = bool(observation.module.training) if runs.by_mode else None
        if isinstance(outcome, Refusal):
            return BlockAnalysis(path, refusal=outcome, seconds=seconds, reads=reads, training=mode)
        match, rewritten = outcome
        captured = match.captured
        put_back(captured.held, captured.written)
        request_kernels(captured, rewritten, training=rewritten.training is not False)
        found = BlockAnalysis(path, match, captured, rewritten, seconds=seconds, reads=reads, training=mode)
        found = _checked(found, observation, probe, config) if config.verify else found
        put_back(captured.held, captured.written)  # which modules that stay calls write to
        return found


def _rewrite(
    observation: Observation,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    config: HexaConfig,
    prefer_earliest: bool,
    runs: _Runs,
) -> tuple[MoEMatch, RewrittenBlock] | Refusal:
    def record(replacements: Replacements) -> CapturedBlock:
        with announced("capture", Graph()) as done:
            run = partial(capture, observation.module, args, kwargs, observation.path, config.analysis_bytes)
            run = partial(run, gradients=observation.gradients)
            replacements = replace(replacements, numbers=frozenset(observation.numbers), counts_loops=prefer_earliest)
            captured = run(replacements)
            if idle := expert_dropouts(captured):
                captured = run(replace(replacements, idle=idle))
            captured = replace(captured, written_later=observation.written)
            done.graph = captured.graph
        check_recorded(captured, config)
        runs.reads.extend(captured.reads)
        runs.by_mode |= depends_on_mode(captured)
        if asks_first(captured):
            raise CaptureError(ASKED_FIRST, path=observation.path)
        with announced("canonicalize", captured.graph) as done:
            captured = canonicalize_block(captured)
            done.graph = captured.graph
        return captured

    try:
        match = detect_all(record, prefer_earliest)
    except CaptureError as error:
        runs.by_mode = True
        return NotRecorded(observation.path, str(error), raised_at(error.__cause__))
    if isinstance(match, Refusal):
        return match
    with announced("rewrite", match.captured.graph) as done:
        try:
            rewritten = rewrite_block(match, config.recompute_h)
        except Refuse as found:
            return found.at(observation.path)
        rewritten = rewritten if config.own_code_when_small else replace(rewritten, small=NEVER_SMALL)
        done.graph = rewritten.graph
    captured, block = match.captured, observation.module
    mode = bool(block.training) if depends_on_mode(captured, called_in(rewritten.graph)) else None
    changed = tuple(dict.fromkeys(name for name, _ in captured.changed_parameters))
    rewritten = replace(rewritten, changed=changed, training=mode)
    refusal = refusal_of_host(block, captured, rewritten)
    return refusal or (match, under_this_autocast(block, rewritten, args, kwargs))


_ROUND = 252_000
"""Divisible by whatever code counts its calls in, to do something in one of so many."""


def _with_other_numbers(verify: Callable[[], VerificationResult], observation: Observation) -> VerificationResult:
    """The comparison where numbers that are asked for are others: those of calls before, or larger or smaller ones where a
    condition of the rewritten block excludes them. One value does not show what becomes a constant."""
    block, before = observation.module, observation.numbers
    now = {name: number_at(block, name) for name in before}
    larger = ({name: number + more for name, number in now.items()} for more in (1, _ROUND))
    halves = {name: type(number)(number / 2) for name, number in now.items()}
    for numbers in (before, *larger, halves if all(halves.values()) else before):
        with other_numbers(block, numbers):
            check = verify()
        if any(case.outcome != "skipped" for case in check.cases):
            break
    return check


def _checked(
    found: BlockAnalysis, observation: Observation, example: tuple[tuple[Any, ...], dict[str, Any]], config: HexaConfig
) -> BlockAnalysis:
    """Compares what was rewritten with the original. What differs becomes a refusal."""
    match, rewritten, block = found.match, found.rewritten, observation.module
    assert match is not None
    assert rewritten is not None
    settings = settings_of(match.captured, config, unlike(observation.given, example))
    with announced("verify", rewritten.graph) as done, muted(), torch_operators():
        check = verify_block(block, rewritten, *example, settings)
        if differs_on_nothing(check.cases):  # 0 / 0 where the code leaves out an expert without tokens, say
            rewritten = not_on_nothing(rewritten)
            check = verify_block(block, rewritten, *example, settings)
        if check.ok and observation.numbers:
            check = _with_other_numbers(partial(verify_block, block, rewritten, *example, settings), observation)
        done.note = check.reason or "equal"
    if check.ok:
        return replace(found, check=check, rewritten=rewritten)
    refusal = Refusal(observation.path, why_refused(check, match), settled=changes_itself(check.cases))
    return replace(found, check=check, rewritten=None, refusal=refusal)
