"""Draws a graph as SVG with a layout of our own, or writes it in graphviz' dot language. Needs no other program."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise

from hexa_fx.inspection.layout import Layout, Place, Route, lay_out
from hexa_fx.inspection.picture import Box, Picture, picture_of
from hexa_fx.inspection.view import GraphView, Role

COLOURS: dict[Role, tuple[str, str, str]] = {
    "input": ("#f1f5f9", "#64748b", "inputs"),
    "weight": ("#fef9c3", "#ca8a04", "expert weights"),
    "router": ("#ede9fe", "#7c3aed", "router"),
    "dispatch": ("#dbeafe", "#2563eb", "dispatch: which rows go to which expert"),
    "up": ("#dcfce7", "#16a34a", "first projection"),
    "act": ("#ccfbf1", "#0d9488", "activation"),
    "down": ("#ffedd5", "#ea580c", "second projection"),
    "combine": ("#fce7f3", "#db2777", "combine: weighted sum over a token's experts"),
    "region": ("url(#region)", "#334155", "the whole mixture of experts"),
    "collective": ("#fee2e2", "#dc2626", "exchange between devices"),
    "other": ("#ffffff", "#94a3b8", "everything else"),
}
"""Fill, line and meaning of every role."""

_CHARACTER, _SMALL, _PADDING = 7.3, 5.9, 22.0

_PARTS: tuple[Role, ...] = ("dispatch", "up", "act", "down", "combine")
_STOPS = "".join(f'<stop offset="{i / 4}" stop-color="{COLOURS[part][0]}"/>' for i, part in enumerate(_PARTS))
_GRADIENT = f'<defs><linearGradient id="region">{_STOPS}</linearGradient></defs>'

STYLE = """
.box rect{stroke-width:1.3}
.box text{font:600 12px ui-sans-serif,system-ui,'Segoe UI',Helvetica,Arial,sans-serif;fill:#0f172a;text-anchor:middle}
.box text.sub{font:400 10px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#475569}
.box .times{fill:#0f172a}.box text.count{fill:#fff;font-size:10px}
.arrow path{fill:none;stroke:#94a3b8;stroke-width:1.2}
.arrow polygon{fill:#94a3b8}
.label{font:400 10px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#334155;text-anchor:middle;
 stroke:#fff;stroke-width:3.5px;paint-order:stroke;stroke-linejoin:round}
""".strip()


def svg_of(graph: GraphView, standalone: bool = True) -> str:
    """The picture of a graph; with its style inside if it is to stand alone."""
    return draw(picture_of(graph), standalone)


def draw(picture: Picture, standalone: bool = True) -> str:
    """A picture as SVG. Boxes carry ``data-node`` and ``data-keys``, arrows ``data-from`` and ``data-to``."""
    boxes = {box.name: box for box in picture.boxes}
    layout = lay_out(picture, lambda name: _width(boxes[name]))
    size = (
        f'width="{layout.width:.0f}" height="{layout.height:.0f}" viewBox="0 0 {layout.width:.0f} {layout.height:.0f}"'
    )
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">']
    if standalone:
        parts.append(f"<style>{STYLE}</style><rect width='100%' height='100%' fill='#fff'/>")
    parts.append(_GRADIENT)
    parts.append("<g class='drawing'>")
    parts += [_arrow(route) for route in layout.routes]
    parts += [_box(box, layout.places[box.name]) for box in picture.boxes]
    parts += _labels(layout)
    return "\n".join([*parts, "</g></svg>"])


def dot_of(graph: GraphView, name: str = "graph") -> str:
    """The same picture for graphviz: ``dot -Tsvg``."""
    picture = picture_of(graph)
    lines = [f"digraph {_quoted(name)} {{", '  node [shape=box style="rounded,filled" fontname=Helvetica fontsize=11];']
    lines.append("  edge [fontname=Courier fontsize=9 color=gray50];")
    for box in picture.boxes:
        fill, line, _ = COLOURS[box.role]
        fill = "#dcfce7" if box.role == "region" else fill
        text = "\n".join(t for t in (_heading(box), box.subtitle) if t)
        lines.append(f'  {_quoted(box.name)} [label={_quoted(text)} fillcolor="{fill}" color="{line}"];')
    for arrow in picture.arrows:
        lines.append(f"  {_quoted(arrow.source)} -> {_quoted(arrow.target)} [label={_quoted(arrow.label)}];")
    return "\n".join([*lines, "}"])


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _heading(box: Box) -> str:
    return f"{box.title}  ×{box.times}" if box.times > 1 else box.title


def _width(box: Box) -> float:
    return max(54.0, _CHARACTER * len(box.title) + _PADDING, _SMALL * len(box.subtitle) + _PADDING)


def _box(box: Box, place: Place) -> str:
    fill, line, _ = COLOURS[box.role]
    x, y = place.x - place.width / 2, place.y - place.height / 2
    radius = 12 if box.kind in ("input", "output") else 6
    rectangle = f'width="{place.width:.1f}" height="{place.height:.1f}" rx="{radius}" fill="{fill}" stroke="{line}"'
    behind = ""
    if box.times > 1:
        behind = f'<rect x="{x + 4:.1f}" y="{y + 4:.1f}" {rectangle} opacity=".55"/>'
    text = f'<text x="{place.x:.1f}" y="{place.y + (-3 if box.subtitle else 4):.1f}">{escape(box.title)}</text>'
    if box.subtitle:
        text += f'<text class="sub" x="{place.x:.1f}" y="{place.y + 12:.1f}">{escape(box.subtitle)}</text>'
    if box.times > 1:
        label, right = f"×{box.times}", x + place.width
        wide = 8 + 6.2 * len(label)
        text += (
            f'<rect class="times" x="{right - wide + 8:.1f}" y="{y - 8:.1f}" width="{wide:.1f}" height="16" rx="8"/>'
        )
        text += f'<text class="count" x="{right - wide / 2 + 8:.1f}" y="{y + 3.5:.1f}">{label}</text>'
    keys = escape(" ".join(box.keys))
    attributes = f'data-node="{escape(box.name)}" data-role="{box.role}" data-keys="{keys}"'
    return f'<g class="box" {attributes}>{behind}<rect x="{x:.1f}" y="{y:.1f}" {rectangle}/>{text}</g>'


def _arrow(route: Route) -> str:
    points = route.points
    x, y = points[-1]
    ends = [*points[:-1], (x, y - 6)]
    path = f"M{ends[0][0]:.1f},{ends[0][1]:.1f}" + "".join(_curve(a, b) for a, b in pairwise(ends))
    head = f"{x:.1f},{y:.1f} {x - 3.6:.1f},{y - 7:.1f} {x + 3.6:.1f},{y - 7:.1f}"
    arrow = route.arrow
    attributes = f'data-from="{escape(arrow.source)}" data-to="{escape(arrow.target)}"'
    title = f"<title>{escape(arrow.label)}</title>" if arrow.label else ""
    return f'<g class="arrow" {attributes}>{title}<path d="{path}"/><polygon points="{head}"/></g>'


def _curve(a: tuple[float, float], b: tuple[float, float]) -> str:
    if abs(a[0] - b[0]) < 0.5:
        return f"L{b[0]:.1f},{b[1]:.1f}"
    middle = (a[1] + b[1]) / 2
    return f"C{a[0]:.1f},{middle:.1f} {b[0]:.1f},{middle:.1f} {b[0]:.1f},{b[1]:.1f}"


def _labels(layout: Layout) -> list[str]:
    """The type of every value, once, beside the first part of its arrow; moved down if it would cover another."""
    found, seen, taken = [], set[tuple[str, str]](), list[tuple[float, float, float]]()
    for route in layout.routes:
        arrow = route.arrow
        if not arrow.label or (arrow.source, arrow.name) in seen:
            continue
        seen.add((arrow.source, arrow.name))
        (x1, y1), (x2, y2) = route.points[0], route.points[1]
        half = _SMALL * len(arrow.label) / 2
        share = _free_share(x1, y1, x2, y2, half, taken)
        x, y = x1 + (x2 - x1) * _eased(share), y1 + (y2 - y1) * share
        taken.append((x, y, half))
        attributes = f'data-from="{escape(arrow.source)}"'
        found.append(f'<text class="label" {attributes} x="{x:.1f}" y="{y + 3:.1f}">{escape(arrow.label)}</text>')
    return found


def _eased(share: float) -> float:
    return share * share * (3 - 2 * share)


def _free_share(
    x1: float, y1: float, x2: float, y2: float, half: float, taken: Sequence[tuple[float, float, float]]
) -> float:
    for share in (0.45, 0.7, 0.22, 0.58, 0.85):
        x, y = x1 + (x2 - x1) * _eased(share), y1 + (y2 - y1) * share
        if all(abs(y - ty) > 10 or abs(x - tx) > half + th for tx, ty, th in taken):
            return share
    return 0.45
