"""The report of `optimize` and `explain`: what was found and what was done, as text, table, JSON or HTML."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch.fx

from hexa_fx.inspection.advice import advice
from hexa_fx.inspection.costs import Costs
from hexa_fx.inspection.kernels import KernelUse, kernels_of
from hexa_fx.inspection.operators import op_name
from hexa_fx.inspection.stages import FfnCase, is_exchange
from hexa_fx.inspection.text import error_text, lines_of, refusal_lines
from hexa_fx.ir import SourceLocation
from hexa_fx.plan import Plan

if TYPE_CHECKING:
    from rich.table import Table

Status = Literal["rewritten", "refused"]


@dataclass(frozen=True)
class CheckReport:
    """How a rewritten block compared with its original.

    Args:
        cases: number of comparisons (over sizes, forced routings and modes).
        forward_error, gradient_error: largest difference, relative to the largest value of the original tensor.
        seconds: how long the comparison took.
    """

    cases: int
    forward_error: float
    gradient_error: float
    seconds: float


@dataclass(frozen=True)
class BlockReport:
    """One MoE block of the model.

    Args:
        path: the block's path in the model.
        status: whether it was rewritten.
        modes: for ``eval`` and ``train``, ``rewritten`` or the reason why that mode runs the original code.
        reason, location: why the block was left as it is, and the line of the user's code behind it.
        idiom: how the user's code runs the experts.
        num_experts, top_k, hidden_size, intermediate_size: E, k, D and I.
        expert: the expert function, e.g. ``silu(x Wg) * (x Wu) Wd``; for an unusual one, its operations in order.
        weights: how the user stores them: one parameter per expert (``listed``), (E, ., .) (``stacked``), or (E*., .)
            (``packed``).
        same_as: path of the identical block whose analysis was reused.
        check: result of the comparison; None if it was switched off or the block was refused.
        seconds: time for capture, detection and rewriting.
        activation: name of the activation.
        layout: how a weight lies in memory, and how gate and up lie in it.
        code: class of the block, and where its forward is written.
        rewritten_to: what runs instead.
        costs: FLOPs, bytes moved and memory kept for backward, before and after.
        kernels: on a GPU, the kernels that forward and backward launch. Elsewhere use `kernels_on`.
        case: sizes and dtype of the block's call.
        collectives: the collectives of this rank's graph, in order, if the block is spread over devices.
        small: on a CPU, inputs of up to this many elements run the block's own code, which is faster for them.
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
    activation: str = ""
    layout: str = ""
    code: SourceLocation | None = None
    rewritten_to: str = ""
    costs: Costs | None = None
    kernels: tuple[KernelUse, ...] = ()
    case: FfnCase | None = None
    collectives: tuple[str, ...] = ()
    small: int = 0

    def __repr__(self) -> str:
        sizes = f", {self.idiom}, {_sizes(self)}" if self.num_experts else ""
        return (
            f"<BlockReport {self.path or '(model)'}: {self.status}{sizes}{': ' + self.reason if self.reason else ''}>"
        )

    @property
    def advice(self) -> str:
        """What to do about the refusal; empty if there is none."""
        return advice(self.reason) if self.reason else ""

    def kernels_on(self, arch: int, tokens: int | None = None) -> tuple[KernelUse, ...]:
        """The kernels that the block would launch on compute capability ``arch``, for ``tokens`` (default: the example's).

        Needs no GPU. Empty for experts of an unusual form, which do not run as `hexa::moe_ffn`.

        Raises:
            KernelError: there are no kernels for ``arch``.
        """
        return kernels_of(self.case.resized(tokens), arch) if self.case is not None else ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("case", "kernels")}
        found = {name: asdict(v) if hasattr(v, "__dataclass_fields__") else v for name, v in plain.items()}
        found["advice"] = self.advice
        found["kernels"] = [{**asdict(k), "name": k.name, "cached": k.cached} for k in self.kernels]
        return found


@dataclass(frozen=True)
class OptimizationReport:
    """Every block that looked like MoE, in model order.

    Args:
        blocks: one report per block.
        seconds: how long the analysis took.
        plan: how the blocks are spread over devices, with the numbers behind it; None on one device.
    """

    blocks: tuple[BlockReport, ...]
    seconds: float = 0.0
    plan: Plan | None = None

    @property
    def rewritten(self) -> tuple[BlockReport, ...]:
        """The blocks that were rewritten, in at least one mode."""
        return tuple(block for block in self.blocks if block.status == "rewritten")

    @property
    def refused(self) -> tuple[BlockReport, ...]:
        """The blocks that were left as they are."""
        return tuple(block for block in self.blocks if block.status == "refused")

    def summary(self) -> str:
        """One line: how many blocks were rewritten, and in what time."""
        if not self.blocks:
            return "no MoE block was found; the model is unchanged"
        return f"{len(self.rewritten)} of {len(self.blocks)} MoE blocks rewritten in {self.seconds:.2f} s"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        plan = None if self.plan is None else json.loads(self.plan.to_json())
        blocks = [block.as_dict() for block in self.blocks]
        return {"summary": self.summary(), "seconds": self.seconds, "blocks": blocks, "plan": plan}

    def to_json(self) -> str:
        """The report as JSON text."""
        return json.dumps(self.as_dict(), indent=2)

    def to_html(self, path: str | Path, title: str = "report") -> Path:
        """Writes the report as a self-contained HTML page and returns its path."""
        from hexa_fx.inspection.report_page import report_page

        target = Path(path)
        target.write_text(report_page(self, title), encoding="utf-8")
        return target

    def table(self) -> Table:
        """A table for a rich console. Needs rich."""
        from rich.table import Table

        table = Table("block", "status", "written as", "sizes", "expert", "weights", "error fwd / grad")
        for block in self.blocks:
            sizes = _sizes(block) if block.num_experts else ""
            weights = f"{block.weights} {block.layout}"
            table.add_row(block.path, block.status, block.idiom, sizes, block.expert, weights, error_text(block))
        return table

    def __repr__(self) -> str:
        return f"<OptimizationReport: {self.summary()}; print() it for details>"

    def __str__(self) -> str:
        lines = [self.summary(), *lines_of(self.blocks)]
        if self.plan is not None:
            lines += self.plan.describe().splitlines()
        return "\n".join(lines)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": str(self)}

    def print(self) -> None:
        """Prints a table, with the reasons below it, if the terminal has room for one and rich is installed; else lines of text."""
        console = _wide_console()
        if console is None:
            print(self)
            return
        console.print(self.table())
        for line in refusal_lines(self.blocks):
            console.print(line, highlight=False)
        if self.plan:
            console.print(self.plan.describe(), highlight=False)
        console.print(self.summary())


def with_plan(report: OptimizationReport, plan: Plan, graphs: Mapping[str, torch.fx.Graph]) -> OptimizationReport:
    """The report with a partition plan. ``graphs`` are the blocks' graphs with collectives, by path."""
    found = {path: tuple(op_name(n) for n in graph.nodes if is_exchange(n)) for path, graph in graphs.items()}
    blocks = tuple(replace(block, collectives=found.get(block.path, ())) for block in report.blocks)
    return replace(report, blocks=blocks, plan=plan)


def _wide_console() -> Any:
    """rich's console if standard output is a terminal with room for a table, else None."""
    if not sys.stdout.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console()
    return console if console.width >= 140 else None


def _sizes(block: BlockReport) -> str:
    return f"E={block.num_experts} k={block.top_k} D={block.hidden_size} I={block.intermediate_size}"
