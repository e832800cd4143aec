"""Draws a graph as SVG with a layout of our own, or writes it in graphviz' dot language. Needs no other program."""

from __future__ import annotations

from html import escape
from itertools import pairwise

from hexa_fx.inspection.labels import Label, place_labels
from hexa_fx.inspection.layout import Rectangle, Route, lay_out
from hexa_fx.inspection.palette import COLOURS, GRADIENT, style
from hexa_fx.inspection.picture import Box, Picture, picture_of
from hexa_fx.inspection.view import GraphView

_CHARACTER, _SMALL, _PADDING = 8.5, 6.8, 20.0


def svg_of(graph: GraphView) -> str:
    """The picture of a graph."""
    return draw(picture_of(graph))


def draw(picture: Picture, standalone: bool = True) -> str:
    """A picture as SVG. Boxes carry ``data-node`` and ``data-keys``, arrows ``data-from`` and ``data-to``.

    One that does not stand alone takes its style and `GRADIENT` from the page.
    """
    boxes = {box.name: box for box in picture.boxes}
    layout = lay_out(picture, lambda name: _width(boxes[name]))
    width, height = f"{layout.width:.0f}", f"{layout.height:.0f}"
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" class="picture" {size} role="group" aria-label="graph">']
    if standalone:
        parts.append(
            f"<style>{style(True)}</style><rect class='paper' width='100%' height='100%' fill='#fff'/>{GRADIENT}"
        )
    parts += [_arrow(route) for route in layout.routes]
    parts += [_box(box, layout.places[box.name]) for box in picture.boxes]
    parts += [_label(label) for label in place_labels(layout)]
    return "\n".join([*parts, "</svg>"])


def dot_of(graph: GraphView, name: str = "graph") -> str:
    """The same picture for graphviz: ``dot -Tsvg``."""
    picture = picture_of(graph)
    lines = [f"digraph {_quoted(name)} {{", '  node [shape=box style="rounded,filled" fontname=Helvetica fontsize=11];']
    lines.append("  edge [fontname=Courier fontsize=9 color=gray50];")
    for box in picture.boxes:
        colour = COLOURS[box.role]
        fill = "#dcfce7" if box.role == "region" else colour.fill
        text = "\n".join(t for t in (_heading(box), box.subtitle) if t)
        lines.append(f'  {_quoted(box.name)} [label={_quoted(text)} fillcolor="{fill}" color="{colour.line}"];')
    for arrow in picture.arrows:
        lines.append(f"  {_quoted(arrow.source)} -> {_quoted(arrow.target)} [label={_quoted(arrow.label)}];")
    return "\n".join([*lines, "}"])


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _heading(box: Box) -> str:
    return f"{box.title}  ×{box.times}" if box.times > 1 else box.title


def _width(box: Box) -> float:
    return max(54.0, _CHARACTER * len(box.title) + _PADDING, _SMALL * len(box.subtitle) + _PADDING)


def _box(box: Box, place: Rectangle) -> str:
    colour = COLOURS[box.role]
    x, y = place.x - place.width / 2, place.y - place.height / 2
    radius = 14 if box.kind in ("input", "output") else 7
    rectangle = f'width="{place.width:.1f}" height="{place.height:.1f}" rx="{radius}" fill="{colour.fill}" stroke="{colour.line}"'
    behind = ""
    if box.times > 1:
        behind = f'<rect x="{x + 4:.1f}" y="{y + 4:.1f}" {rectangle} opacity=".55"/>'
    text = f'<text x="{place.x:.1f}" y="{place.y + (-3 if box.subtitle else 4.5):.1f}">{escape(box.title)}</text>'
    if box.subtitle:
        text += f'<text class="sub" x="{place.x:.1f}" y="{place.y + 12.5:.1f}">{escape(box.subtitle)}</text>'
    if box.times > 1:
        text += _badge(f"×{box.times}", x + place.width, y)
    said = ", ".join(part for part in (_heading(box), box.subtitle, colour.meaning) if part)
    attributes = f'data-node="{escape(box.name)}" data-role="{box.role}" data-keys="{escape(" ".join(box.keys))}"'
    shape = f'<rect x="{x:.1f}" y="{y:.1f}" {rectangle}/>'
    return f'<g class="box" {attributes} role="button" aria-label="{escape(said)}">{behind}{shape}{text}</g>'


def _badge(text: str, right: float, top: float) -> str:
    """How often a loop ran, on the corner of its box."""
    wide = 9 + 6.4 * len(text)
    shape = f'<rect class="times" x="{right - wide + 8:.1f}" y="{top - 8:.1f}" width="{wide:.1f}" height="16" rx="8"/>'
    return f'{shape}<text class="count" x="{right - wide / 2 + 8:.1f}" y="{top + 3.6:.1f}">{text}</text>'


def _arrow(route: Route) -> str:
    points = route.points
    x, y = points[-1]
    ends = [*points[:-1], (x, y - 6)]
    path = f"M{ends[0][0]:.1f},{ends[0][1]:.1f}" + "".join(_curve(a, b) for a, b in pairwise(ends))
    head = f"{x:.1f},{y:.1f} {x - 3.6:.1f},{y - 7:.1f} {x + 3.6:.1f},{y - 7:.1f}"
    arrow = route.arrow
    attributes = f'data-from="{escape(arrow.source)}" data-to="{escape(arrow.target)}"'
    title = f"<title>{escape(arrow.label)}</title>" if arrow.label else ""
    return f'<g class="arrow" {attributes}>{title}<path d="{path}" fill="none" stroke="#8d98a8"/><polygon points="{head}"/></g>'


def _curve(a: tuple[float, float], b: tuple[float, float]) -> str:
    if abs(a[0] - b[0]) < 0.5:
        return f"L{b[0]:.1f},{b[1]:.1f}"
    middle = (a[1] + b[1]) / 2
    return f"C{a[0]:.1f},{middle:.1f} {b[0]:.1f},{middle:.1f} {b[0]:.1f},{b[1]:.1f}"


def _label(label: Label) -> str:
    attributes = f'data-from="{escape(label.arrow.source)}"'
    return (
        f'<text class="label" {attributes} x="{label.x:.1f}" y="{label.y + 3.5:.1f}">{escape(label.arrow.name)}</text>'
    )
