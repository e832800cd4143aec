"""The command line: ``hexa-fx explain TARGET``, ``hexa-fx demo``, ``hexa-fx env``."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from hexa_fx.errors import HexaError

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Rewrites MoE code into exact expert-specific operators."
)

Target = Annotated[
    str,
    typer.Argument(
        help="MODULE:FACTORY, a function that returns (model, example_inputs); or the model type of a transformers "
        "architecture, such as mixtral, which is built with tiny widths."
    ),
]


@app.command()
def explain(
    target: Target,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    graphs: Annotated[bool, typer.Option("--graphs", help="Print the rewritten and lowered graphs too.")] = False,
) -> None:
    """Say which MoE blocks of a model would be rewritten, and why the others would not."""
    from hexa_fx.api import optimize
    from hexa_fx.targets import load

    try:
        model, inputs = load(target)
        optimized = optimize(model, inputs)
    except HexaError as error:
        typer.echo(f"hexa-fx: {error}", err=True)
        raise typer.Exit(2) from error
    report = optimized.__dict__["report"]
    if json:
        typer.echo(report.to_json())
        return
    report.print()
    if graphs:
        for path, block in optimized.__dict__["graphs"].items():
            typer.echo(f"\n# {path}\n{block}")


@app.command()
def demo() -> None:
    """Rewrite a small transformers Mixtral on the CPU and compare it with the original."""
    from hexa_fx.demo import run

    run()


@app.command()
def env() -> None:
    """Versions, for bug reports."""
    import torch

    typer.echo(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for package in ("hexa-fx", "torch", "nvidia-cutlass", "transformers", "networkx"):
        typer.echo(f"{package} {_version(package)}")
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    typer.echo(f"CUDA {torch.version.cuda or 'none'}, devices: {', '.join(devices) or 'none'}")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
