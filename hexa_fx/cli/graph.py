"""``hexa-fx graph TARGET``"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hexa_fx.cli.common import Arch, Json, Target, echo_json, errors_shown, fail, optimized
from hexa_fx.errors import named
from hexa_fx.targets import name_of

if TYPE_CHECKING:
    from hexa_fx.graphs import BlockGraphs


@errors_shown
def graph(
    target: Target,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page with the graphs before and after.")] = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="Write one stage as a picture.")] = None,
    dot: Annotated[Path | None, typer.Option("--dot", help="Write one stage for graphviz.")] = None,
    block: Annotated[str | None, typer.Option("--block", help="Path of the block. Default: the first one.")] = None,
    stage: Annotated[str, typer.Option("--stage", help="capture, rewrite, lower, fuse_activation, ...")] = "rewrite",
    arch: Arch = None,
    as_json: Json = False,
) -> None:
    """Draw a model's MoE blocks before and after, or print one stage of one of them."""
    from hexa_fx.attached import attached

    graphs = attached(optimized(target), "graphs")
    if not graphs:
        fail(
            f"no block of {target} was rewritten, so there is nothing to draw; `hexa-fx explain {target}` says why",
            as_json,
        )
    if block is not None and block not in graphs:
        fail(f"no rewritten block at {block!r}; there are {', '.join(map(repr, graphs))}", as_json)
    chosen = graphs[block if block is not None else next(iter(graphs))]
    written = []
    if html is not None:
        written.append(graphs.to_html(html, arch, name_of(target)))
    for path, text in ((svg, chosen.to_svg), (dot, chosen.to_dot)):
        if path is not None:
            path.write_text(text(stage), encoding="utf-8")
            written.append(path)
    if as_json:
        echo_json({"written": [str(path) for path in written], **_as_dict(chosen)})
        return
    for path in written:
        typer.echo(f"wrote {path}")
    if not written:
        typer.echo(f"## {named(chosen.path)}\n\n{chosen.stage(stage)}")


def _as_dict(chosen: BlockGraphs) -> dict[str, object]:
    stages = [
        {"name": s.name, "title": s.title, "operators": s.graph.counts, "difference": s.difference}
        for s in chosen.stages
    ]
    return {"block": chosen.path, "stages": stages}
