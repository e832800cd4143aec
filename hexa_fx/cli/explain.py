"""``hexa-fx explain TARGET``"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hexa_fx.cli.common import Arch, Json, Target, echo_json, errors_shown, optimized
from hexa_fx.errors import named

if TYPE_CHECKING:
    from hexa_fx.report import OptimizationReport


@errors_shown
def explain(
    target: Target,
    as_json: Json = False,
    html: Annotated[Path | None, typer.Option("--html", help="Write the report as a page.")] = None,
    graphs: Annotated[bool, typer.Option("--graphs", help="Print the graph after every pass too.")] = False,
    arch: Arch = None,
) -> None:
    """Say which MoE blocks of a model are rewritten and to what, what it costs, and why the others are not."""
    from hexa_fx.attached import attached

    model = optimized(target)
    report = attached(model, "report")
    if html is not None:
        typer.echo(f"wrote {report.to_html(html, target)}", err=True)
    if as_json:
        found = report.as_dict()
        if arch is not None:
            for block, entry in zip(report.blocks, found["blocks"]):
                entry["kernels"] = [
                    {"node": k.node, "name": k.name, "cached": k.cached} for k in block.kernels_on(arch)
                ]
        echo_json(found)
        return
    report.print()
    if arch is not None:
        _print_kernels(report, arch)
    if graphs:
        for path, block in attached(model, "graphs").items():
            typer.echo(f"\n## {named(path)}\n")
            block.print_readable()


def _print_kernels(report: OptimizationReport, arch: int) -> None:
    typer.echo(f"\nkernels on sm_{arch}:")
    seen: set[str] = set()
    for block in report.rewritten:
        for kernel in block.kernels_on(arch):
            if kernel.name not in seen:
                seen.add(kernel.name)
                typer.echo(f"  {kernel.name}" + (f": {kernel.fallback}" if kernel.fallback else ""))
