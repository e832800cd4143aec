"""``hexa-fx plan TARGET --hosts N``: over how many devices to split experts."""

from __future__ import annotations

from dataclasses import asdict

import typer

from hexa_fx.cli.common import echo_json
from hexa_fx.cli.prediction import layer_shapes
from hexa_fx.passes.partition.reach import Cluster, Reach, best, reaches

_HEAD = "   split over  replicas  mode             experts   exchange  gradients      total   state"


def show(target: str, tokens: int, cluster: Cluster, as_json: bool) -> None:
    """Prints every reach and the best one.

    Raises:
        InputError: there is no such target. PlanError: sizes are impossible, or nothing fits.
    """
    shapes = layer_shapes(target)
    found = reaches(shapes, tokens, cluster)
    chosen = best(found)
    if as_json:
        echo_json({"reaches": [asdict(r) | {"total": r.total} for r in found], "best": chosen.devices})
        return
    hosts = f"{cluster.hosts} host{'s' * (cluster.hosts > 1)} of {cluster.gpus} device{'s' * (cluster.gpus > 1)}"
    speeds = f"{cluster.inside / 1e9:g} GB/s inside, {cluster.between / 1e9:g} between"
    typer.echo(f"{target} on {hosts}, {speeds}; {tokens} tokens a step; ms of all layers ({len(shapes)})")
    typer.echo(_HEAD)
    for reach in found:
        typer.echo(_line(reach, reach is chosen))
    typer.echo(
        f"split experts over {chosen.devices}, data parallelism over {chosen.replicas}: init_device_mesh(device, "
        f'({chosen.replicas}, {chosen.devices}), mesh_dim_names=("data", "hexa"))'
    )


def _line(reach: Reach, chosen: bool) -> str:
    modes = ", ".join(mode.removesuffix("_centric") for mode in reach.modes) or "-"
    times = "".join(f"{1e3 * t:11.1f}" for t in (reach.experts, reach.exchange, reach.gradients, reach.total))
    fits = "" if reach.fits else "  does not fit"
    head = f" {'*' if chosen else ' '} {reach.devices:10} {reach.replicas:9}  {modes:11}"
    return f"{head} {times} {reach.state / 2**30:7.1f} GiB{fits}"
