"""``hexa-fx bench TARGET``"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer

from hexa_fx.cli.common import Json, Target, echo_json, errors_shown
from hexa_fx.errors import InputError

Repeat = Annotated[int, typer.Option("--repeat", help="Timed runs of each, taking turns; medians are printed.")]
Device = Annotated[str, typer.Option("--device", help="cpu or cuda.")]


@errors_shown
def bench(target: Target, repeat: Repeat = 9, device: Device = "cpu", as_json: Json = False) -> None:
    """Time a model against itself rewritten: forward, and forward with backward."""
    import torch

    from hexa_fx.api import attached, optimize
    from hexa_fx.targets import load

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"--device {device}: torch sees no GPU here; leave it out to run on the CPU")
    if repeat < 1:
        raise InputError(f"--repeat {repeat}: expected at least 1")
    model, inputs = load(target)
    model, inputs = model.to(device), _moved(inputs, device)
    rewritten = optimize(model, inputs)
    rows = []
    for what, run in (("forward", _forward), ("forward and backward", _step)):
        before, after = _medians([partial(run, m, inputs) for m in (model, rewritten)], repeat, device)
        rows.append((what, before * 1e3, after * 1e3))
    report = attached(rewritten, "report")
    if as_json:
        echo_json({"target": target, "device": device, "summary": report.summary(), "rows": _named(rows)})
        return
    typer.echo(report.summary())
    for what, before, after in rows:
        typer.echo(f"{what:21} {before:9.2f} -> {after:9.2f} ms  ({before / after:.2f}x)")


def _named(rows: list[tuple[str, float, float]]) -> list[dict[str, Any]]:
    return [{"what": what, "original_ms": before, "rewritten_ms": after} for what, before, after in rows]


def _medians(runs: list[Callable[[], Any]], repeat: int, device: str) -> list[float]:
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    for _ in range(repeat):
        for run, found in zip(runs, times):
            found.append(_timed(run, device))
    return [statistics.median(found) for found in times]


def _timed(run: Callable[[], Any], device: str) -> float:
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _called(model: Any, inputs: Any) -> Any:
    from hexa_fx.analysis import call_arguments

    args, kwargs = call_arguments(inputs)
    return model(*args, **kwargs)


def _forward(model: Any, inputs: Any) -> None:
    import torch

    with torch.no_grad():
        _called(model, inputs)


def _step(model: Any, inputs: Any) -> None:
    import torch
    from torch.utils import _pytree as pytree

    output = _called(model, inputs)
    values = pytree.tree_leaves(dict(output) if hasattr(output, "keys") else output)
    floats = [v for v in values if isinstance(v, torch.Tensor) and v.requires_grad]
    if not floats:
        raise InputError("the model's output has no tensor that wants a gradient, so there is no backward to time")
    wanted = [p for p in model.parameters() if p.requires_grad]
    torch.autograd.grad(sum(v.float().mean() for v in floats), wanted, allow_unused=True)  # type: ignore[arg-type]


def _moved(inputs: Any, device: str) -> Any:
    import torch
    from torch.utils import _pytree as pytree

    return pytree.tree_map(lambda v: v.to(device) if isinstance(v, torch.Tensor) else v, copy.copy(inputs))
