"""Turns the analysis of a block into its part of the report."""

from __future__ import annotations

from dataclasses import replace

import torch.fx

from hexa_fx.capture import record_of
from hexa_fx.capture.calls import written_at
from hexa_fx.inspection.block_report import BlockReport, CheckReport, Status
from hexa_fx.inspection.costs import tokens_of
from hexa_fx.inspection.facts import facts_of
from hexa_fx.inspection.inspector import Inspector
from hexa_fx.inspection.kernels import kernels_of
from hexa_fx.inspection.stages import FfnCase
from hexa_fx.ir import RUNS_ALREADY, Small, SourceLocation
from hexa_fx.passes.block_analysis import BlockAnalysis
from hexa_fx.passes.detect.steps import FreeBody
from hexa_fx.passes.inputs.routing_override import ROUTINGS


def describe(analysis: BlockAnalysis, same_as: str | None = None, inspector: Inspector | None = None) -> BlockReport:
    """The report of an analysed block.

    Args:
        same_as: path of the identical block whose analysis was reused.
        inspector: takes snapshots and costs; shared between blocks so that identical ones are looked at once.
    """
    refusal = analysis.refusal
    reason, location = (refusal.reason, refusal.location) if refusal else ("", None)
    status: Status = "rewritten" if refusal is None else "already" if reason == RUNS_ALREADY else "refused"
    facts = facts_of(analysis)
    if facts is None or analysis.match is None:
        return BlockReport(analysis.path, status, reason, location, same_as=same_as, seconds=analysis.seconds)
    inspector = inspector or Inspector()
    case = inspector.snapshots(analysis).case if refusal is None else None
    return BlockReport(
        analysis.path,
        status,
        reason,
        location,
        **vars(facts),
        same_as=same_as,
        check=_check_report(analysis),
        seconds=analysis.seconds,
        code=_code_of(analysis),
        rewritten_to=_rewritten_to(analysis),
        costs=inspector.costs(analysis) if refusal is None else None,
        kernels=kernels_of(case) if case is not None and _on_gpu(analysis) else (),
        case=case,
        small_tokens=_small_tokens(analysis, case),
    )


def _small_tokens(analysis: BlockAnalysis, case: FfnCase | None) -> Small:
    """Tokens up to which a CPU runs the block's own code, from the elements of the first argument that is a tensor."""
    form, captured = analysis.rewritten, analysis.captured
    if form is None or captured is None or not any(form.small):
        return Small()
    first = next(record_of(value).value for _, value in captured.arguments if isinstance(value, torch.fx.Node))
    tokens, elements = tokens_of(captured, case), max(1, first.numel())
    return Small(*(int(limit * tokens // elements) for limit in form.small))


def _code_of(analysis: BlockAnalysis) -> SourceLocation | None:
    """The block's class, and where its forward is written; None where there is no source of a user."""
    assert analysis.match is not None
    block = analysis.match.captured.block
    found = written_at(block, anybodys=True)
    return None if found is None else replace(found, code=type(block).__name__)


def _rewritten_to(analysis: BlockAnalysis) -> str:
    assert analysis.match is not None
    if analysis.rewritten is None:
        return ""
    return "expert-specific operators" if isinstance(analysis.match.body, FreeBody) else "hexa::moe_ffn"


def _on_gpu(analysis: BlockAnalysis) -> bool:
    assert analysis.match is not None
    return any(p.is_cuda for p in analysis.match.captured.block.parameters())


def _check_report(analysis: BlockAnalysis) -> CheckReport | None:
    check = analysis.check
    if check is None:
        return None
    cases = check.cases
    compared = [case for case in cases if case.outcome != "skipped"]
    return CheckReport(
        len(compared),
        max((case.forward_error for case in cases), default=0.0),
        max((case.gradient_error for case in cases), default=0.0),
        check.seconds,
        str(check.dtype).removeprefix("torch."),
        any(case.name.startswith(ROUTINGS[-1].name) for case in compared) and check.all_reached,
    )
