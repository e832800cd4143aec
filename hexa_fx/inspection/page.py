"""A self-contained HTML page: a block's stages side by side, linked by provenance, with the generated CUDA text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hexa_fx.codegen.render import included
from hexa_fx.inspection.costs import Costs, of_mixture
from hexa_fx.inspection.files import asset, render, styles
from hexa_fx.inspection.kernels import KernelUse
from hexa_fx.inspection.palette import COLOURS, GRADIENT, legend_style, style
from hexa_fx.inspection.picture import Picture, picture_of
from hexa_fx.inspection.stages import Stage
from hexa_fx.inspection.svg import draw
from hexa_fx.inspection.text import amount, cost_rows
from hexa_fx.inspection.view import NodeView
from hexa_fx.ir import Refusal

SCRIPTS = ("theme.js", "highlight.js", "page.js", "detail.js", "moving.js")


@dataclass(frozen=True)
class PageBlock:
    """One block of the page.

    Args:
        path: the block's path in the model.
        facts: (name, value) pairs for the heading.
        stages: what to show.
        kernels: the kernels that it runs on, and card: the GPU that they are for.
        same: paths of identical blocks.
        costs: what the block costs before and after; None if that is not known.
    """

    path: str
    facts: Sequence[tuple[str, str]]
    stages: Sequence[Stage]
    kernels: Sequence[KernelUse] = ()
    card: str = ""
    same: Sequence[str] = ()
    costs: Costs | None = None


def page(blocks: Sequence[PageBlock], title: str, left: Sequence[Refusal] = ()) -> str:
    """The page as HTML, which loads nothing from the network. ``left``: blocks that were left as they are."""
    pictures = [{stage.name: picture_of(stage.graph) for stage in block.stages} for block in blocks]
    sources = {kernel.spec: kernel.source for block in blocks for kernel in block.kernels if kernel.spec}
    numbers = {spec: str(number) for number, spec in enumerate(sources)}
    data: dict[str, Any] = {
        str(number): _block(block, pictures[number], numbers) for number, block in enumerate(blocks)
    }
    data["sources"] = {numbers[spec]: text for spec, text in sources.items()}
    data["headers"] = included(sources.values())
    shown = [
        {
            "path": block.path,
            "same": block.same,
            "stages": [{"name": s.name, "svg": draw(pictures[number][s.name], standalone=False)} for s in block.stages],
        }
        for number, block in enumerate(blocks)
    ]
    used = {box.role for by_stage in pictures for picture in by_stage.values() for box in picture.boxes}
    return render(
        "page.html.j2",
        title=title,
        blocks=shown,
        left=left,
        css="\n".join([style(standalone=False), legend_style(), styles("page.css")]),
        js="\n".join(asset(name) for name in SCRIPTS),
        logo=asset("logo.svg"),
        gradient=GRADIENT,
        legend=[(role, colour.meaning) for role, colour in COLOURS.items() if role in used and role != "region"],
        data=json.dumps(data).replace("</", "<\\/"),
    )


def _block(block: PageBlock, pictures: Mapping[str, Picture], numbers: Mapping[str, str]) -> dict[str, Any]:
    return {
        "facts": list(block.facts),
        "stages": [_stage(stage, pictures[stage.name]) for stage in block.stages],
        "kernels": list(_kernels(block, numbers)),
        "card": block.card,
        "score": cost_rows(block.costs),
    }


def _stage(stage: Stage, picture: Picture) -> dict[str, Any]:
    times = {box.name: box.times for box in picture.boxes}
    return {
        "name": stage.name,
        "short": stage.name.removesuffix("_backward"),
        "direction": stage.direction,
        "title": stage.title,
        "difference": stage.difference,
        "count": sum(stage.graph.counts.values()),
        "totals": _totals(stage),
        "code": stage.graph.readable(),
        "nodes": {n.name: _node(n, times[n.name]) for n in stage.graph.nodes if n.name in times},
    }


def _totals(stage: Stage) -> list[tuple[str, str]]:
    """(value, unit) pairs. What one tile costs depends on the tile, so that its graph has no costs."""
    count, _, unit = stage.graph.size.partition(" ")
    found = [(count, unit)]
    flops, moved = of_mixture(stage.graph)
    if flops:
        found.append((amount(flops, "FLOP"), "in the experts' products"))
    if moved:
        found.append((amount(moved, "B"), "moved"))
    return found


def _node(node: NodeView, times: int) -> dict[str, Any]:
    facts: dict[str, Any] = {"op": node.op, "times": times, "types": ", ".join(str(t) for t in node.types if t)}
    facts.update({"detail": node.detail} if node.detail else {})
    facts.update({"flops": node.flops} if node.flops else {})
    facts.update({"moved": node.moved} if node.moved else {})
    if node.where is not None:
        facts.update(where=f"{node.where.file}:{node.where.line}", code=node.where.code)
    return facts


def _kernels(block: PageBlock, numbers: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    keys: dict[tuple[str, str], set[str]] = {}
    for stage in block.stages:
        if stage.name.startswith("fuse_activation"):
            keys.update({(stage.direction, node.name): set(node.keys) for node in stage.graph.nodes})
    for kernel in block.kernels:
        linked = keys.get((kernel.direction, kernel.node), set())
        yield {
            "name": kernel.name,
            "direction": kernel.direction,
            "operator": kernel.operator,
            "fallback": kernel.fallback,
            "source": numbers.get(kernel.spec),
            "keys": sorted(key for key in linked if key.startswith("l:") or kernel.direction == "forward"),
        }
