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

Steps 1 to 4 are done for eval and for train mode where code asks for ``self.training``, else once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

from torch.fx import Graph

from hexa_fx.capture import CapturedBlock, capture
from hexa_fx.capture.calls import raised_at
from hexa_fx.capture.observe import Observation
from hexa_fx.capture.overlooked import NOT_REACHED
from hexa_fx.capture.perturb import Replacements
from hexa_fx.capture.probes import OVERFLOW_TOKENS, overflow_inputs, overflow_sizes, probe_inputs
from hexa_fx.config import HexaConfig
from hexa_fx.cuda.modes import torch_operators
from hexa_fx.errors import CaptureError
from hexa_fx.ir import NEVER_SMALL, PythonRead, Refusal, RewrittenBlock
from hexa_fx.isolation.written_tensors import put_back
from hexa_fx.observers import announced, at_block, muted
from hexa_fx.passes.attempts import ATTEMPTS, Attempt
from hexa_fx.passes.block_analysis import MODES, BlockAnalysis, Mode
from hexa_fx.passes.canonicalize import canonicalize
from hexa_fx.passes.cover.complete import Findings, detect_all
from hexa_fx.passes.detect import MoEMatch
from hexa_fx.passes.detect.dropouts import expert_dropouts
from hexa_fx.passes.detect.verdict import Refuse
from hexa_fx.passes.inputs.distinct_tokens import after_refusal, all_differ, examples, has_no_tokens, mostly_alike
from hexa_fx.passes.kernel_requests import request_kernels
from hexa_fx.passes.lowering.pipelines import CPU, CUDA
from hexa_fx.passes.memory.bounded import check_recorded, refusal_of_layout, with_few_enough_tokens
from hexa_fx.passes.modes.autocast import with_autocast
from hexa_fx.passes.modes.first_call import set_up
from hexa_fx.passes.modes.same_run import depends_on_mode, in_mode, seen_before
from hexa_fx.passes.preconditions.host_rules import only_written, refusal_of_host
from hexa_fx.passes.preconditions.idle_experts import with_idle_experts
from hexa_fx.passes.preconditions.unreadable import why_not_finite, why_packed, why_unreadable
from hexa_fx.passes.rewrite import rewrite
from hexa_fx.passes.verify import VerificationResult, in_own_dtype_only, verify, why_refused
from hexa_fx.passes.verify.cases import changes_itself
from hexa_fx.passes.verify.left_over import decided_by_count
from hexa_fx.passes.verify.settings import settings_of, unlike

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
    """The recorded runs of one call, what they read, what was found in them, and whether another mode may give another."""

    captured: list[CapturedBlock] = field(default_factory=list)
    reads: list[PythonRead] = field(default_factory=list)
    found: Findings = field(default_factory=dict)
    by_mode: bool = False


_Differed = dict[tuple[Mode, str], VerificationResult]
"""Of rewritten code that is not the block's, by mode and text."""


class _NotRecorded(Refusal):
    """The block raised an error on the inputs."""


_ALIKE = (
    "most tokens of the example are alike here, which hides what goes where: give example inputs with different tokens"
)


def analyse(observation: Observation, config: HexaConfig) -> BlockAnalysis:
    """Takes one block through the passes, and again with other probes if the result differs. The block is not changed.

    A failure of the passes themselves is a refusal too, so that it does not keep the user from the rest of the model.
    """
    reason = why_unreadable(observation.module) or (NOT_REACHED if has_no_tokens(observation) else "")
    if reason:
        return refused(Refusal(observation.path, reason))
    try:
        found = with_few_enough_tokens(_analyse, observation, config)
        return refused(found) if isinstance(found, Refusal) else _analyse_set_up(observation, config, found)
    except Exception as error:
        log.exception("hexa_fx failed on %s; please report this", observation.path or "the model")
        return refused(Refusal(observation.path, f"hexa_fx itself failed here with {type(error).__name__}: {error}"))


def refused(refusal: Refusal) -> BlockAnalysis:
    """Of a block that is left as it is."""
    return BlockAnalysis(refusal.path, None, refusals=dict.fromkeys(MODES, refusal))


def _analyse_set_up(observation: Observation, config: HexaConfig, found: BlockAnalysis) -> BlockAnalysis:
    """Where a block is refused for what a first call sets up: with that there, as all other calls find it."""
    if not found.refusals:
        return found
    probe = probe_inputs(observation.args, observation.kwargs, config.probe_tokens)
    with set_up(observation.module, *probe) as differs:
        again = with_few_enough_tokens(_analyse, observation, config) if differs else found
    return found if isinstance(again, Refusal) or len(again.rewritten) < len(found.rewritten) else again


def _analyse(observation: Observation, config: HexaConfig) -> BlockAnalysis:
    """Analyses the block on the example, or on others like it if its tokens cannot be told apart."""
    args, kwargs = probe_inputs(observation.args, observation.kwargs, config.probe_tokens)
    tried: list[tuple[Observation, BlockAnalysis]] = []
    left: Iterator[Observation] = examples(replace(observation, args=args, kwargs=kwargs, given=(args, kwargs)))
    while (example := next(left, None)) is not None:
        analysis = _analyse_example(example, config)
        if analysis.rewritten or analysis.settled:
            return analysis
        tried.append((example, analysis))
        if len(tried) == 1:
            left = chain(left, after_refusal({refusal.reason for refusal in analysis.refusals.values()}, example))
    if packed := why_packed(observation.module):
        return refused(Refusal(observation.path, packed))
    recorded = [(e, a) for e, a in tried if not any(isinstance(r, _NotRecorded) for r in a.refusals.values())]
    for told_apart in (all_differ, lambda example: not mostly_alike(example)):
        for example, analysis in recorded:
            if told_apart(example):
                return _with_hint(analysis, why_not_finite(example.module))
    example, last = tried[-1]
    return _with_hint(last, _ALIKE) if mostly_alike(example) else last


def _with_hint(analysis: BlockAnalysis, hint: str) -> BlockAnalysis:
    """The analysis with a hint behind each of its refusals, if there is one."""
    refusals = {mode: replace(r, reason=f"{r.reason}; {hint}") for mode, r in analysis.refusals.items() if hint}
    return replace(analysis, refusals=refusals or analysis.refusals)


def _analyse_example(observation: Observation, config: HexaConfig) -> BlockAnalysis:
    best: BlockAnalysis | None = None
    differed: _Differed = {}
    left = [*ATTEMPTS]
    while left:
        attempt = left.pop(0)
        if attempt.from_end and (best is None or best.match is None or not best.match.is_given_ids):
            continue
        graphs = [captured.graph for captured in best.captured.values()] if best is not None else []
        # so that a capacity that the code names is exceeded
        overflow_tokens = max((overflow_sizes(graph)[-1] for graph in graphs), default=OVERFLOW_TOKENS)
        analysis = _analyse_on(observation, config, attempt, overflow_tokens, differed)
        for captured in analysis.captured.values():  # which modules that stay calls write to
            put_back(captured.held, captured.written)
        if best is None or len(analysis.rewritten) > len(best.rewritten):
            best = analysis
        if best.match is None or analysis.settled or all(check.ok for check in best.checks.values()):
            break
        differ = [case for check in analysis.checks.values() for case in check.cases if case.outcome == "different"]
        if any(case.gradient_error > case.forward_error for case in differ):
            # of tensors with the same numbers one is detached
            left.sort(key=lambda attempt: not attempt.prefer_earliest)
    assert best is not None
    return best


def _analyse_on(
    observation: Observation, config: HexaConfig, attempt: Attempt, overflow_tokens: int, differed: _Differed
) -> BlockAnalysis:
    started = time.perf_counter()
    args, kwargs = probe_inputs(observation.args, observation.kwargs, config.probe_tokens, attempt.scale)
    if attempt.overflow:
        args, kwargs = overflow_inputs(args, kwargs, overflow_tokens)
    captured: dict[Mode, CapturedBlock] = {}
    rewritten: dict[Mode, RewrittenBlock] = {}
    refusals: dict[Mode, Refusal] = {}
    runs = _Runs()
    match: MoEMatch | None = None
    outcome: tuple[MoEMatch, RewrittenBlock] | Refusal | None = None
    for mode in MODES:
        if outcome is None or runs.by_mode:
            with in_mode(observation.module, mode == "train"), at_block(observation.path, mode):
                outcome = _rewrite_mode(observation, args, kwargs, config, attempt, runs)
        if isinstance(outcome, Refusal):
            refusals[mode] = outcome
            continue
        found, rewritten[mode] = outcome
        put_back(found.captured.held, found.captured.written)  # before the other mode notes what they hold
        request_kernels(found.captured, rewritten[mode], training=mode == "train")
        captured[mode], match = found.captured, match or found
    seconds = time.perf_counter() - started
    run = observation, captured, rewritten, refusals, args, kwargs, config, differed
    checks = _check(*run) if config.verify else {}
    return BlockAnalysis(observation.path, match, captured, rewritten, refusals, checks, seconds, tuple(runs.reads))


def _rewrite_mode(
    observation: Observation,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    config: HexaConfig,
    attempt: Attempt,
    runs: _Runs,
) -> tuple[MoEMatch, RewrittenBlock] | Refusal:
    def record(replacements: Replacements) -> CapturedBlock:
        with announced("capture", Graph()) as done:
            run = partial(capture, observation.module, args, kwargs, observation.path, config.analysis_bytes)
            captured = run(replacements)
            if idle := expert_dropouts(captured):
                captured = run(replace(replacements, idle=idle))
            captured = with_idle_experts(captured)
            done.graph = captured.graph
        check_recorded(captured, config)
        runs.reads.extend(captured.reads)
        runs.by_mode |= depends_on_mode(captured)
        with announced("canonicalize", captured.graph) as done:
            captured = seen_before(canonicalize(captured), runs.captured)
            done.graph = captured.graph
        if captured.whole_bytes is not None:  # then there is memory for two of them
            runs.captured.clear()
        runs.captured.append(captured)
        return captured

    try:
        match = detect_all(record, runs.found, attempt.prefer_earliest)
    except CaptureError as error:
        runs.by_mode = True
        return _NotRecorded(observation.path, str(error), raised_at(error.__cause__))
    if isinstance(match, Refusal):
        return only_written(match, runs.reads)
    with announced("rewrite", match.captured.graph) as done:
        try:
            rewritten = rewrite(match, config.recompute_h, attempt.live, attempt.from_end)
        except Refuse as found:
            return found.at(observation.path)
        rewritten = rewritten if config.own_code_when_small else replace(rewritten, small=NEVER_SMALL)
        done.graph = rewritten.graph
    captured = match.captured
    rewritten = replace(rewritten, changed=captured.changed_parameters)
    refusal = refusal_of_host(observation.module, captured, rewritten) or refusal_of_layout(captured, rewritten)
    return refusal or (match, with_autocast(observation.module, captured, rewritten, args, kwargs))


def _check(
    observation: Observation,
    captured: Mapping[Mode, CapturedBlock],
    rewritten: dict[Mode, RewrittenBlock],
    refusals: dict[Mode, Refusal],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    config: HexaConfig,
    differed: _Differed,
) -> dict[Mode, VerificationResult]:
    """Compares every rewritten mode with the original. One that differs becomes a refusal, also if another attempt gives it."""
    checks: dict[Mode, VerificationResult] = {}
    for mode in list(rewritten):
        with in_mode(observation.module, mode == "train"), at_block(observation.path, mode):
            same = [other for other in checks if captured[other].graph is captured[mode].graph]
            brief = any(checks[other].ok for other in same)
            settings = settings_of(captured[mode], config, brief, unlike(observation.given, (args, kwargs)))
            code = mode, rewritten[mode].graph.python_code("self").src
            one = (o for o in same if captured[o] is captured[mode] or not checks[o].ok)
            known = differed.get(code) or next((checks[other] for other in one), None)
            with announced("verify", rewritten[mode].graph) as done, muted(), torch_operators():
                checks[mode] = known or verify(observation.module, rewritten[mode], args, kwargs, settings)
                done.note = checks[mode].reason or "equal"
            if any(case.outcome == "different" for case in checks[mode].cases):
                differed[code] = checks[mode]
            if checks[mode].only_own_dtype or (brief and any(check.only_own_dtype for check in checks.values())):
                rewritten[mode] = in_own_dtype_only(rewritten[mode])
        if not checks[mode].ok:
            cases, counted = checks[mode].cases, settings.counts.cause(checks[mode].cases)
            cause = counted or decided_by_count(captured[mode], rewritten[mode])
            reason = why_refused(checks[mode], observation.module, cause)
            refusals[mode] = Refusal(observation.path, reason, settled=bool(counted) or changes_itself(cases))
            del rewritten[mode]
    return checks
