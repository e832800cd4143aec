"""What `optimize` and `explain` found and did, as a value that prints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from hexa_fx.ir import SourceLocation
from hexa_fx.passes import BlockAnalysis
from hexa_fx.passes.detect.body import ExpertBody
from hexa_fx.passes.detect.free_body import FreeBody
from hexa_fx.plan import Plan

Status = Literal["rewritten", "refused"]


@dataclass(frozen=True)
class CheckReport:
    """How a rewritten block compared with its original.

    Args:
        cases: number of comparisons (sizes, forced routings, modes).
        forward_error, gradient_error: largest difference, relative to the size of the original tensor.
        seconds: what the comparison cost.
    """

    cases: int
    forward_error: float
    gradient_error: float
    seconds: float


@dataclass(frozen=True)
class BlockReport:
    """One MoE block of the model.

    Args:
        path: where it stands in the model. status: whether it was rewritten.
        modes: for ``eval`` and ``train``, ``rewritten`` or the reason why that mode runs the original code.
        reason, location: why it was left as it is, and the line of the user's code that says so.
        idiom: how the user's code runs the experts. The sizes are E, k, D and I.
        expert: the expert function, e.g. ``silu(x Wg) * (x Wu) Wd``; of an unusual one the operations in order.
        weights: how the user stores them.
        same_as: path of the identical block whose analysis was reused.
        check: result of the comparison, None if it was switched off or the block refused.
        seconds: time for capture, detection and rewriting.
    """

    path: str
    status: Status
    modes: dict[str, str]
    reason: str = ""
    location: SourceLocation | None = None
    idiom: str = ""
    num_experts: int = 0
    top_k: int = 0
    hidden_size: int = 0
    intermediate_size: int = 0
    expert: str = ""
    weights: str = ""
    same_as: str | None = None
    check: CheckReport | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class OptimizationReport:
    """Every block that looked like MoE, in model order.

    Args:
        plan: how the blocks are spread over devices, with the numbers behind it, if they are.
    """

    blocks: tuple[BlockReport, ...]
    seconds: float = 0.0
    plan: Plan | None = None

    @property
    def rewritten(self) -> tuple[BlockReport, ...]:
        return tuple(block for block in self.blocks if block.status == "rewritten")

    @property
    def refused(self) -> tuple[BlockReport, ...]:
        return tuple(block for block in self.blocks if block.status == "refused")

    def summary(self) -> str:
        """One line."""
        if not self.blocks:
            return "no MoE block was found; the model is unchanged"
        return f"{len(self.rewritten)} of {len(self.blocks)} MoE blocks rewritten in {self.seconds:.2f} s"

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def table(self) -> Table:
        """For rich consoles."""
        table = Table("block", "status", "idiom", "sizes", "expert", "weights", "largest error fwd / grad")
        for block in self.blocks:
            sizes = _sizes(block) if block.num_experts else ""
            table.add_row(block.path, block.status, block.idiom, sizes, block.expert, block.weights, _errors(block))
        return table

    def __str__(self) -> str:
        lines = [self.summary()]
        lines += _lines(self.blocks)
        lines += self.plan.describe().splitlines() if self.plan else []
        return "\n".join(lines)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": str(self)}

    def print(self) -> None:
        """To the terminal: as a table with the reasons below it where there is room, else line by line."""
        console = Console()
        if not console.is_terminal or console.width < 140:
            print(self)
            return
        console.print(self.table())
        for line in _reasons(self.blocks):
            console.print(line, highlight=False)
        if self.plan:
            console.print(self.plan.describe(), highlight=False)
        console.print(self.summary())


def _sizes(block: BlockReport) -> str:
    return f"E={block.num_experts} k={block.top_k} D={block.hidden_size} I={block.intermediate_size}"


def describe(analysis: BlockAnalysis, same_as: str | None = None) -> BlockReport:
    """An analysis in the user's terms."""
    modes: dict[str, str] = {mode: "rewritten" for mode in analysis.rewritten}  # noqa: C420
    modes.update({mode: refusal.reason for mode, refusal in analysis.refusals.items()})
    refusal = next(iter(analysis.refusals.values()), None)
    reason, location = (refusal.reason, refusal.location) if refusal else ("", None)
    status: Status = "rewritten" if analysis.rewritten else "refused"
    if analysis.match is None:
        return BlockReport(analysis.path, status, modes, reason, location, same_as=same_as, seconds=analysis.seconds)
    match, body = analysis.match, analysis.match.body
    return BlockReport(
        analysis.path,
        status,
        modes,
        reason,
        location,
        idiom=match.idiom,
        num_experts=match.num_experts,
        top_k=match.routing.top_k,
        hidden_size=body.hidden_size,
        intermediate_size=body.intermediate_size,
        expert=", ".join(body.operations) if isinstance(body, FreeBody) else _formula(body),
        weights=body.form,
        same_as=same_as,
        check=_check_report(analysis),
        seconds=analysis.seconds,
    )


def _formula(body: ExpertBody) -> str:
    """The expert function in one line."""
    gated = body.pairing != "none"
    first = "x Wg" + (" + bg" if body.gate_bias else "") if gated else "x W1" + (" + b1" if body.gate_bias else "")
    inner = f"{body.activation}({first})" if body.activation != "none" else f"({first})"
    if gated:
        inner += " * (x Wu" + (" + bu)" if body.gate_bias else ")")
    return f"{inner} " + ("Wd" if gated else "W2") + (" + bias" if body.down_bias else "")


def _check_report(analysis: BlockAnalysis) -> CheckReport | None:
    checks = list(analysis.checks.values())
    if not checks:
        return None
    cases = [case for check in checks for case in check.cases]
    return CheckReport(
        len(cases),
        max((case.forward_error for case in cases), default=0.0),
        max((case.gradient_error for case in cases), default=0.0),
        sum(check.seconds for check in checks),
    )


def _errors(block: BlockReport) -> str:
    if block.same_as:
        return f"as {block.same_as}"
    return f"{block.check.forward_error:.1e} / {block.check.gradient_error:.1e}" if block.check else ""


def _lines(blocks: tuple[BlockReport, ...]) -> Iterator[str]:
    for block in blocks:
        if block.status == "refused":
            continue
        checked = f", checked: {_errors(block)}" if _errors(block) else ", not checked"
        yield f"  {block.path or '(model)'}: {block.idiom}, {_sizes(block)}, {block.expert}, {block.weights} weights{checked}"
    yield from (f"  {line}" for line in _reasons(blocks))


def _reasons(blocks: tuple[BlockReport, ...]) -> Iterator[str]:
    for block in blocks:
        where = f" ({block.location})" if block.location else ""
        if block.status == "refused":
            yield f"{block.path or '(model)'}: left as it is: {block.reason}{where}"
            continue
        for mode, outcome in block.modes.items():
            if outcome != "rewritten":
                yield f"{block.path or '(model)'}: runs the original code in {mode} mode: {outcome}{where}"
