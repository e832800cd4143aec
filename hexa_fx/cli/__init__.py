"""The command line, one module a command. ``python -m hexa_fx`` and ``hexa-fx`` are the same."""

from __future__ import annotations

import typer

from hexa_fx.cli import bench, cache, demo, env, explain, graph, kernels, plan

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Rewrites MoE code into exact expert-specific operators. TARGET is MODULE:FACTORY, FILE.py:FACTORY, a transformers "
    "model type such as mixtral, or a folder with a config.json.",
)

for command in (explain.explain, graph.graph, plan.plan, bench.bench, demo.demo, env.env):
    app.command()(command)
app.add_typer(kernels.app, name="kernels")
app.add_typer(cache.app, name="cache")
