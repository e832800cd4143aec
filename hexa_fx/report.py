"""What `optimize` and `explain` found and did, as a value that prints, tabulates, and goes to JSON and HTML."""

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
from hexa_fx.inspection.stages import FfnCase, is_exchange
from hexa_fx.inspection.text import error_text, lines_of, refusal_lines
from hexa_fx.ir import SourceLocation
from hexa_fx.passes.base import op_name
from hexa_fx.plan import Plan

if TYPE_CHECKING:
    from rich.table import Table

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
        weights: how the user stores them: one parameter an expert (``listed``), (E, ., .) (``stacked``), or (E*., .)
            (``packed``).
        same_as: path of the identical block whose analysis was reused.
        check: result of the comparison, None if it was switched off or the block refused.
        seconds: time for capture, detection and rewriting.
        activation, layout: name of the activation; how a weight lies in memory, and gate and up in it.
        code: class of the block and where its forward is written.
        rewritten_to: what runs instead.
        costs: FLOPs, bytes moved and memory kept for backward, before and after.
        kernels: on a GPU, the kernels that forward and backward launch. Elsewhere ask `kernels_on`.
        case: sizes and dtype of the block's call.
        collectives: nodes of this rank's graph that exchange something, in order, if the block is spread over devices.
        small: on a CPU, inputs of up to so many elements run the block's own code, which is the quicker there.
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
        """What helps against the refusal; empty where there is none."""
        return advice(self.reason) if self.reason else ""

    def kernels_on(self, arch: int, tokens: int | None = None) -> tuple[KernelUse, ...]:
        """The kernels that the block would launch on a card of compute capability ``arch``, for the example's tokens or so many.

        Needs no GPU. Empty where the block has no `hexa::moe_ffn` node: its operators then stand in the rewritten graph.

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

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        plan = None if self.plan is None else json.loads(self.plan.to_json())
        blocks = [block.as_dict() for block in self.blocks]
        return {"summary": self.summary(), "seconds": self.seconds, "blocks": blocks, "plan": plan}

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=2)

    def to_html(self, path: str | Path, title: str = "report") -> Path:
        """Writes the report as a self-contained page."""
        from hexa_fx.inspection.report_page import report_page

        target = Path(path)
        target.write_text(report_page(self, title), encoding="utf-8")
        return target

    def table(self) -> Table:
        """For rich consoles. Needs rich."""
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
        """To the terminal: as a table with the reasons below it where there is room (and rich), else line by line."""
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
    """The report of a model that is spread over devices. ``graphs`` are its blocks' graphs with collectives, by path."""
    found = {path: tuple(op_name(n) for n in graph.nodes if is_exchange(n)) for path, graph in graphs.items()}
    blocks = tuple(replace(block, collectives=found.get(block.path, ())) for block in report.blocks)
    return replace(report, blocks=blocks, plan=plan)


def _wide_console() -> Any:
    """rich's console if there is a terminal with room for a table, else None."""
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
