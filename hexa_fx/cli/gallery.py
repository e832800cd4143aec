"""``hexa-fx gallery --out DIR``"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hexa_fx.cli.common import Arch, errors_shown, optimized
from hexa_fx.errors import InputError

TYPES = "mixtral qwen3_moe deepseek_v3 gpt_oss olmoe granitemoe glm4_moe ernie4_5_moe phimoe jamba"


@errors_shown
def gallery(
    out: Annotated[Path, typer.Option("--out", help="Folder to write to; made if it is not there.")],
    types: Annotated[
        str, typer.Option("--types", help="transformers model types, with commas between them.")
    ] = ",".join(TYPES.split()),
    arch: Arch = None,
) -> None:
    """Write pages of graphs and reports of known models, built with tiny widths, and a page that leads to them."""
    from hexa_fx.inspection.gallery_page import Exhibit, gallery_page

    names = [name.strip() for name in types.split(",") if name.strip()]
    if not names:
        raise InputError("--types names no model type; give some, e.g. --types mixtral,qwen3_moe")
    out.mkdir(parents=True, exist_ok=True)
    exhibits = []
    for name in names:
        model = optimized(name)
        graphs = f"{name}.html" if model.graphs else ""
        if graphs:
            model.graphs.to_html(out / graphs, arch, name)
        model.report.to_html(out / f"{name}_report.html", name)
        exhibits.append(Exhibit(name, model.report.blocks, graphs, f"{name}_report.html"))
        typer.echo(f"{name}: {model.report.summary()}")
    index = out / "index.html"
    index.write_text(gallery_page(exhibits), encoding="utf-8")
    typer.echo(f"wrote {index}")
