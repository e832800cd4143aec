"""The report of `optimize` and `explain`: what was found and what was done, as text, table, JSON or HTML."""

from __future__ import annotations

import json
import sys
import weakref
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.fx
from torch import nn

from hexa_fx.inspection.block_report import BlockReport
from hexa_fx.inspection.operators import op_name
from hexa_fx.inspection.stages import is_exchange
from hexa_fx.inspection.text import error_text, lines_of, refusal_lines
from hexa_fx.ir import NEVER_SMALL
from hexa_fx.isolation.module_tree import inside, with_ancestors
from hexa_fx.plan import Plan
from hexa_fx.runtime.forward import HexaForward

if TYPE_CHECKING:
    from rich.table import Table


WAITS = "the model is analysed in its first call, after which its .report says what was found"
OFF = "hexa_fx is switched off (skip='*' of HexaConfig, or HEXA_FX_SKIP in the environment); the model is unchanged"


@dataclass(frozen=True)
class OptimizationReport:
    """Every block that looked like MoE, in model order.

    Args:
        found: one report per block, as it was when the model was analysed.
        seconds: how long the analysis took.
        plan: how the blocks are spread over devices, with the numbers behind it; None on one device.
        later: reports of blocks that were first analysed, or first rewritten, when they were called, by path.
        unseen: why the model was not analysed, or not yet; empty if it was. Parts of it may have been called.
    """

    found: tuple[BlockReport, ...]
    seconds: float = 0.0
    plan: Plan | None = None
    later: dict[str, BlockReport] = field(default_factory=dict)
    unseen: str = ""

    @property
    def blocks(self) -> tuple[BlockReport, ...]:
        """One report per block, as it is now. One that turned out to be a part of a block is none."""
        paths = {block.path for block in self.found}
        others = (block for path, block in self.later.items() if path not in paths)
        found = (*(self.later.get(block.path, block) for block in self.found), *others)
        whole = {block.path for block in found if block.status == "rewritten" and block.path in self.later}
        parts = (
            block.status != "rewritten" and whole.intersection([*with_ancestors(block.path)][1:]) for block in found
        )
        return tuple(block for block, is_part in zip(found, parts) if not is_part)

    @property
    def rewritten(self) -> tuple[BlockReport, ...]:
        """The blocks that were rewritten."""
        return tuple(block for block in self.blocks if block.status == "rewritten")

    @property
    def refused(self) -> tuple[BlockReport, ...]:
        """The blocks that were left as they are; not those that run on our operators already."""
        return tuple(block for block in self.blocks if block.status == "refused")

    def summary(self) -> str:
        """One line: how many blocks were rewritten, and in what time."""
        if not self.blocks:
            return self.unseen or "no MoE block was found; the model is unchanged"
        already = sum(block.status == "already" for block in self.blocks)
        now = Counter(block.does_now for block in self.rewritten if block.now)
        said = []
        if already < len(self.blocks):
            said.append(
                f"{len(self.rewritten)} of {len(self.blocks) - already} MoE blocks rewritten in {self._all_seconds():.2f} s"
            )
        if waiting := sum(block.status == "waiting" for block in self.blocks):
            said.append(f"{_blocks(waiting)} not called yet")
        if already:
            said.append(f"{_blocks(already)} already run{'s' * (already == 1)} on hexa_fx's operators")
        for does, count in now.items():
            said.append(f"{count} of them {does if count == 1 else does.replace('runs its', 'run their')}")
        return "; ".join(said)

    def inside(self, path: str) -> OptimizationReport:
        """The report of a part, as the model says it that has the part at ``path``."""
        return replace(self, found=tuple(replace(block, path=inside(path, block.path)) for block in self.found))

    def _all_seconds(self) -> float:
        """With those of parts that were called alone."""
        return self.seconds + sum(block.seconds for block in self.blocks[len(self.found) :])

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
        from hexa_fx.inspection.report_page import report_page  # jinja2, for those who write pages

        target, plan = Path(path), "" if self.plan is None else self.plan.describe()
        target.write_text(report_page(self.blocks, self.summary(), plan, title), encoding="utf-8")
        return target

    def table(self) -> Table:
        """A table for a rich console."""
        from rich.table import Table

        table = Table("block", "status", "written as", "sizes", "expert", "weights", "error fwd / grad")
        for block in self.blocks:
            sizes = block.sizes if block.num_experts else ""
            weights = f"{block.weights} {block.layout}"
            table.add_row(block.name, block.state, block.idiom, sizes, block.expert, weights, error_text(block))
        return table

    def __repr__(self) -> str:
        return f"<OptimizationReport: {self.summary()}; print() it for details>"

    def __str__(self) -> str:
        lines = [self.summary(), *lines_of(self.blocks)]
        if self.plan is not None:
            lines += self.plan.describe().splitlines()
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """For notebooks: what `to_html` writes, without its header."""
        from hexa_fx.inspection.report_page import report_fragment

        return report_fragment(self.blocks, self.summary(), "" if self.plan is None else self.plan.describe())

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": str(self)}

    def print(self) -> None:
        """Prints a table, with the reasons below it, if the terminal has room for one; else lines of text."""
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


def _blocks(count: int) -> str:
    return f"{count} MoE block{'s' * (count != 1)}"


def with_forwards(
    report: OptimizationReport, installed: Mapping[str, HexaForward], model: nn.Module
) -> OptimizationReport:
    """The report with what was installed in ``model``, by block path, so that it can say what is so later."""
    for forward in installed.values():
        forward.within = weakref.ref(model)
    return replace(report, found=tuple(replace(b, forward=installed.get(b.path)) for b in report.found))


def with_compute(
    report: OptimizationReport, said: Mapping[str, str], whole: Collection[str] = ()
) -> OptimizationReport:
    """The report with what is said of the blocks' compute, by block path. Those in ``whole`` never run their own code."""

    def told(block: BlockReport) -> BlockReport:
        small = NEVER_SMALL if block.path in whole else block.small_tokens
        return replace(block, compute=said.get(block.path, ""), small_tokens=small)

    return replace(report, found=tuple(map(told, report.found)))


def with_plan(report: OptimizationReport, plan: Plan, graphs: Mapping[str, torch.fx.Graph]) -> OptimizationReport:
    """The report with a partition plan. ``graphs`` are the blocks' graphs with collectives, by path."""
    found = {path: tuple(op_name(n) for n in graph.nodes if is_exchange(n)) for path, graph in graphs.items()}
    paths = {layer.path for layer in plan.layers} | found.keys()

    def spread(block: BlockReport) -> BlockReport:
        cut = found.get(block.path, ())
        return replace(block, collectives=cut, devices=plan.world, small_tokens=NEVER_SMALL)

    blocks = tuple(spread(block) if block.path in paths else block for block in report.found)
    return replace(report, found=blocks, plan=plan)


def _wide_console() -> Any:
    """rich's console if standard output is a terminal with room for a table, else None."""
    if not sys.stdout.isatty():
        return None
    from rich.console import Console

    console = Console()
    return console if console.width >= 140 else None
