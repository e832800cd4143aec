"""Colours of the roles in light and in dark, and the style that all pictures share."""

from __future__ import annotations

from dataclasses import dataclass

from hexa_fx.inspection.view import Role


@dataclass(frozen=True)
class Colour:
    """Fill and line on white and on black, and what the role means."""

    fill: str
    line: str
    dark_fill: str
    dark_line: str
    meaning: str


COLOURS: dict[Role, Colour] = {
    "input": Colour("#eef2f7", "#64748b", "#1d2530", "#8492a6", "inputs"),
    "weight": Colour("#fdf3d0", "#b98a12", "#33290c", "#d9a928", "expert weights"),
    "router": Colour("#ece7fd", "#7350dd", "#2a2148", "#a48bf5", "router"),
    "dispatch": Colour("#dfebfe", "#2f6fe0", "#14284a", "#6ea4f8", "dispatch"),
    "up": Colour("#dcf5e4", "#1c9650", "#11321f", "#4cc883", "first projection"),
    "act": Colour("#d3f5ef", "#0f857a", "#0b332f", "#3cc9bb", "activation"),
    "down": Colour("#fde7d3", "#d0611a", "#3a2010", "#f2914f", "second projection"),
    "combine": Colour("#fce3ef", "#cb357c", "#3c1529", "#f07bb4", "combine"),
    "region": Colour("url(#region)", "#334155", "url(#region)", "#aab6c8", "the whole mixture of experts"),
    "collective": Colour("#fde0e0", "#cf3434", "#3f1414", "#f37272", "exchange between devices"),
    "other": Colour("#ffffff", "#8d98a8", "#171c24", "#697688", "everything else"),
}

PARTS: tuple[Role, ...] = ("dispatch", "up", "act", "down", "combine")
"""What the box of a whole mixture stands for, in order: the stops of its fill."""

_STOPS = "".join(
    f'<stop class="{part}" offset="{i / 4}" stop-color="{COLOURS[part].fill}"/>' for i, part in enumerate(PARTS)
)
GRADIENT = f'<defs><linearGradient id="region">{_STOPS}</linearGradient></defs>'

_SANS = "ui-sans-serif,system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif"
_MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
_LIGHT = f"""
.picture .paper{{fill:#fff}}
.picture rect{{stroke-width:1.3}}
.picture text{{font:600 13px {_SANS};fill:#131820;text-anchor:middle}}
.picture text.sub{{font:400 11px {_MONO};fill:#4a5565}}
.picture .times{{fill:#131820;stroke:none}}.picture text.count{{fill:#fff;font-size:10.5px}}
.picture .arrow path{{fill:none;stroke:#8d98a8;stroke-width:1.3}}
.picture .arrow polygon{{fill:#8d98a8}}
.picture text.label{{font:400 10.5px {_MONO};fill:#3a4555;stroke:#fff;stroke-width:4px;paint-order:stroke;stroke-linejoin:round}}
""".strip()
_DARK = [
    (".picture .paper", "fill:#12161d"),
    (".picture text", "fill:#e7ecf3"),
    (".picture text.sub", "fill:#a9b5c6"),
    (".picture .times", "fill:#e7ecf3"),
    (".picture text.count", "fill:#12161d"),
    (".picture .arrow path", "stroke:#697688"),
    (".picture .arrow polygon", "fill:#697688"),
    (".picture text.label", "fill:#c3cddb;stroke:#12161d"),
    *(
        (f'.picture .box[data-role="{role}"]>rect:not(.times)', f"fill:{colour.dark_fill};stroke:{colour.dark_line}")
        for role, colour in COLOURS.items()
    ),
    *((f".picture stop.{part}", f"stop-color:{COLOURS[part].dark_fill}") for part in PARTS),
]


def style(standalone: bool) -> str:
    """The style sheet of pictures: one that stands alone is dark where the system is, one on a page where the page is."""
    if standalone:
        rules = "".join(f"{name}{{{what}}}" for name, what in _DARK)
        return f"{_LIGHT}\n@media(prefers-color-scheme:dark){{{rules}}}"
    return "\n".join([_LIGHT, *(f"html[data-theme=dark] {name}{{{what}}}" for name, what in _DARK)])


def legend_style() -> str:
    """The colours of a page's legend."""
    rows = []
    for role, colour in COLOURS.items():
        name = f'#legend [data-role="{role}"] i'
        rows.append(f"{name}{{background:{colour.fill};border-color:{colour.line}}}")
        rows.append(f"html[data-theme=dark] {name}{{background:{colour.dark_fill};border-color:{colour.dark_line}}}")
    return "\n".join(rows)
