"""The paper's experiments, one command each.

    python -m benchmarks.swin_moe memory | latency | crossover | heterogeneity | ablation_memory | ablation_latency
    python -m benchmarks.swin_moe saturated | convergence | all
    python -m benchmarks.swin_moe memory --tiny          # seconds, on the CPU over Gloo
    python -m benchmarks.swin_moe plot | docs            # pictures, and the tables of docs/swin_moe.md, from the JSON

Starts its own ranks, one a GPU (memory and heterogeneity: 2, latency and crossover: 4, or what there is). Writes
benchmarks/results/swin_<experiment>.json, case by case.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.multiprocessing as mp

from benchmarks.swin_moe.experiments import ALL, experiments
from benchmarks.swin_moe.ranks import rank_main

RESULTS = Path(__file__).parents[1] / "results"


def launch(names: tuple[str, ...], options: argparse.Namespace) -> None:
    """Runs experiments of the same number of ranks in one set of processes."""
    world = ranks(names[0], options)
    if world == 1:
        rank_main(0, 1, "", names, options)
        return
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.set_forkserver_preload(["benchmarks.swin_moe.ranks"])  # imports torch once
        mp.start_processes(
            rank_main, (world, f"{folder}/store", names, options), nprocs=world, start_method="forkserver"
        )


def ranks(name: str, options: argparse.Namespace) -> int:
    """As many as the experiment wants, at most as many as there are GPUs; two on a CPU."""
    wanted = experiments(options.tiny)[name][0]
    there = torch.cuda.device_count() if options.device == "cuda" else 2
    return options.world or min(wanted, there)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", nargs="+", choices=(*experiments(False), "all", "plot", "docs"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--world", type=int, help="ranks")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--tiny", action="store_true", help="a tiny Swin on the CPU, to try the scripts")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no case later than this")
    parser.add_argument("--timeout", type=float, default=120.0, help="of a collective, in seconds")
    parser.add_argument("--tag", default="", help="appended to the names of the JSON files")
    options = parser.parse_args()
    first = options.experiment[0]
    if first in ("plot", "docs"):
        from benchmarks.swin_moe import docs, plot

        {"plot": plot.main, "docs": docs.main}[first](options.out)
        return
    if options.tiny:
        options.device = "cpu"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options.end = time.monotonic() + options.seconds
    names = ALL if first == "all" else tuple(options.experiment)
    for world in sorted({ranks(name, options) for name in names}, reverse=True):
        launch(tuple(name for name in names if ranks(name, options) == world), options)


if __name__ == "__main__":
    main()
