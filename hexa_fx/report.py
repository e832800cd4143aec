"""What `optimize` and `explain` found and did, as a value that prints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from hexa_fx.ir import SourceLocation

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
        expert: the expert function, e.g. ``silu(x Wg) * (x Wu) Wd``.
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
    """Every block that looked like MoE, in model order."""

    blocks: tuple[BlockReport, ...]
    seconds: float = 0.0

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
        table = Table("block", "status", "idiom", "E", "k", "D", "I", "expert", "weights", "max error fwd / grad")
        for block in self.blocks:
            sizes = [str(n or "") for n in (block.num_experts, block.top_k, block.hidden_size, block.intermediate_size)]
            table.add_row(block.path, block.status, block.idiom, *sizes, block.expert, block.weights, _errors(block))
        return table

    def __str__(self) -> str:
        lines = [self.summary()]
        lines += _lines(self.blocks)
        return "\n".join(lines)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": str(self)}

    def print(self) -> None:
        """To the terminal, as a table and the reasons below it."""
        console = Console()
        console.print(self.table())
        for line in _reasons(self.blocks):
            console.print(line, highlight=False)
        console.print(self.summary())


def _errors(block: BlockReport) -> str:
    if block.same_as:
        return f"as {block.same_as}"
    return f"{block.check.forward_error:.1e} / {block.check.gradient_error:.1e}" if block.check else ""


def _lines(blocks: tuple[BlockReport, ...]) -> Iterator[str]:
    for block in blocks:
        if block.status == "refused":
            continue
        sizes = f"E={block.num_experts} k={block.top_k} D={block.hidden_size} I={block.intermediate_size}"
        checked = f", checked: {_errors(block)}" if _errors(block) else ", not checked"
        yield f"  {block.path or '(model)'}: {block.idiom}, {sizes}, {block.expert}, {block.weights} weights{checked}"
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
