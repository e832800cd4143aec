"""The files that pages are made of: templates, styles and scripts, all of which go into the page itself."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jinja2

ASSETS = Path(__file__).parent / "assets"


def render(template: str, **values: Any) -> str:
    """One of the templates, filled in."""
    return _environment().get_template(template).render(**values)


def styles(*names: str) -> str:
    """Style sheets, after the one that all pages have."""
    return "\n".join([render("base.css"), *(asset(name) for name in names)])


def asset(name: str) -> str:
    """A file as it is."""
    return (ASSETS / name).read_text(encoding="utf-8").strip()


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
