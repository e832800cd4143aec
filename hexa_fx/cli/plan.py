"""``hexa-fx plan TARGET``"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

import typer

from hexa_fx.cli import reach
from hexa_fx.cli.common import Json, Target, check_range, check_unused, echo_json, errors_shown
from hexa_fx.cli.prediction import Machine, Predicted, PredictedMemory, memory_of, predict
from hexa_fx.errors import InputError, named
from hexa_fx.passes.partition.reach import Cluster
from hexa_fx.plan import Plan
from hexa_fx.targets import default_sizes

Capacities = Annotated[
    str,
    typer.Option(
        "--seconds",
        "--capacities",
        help="Seconds, not speeds: what the same task takes on every device. 1,1,2: the third is half as fast.",
    ),
]
Strategy = Annotated[str, typer.Option("--strategy", help="auto, data or model.")]
Batch = Annotated[
    int | None,
    typer.Option("--batch", help="Samples of the global batch, shared out by speed. Default: 64, or one a token."),
]
GlobalTokens = Annotated[int, typer.Option("--tokens", help="Tokens of the global batch in one forward.")]
Slots = Annotated[int, typer.Option("--slots", help="Slots of the shared weight cache, 1 or 2.")]
Bandwidth = Annotated[float, typer.Option("--bandwidth", help="GB/s that a device receives in a collective.")]
Hosts = Annotated[
    int | None,
    typer.Option("--hosts", help="Hosts: prints over how many devices to split instead of a plan of equal links."),
]
Gpus = Annotated[int, typer.Option("--gpus", help="With --hosts: devices of each.")]
Inside = Annotated[
    float, typer.Option("--inside", help="With --hosts: GB/s that a device receives from its host's others.")
]
Between = Annotated[
    float,
    typer.Option(
        "--between", help="With --hosts: GB/s that a device receives from other hosts, its part of the network cards."
    ),
]
Gib = Annotated[
    float, typer.Option("--memory", help="GiB of each device for experts; with --hosts for their optimizer state, too.")
]
Tflops = Annotated[float, typer.Option("--tflops", help="TFLOP/s of the fastest device in the experts' products.")]


@errors_shown
def plan(
    context: typer.Context,
    target: Target,
    capacities: Capacities = "1,1",
    strategy: Strategy = "auto",
    batch: Batch = None,
    tokens: GlobalTokens = 16384,
    slots: Slots = 2,
    bandwidth: Bandwidth = 300.0,
    tflops: Tflops = 400.0,
    hosts: Hosts = None,
    gpus: Gpus = 8,
    inside: Inside = 400.0,
    between: Between = 50.0,
    memory: Gib = 80.0,
    as_json: Json = False,
) -> None:
    """Print how a model's MoE layers would be spread over unequal devices: shard sizes and predicted times. Needs no GPU.

    A model type or a folder is planned at its full widths; its weights are never made. With --hosts it prints up to where experts
    should be split, and from where on data parallelism takes over.
    """
    for name, rate, most, unit in (
        ("bandwidth", bandwidth, 1e5, "GB/s"),
        ("tflops", tflops, 1e6, "TFLOP/s"),
        ("inside", inside, 1e5, "GB/s"),
        ("between", between, 1e5, "GB/s"),
        ("memory", memory, 1e5, "GiB"),
    ):
        check_range(name, rate, 1e-3, most, unit)
    check_range("tokens", tokens, 1, 2**31 - 1)
    check_range("gpus", gpus, 1, 1024)
    check_range("hosts", 1 if hosts is None else hosts, 1, 2**16)
    batch = min(64, tokens) if batch is None else batch
    check_range("batch", batch, 1, min(2**20, tokens), "samples, each of a token or more")
    if hosts is None:
        check_unused(context, _OF_HOSTS, "goes with --hosts N; give both")
    else:
        check_unused(context, _OF_A_PLAN, "is for a plan without --hosts; leave one of them out")
    if slots not in (1, 2):
        raise InputError(f"--slots {slots}: expected 1 or 2")
    if hosts is not None:
        cluster = Cluster(hosts, gpus, inside * 1e9, between * 1e9, tflops * 1e12, memory=memory * 2**30)
        reach.show(target, tokens, cluster, as_json)
        return
    times = _times(capacities)
    if strategy not in ("auto", "data", "model"):
        raise InputError(f"--strategy {strategy!r}: expected auto, data or model")
    machine = Machine(bandwidth * 1e9, tflops * 1e12)
    chosen = cast(Literal["auto", "data", "model"], strategy)
    made, layers = predict(target, times, chosen, batch=batch, tokens=tokens, slots=slots, machine=machine)
    held = memory_of(made, layers)
    if as_json:
        predicted = [layer.as_dict() for layer in layers]
        echo_json({"plan": json.loads(made.to_json()), "predicted": predicted, "memory": held.as_dict()})
        return
    _print(target, made, layers, tokens)
    _print_memory(held, memory)


_OF_HOSTS = ("gpus", "inside", "between")
_OF_A_PLAN = ("capacities", "strategy", "batch", "slots", "bandwidth")


def _times(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--seconds {text!r}: expected numbers separated by commas, e.g. 1,1,2") from None
    if not 2 <= len(found) <= 1024:
        raise InputError(f"--seconds {text[:50]!r}: expected one number per device, at least two, e.g. 1,2")
    if not all(0 < each < float("inf") for each in found):
        raise InputError(f"--seconds {text!r}: expected seconds above 0, e.g. 1,2")
    if max(found) / min(found) > 1000:
        raise InputError(
            f"--seconds {text!r}: {max(found):g} is over 1000 times {min(found):g}; give all in one unit, and leave out a "
            "device that is so slow"
        )
    return found


def _print(target: str, made: Plan, layers: tuple[Predicted, ...], tokens: int) -> None:
    default = default_sizes(target)
    if default:
        typer.echo(
            f"transformers' default configuration of {target}: {default}. For a published model give a folder with its config.json"
        )
    typer.echo(f"{target} over {made.world} devices, {tokens} tokens a step; plan {made.fingerprint}")
    typer.echo(f"seconds of the same task t_i  {list(made.capacities)} (more is slower)")
    typer.echo(f"samples of the batch     B_i  {list(made.batch)}{_without(made.batch, 'samples', '--batch')}")
    groups: dict[Any, list[str]] = {}
    for layer in layers:
        groups.setdefault(layer.like, []).append(layer.path)
    for layer in {layer.like: layer for layer in reversed(layers)}.values():
        _print_layer(layer, groups[layer.like])
    step = sum(layer.seconds for layer in layers)
    typer.echo(f"experts and their exchange, all layers, forward and backward: {step * 1e3:.1f} ms a step")


def _print_layer(layer: Predicted, paths: list[str]) -> None:
    shape = layer.shape
    gated = "gated " if shape.matrices == 3 else ""
    sizes = f"E={shape.num_experts} k={shape.top_k} D={shape.hidden_size} I={shape.intermediate_size}"
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    typer.echo(f"\n{named(paths[0])}{more}: {sizes}, {gated}experts, {layer.mode.replace('_', '-')}")
    typer.echo(f"  channels of I       h_i  {list(layer.shards)}{_without(layer.shards, 'channels')}")
    typer.echo("              received  exchange, exposed   experts         total   (forward and backward)")
    for mode, cost in layer.costs.items():
        chosen = "*" if mode == layer.mode else " "
        name = mode.removesuffix("_centric")
        typer.echo(
            f" {chosen} {name:6} {cost.bytes / 1e6:10.1f} MB {cost.exchange * 1e3:10.2f} ms {cost.experts * 1e3:10.2f} ms "
            f"{cost.total * 1e3:10.2f} ms"
        )


def _without(shares: Sequence[int], what: str, option: str = "") -> str:
    """A remark on devices that have no share, since theirs would be less than one."""
    idle = [str(number) for number, share in enumerate(shares) if not share]
    more = f", or give a larger {option}" if option else ""
    return f" (none for device {', '.join(idle)}, too slow for one of these {what}: leave it out{more})" if idle else ""


def _print_memory(memory: PredictedMemory, gib: float) -> None:
    typer.echo("\nmemory by device, half precision   " + "  ".join(f"{n:>8}" for n in range(len(memory.weights))))
    for name, values in memory.as_dict().items():
        typer.echo(f"  {name.replace('_', ' '):32} " + "  ".join(f"{value / 2**30:8.2f}" for value in values) + " GiB")
    held = [sum(values) / 2**30 for values in zip(*memory.as_dict().values())]
    typer.echo(f"  {'together':32} " + "  ".join(f"{value:8.2f}" for value in held) + " GiB")
    if over := [str(number) for number, value in enumerate(held) if value > gib]:
        typer.echo(
            f"does not fit on device {', '.join(over)}: more than --memory {gib:g} GiB; spread it over more devices"
        )
