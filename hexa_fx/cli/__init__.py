"""The command line, one module a command. ``python -m hexa_fx`` and ``hexa-fx`` are the same."""

from __future__ import annotations

from typing import Annotated

import typer

import hexa_fx
from hexa_fx.cli import bench, cache, demo, env, explain, gallery, graph, kernels, plan, tune

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Rewrites MoE code into exact expert-specific operators. TARGET is MODULE:FACTORY, FILE.py:FACTORY, a transformers "
    "model type such as mixtral, or a folder with a config.json.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hexa-fx {hexa_fx.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Options before the command."""


for command in (explain.explain, graph.graph, gallery.gallery, plan.plan, bench.bench, tune.tune, demo.demo, env.env):
    app.command()(command)
app.add_typer(kernels.app, name="kernels")
app.add_typer(cache.app, name="cache")
