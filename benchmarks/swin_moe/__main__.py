"""The paper's experiments, one command each.

    python -m benchmarks.swin_moe memory | latency | crossover | heterogeneity | ablation_memory | ablation_latency
    python -m benchmarks.swin_moe saturated | convergence | all
    python -m benchmarks.swin_moe memory --tiny          # seconds, on the CPU over Gloo
    python -m benchmarks.swin_moe collect FOLDER         # what gpu.sh left there becomes benchmarks/results
    python -m benchmarks.swin_moe plot | docs            # pictures, and the tables of docs/swin_moe.md, from the JSON

Starts its own ranks, one a GPU (memory and heterogeneity: 2, latency and crossover: 4, or what there is). Writes
benchmarks/results/swin_<experiment>.json, case by case. Ranks that die or hang are replaced, and the others go on after the case
that was under way.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from benchmarks.swin_moe.collect import collect
from benchmarks.swin_moe.experiments import ALL, RECORDED, experiments
from benchmarks.swin_moe.journal import Journal
from benchmarks.swin_moe.ranks import rank_main

RESULTS = Path(__file__).parents[1] / "results"
MOST_SETS = 6
"""Of ranks, in one run."""


def launch(names: tuple[str, ...], options: argparse.Namespace) -> None:
    """Runs experiments of the same number of ranks, in as many sets of processes as it takes."""
    world = ranks(names[0], options)
    journal = Journal(options.out, options.tag, tuple({file for name in names for file in RECORDED[name]}))
    journal.clear()
    multiprocessing.set_forkserver_preload(["benchmarks.swin_moe.ranks"])  # imports torch once
    between = 0  # failures outside of any case
    for _ in range(MOST_SETS):
        reason = one_set(world, names, options, journal)
        if reason is None:
            return
        print(f"ranks ended early: {reason}", flush=True)
        between += not journal.record_failure(reason)
        if between > 1:
            break
    print(f"gave up: {' '.join(names)}", flush=True)


def one_set(world: int, names: tuple[str, ...], options: argparse.Namespace, journal: Journal) -> str | None:
    """Runs what is not recorded yet. Returns None, or why its ranks ended."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world, f"{folder}/store", names, options)
        context: Any = mp.start_processes(rank_main, arguments, nprocs=world, join=False, start_method="forkserver")
        try:
            while not context.join(timeout=0.5):
                if journal.seconds() > options.case_seconds:
                    for process in context.processes:
                        process.kill()
                    return f"no end after {options.case_seconds:.0f} s"
        except mp.ProcessRaisedException as error:
            print(error, flush=True)
            return said(str(error))
        except mp.ProcessExitedException as error:
            return str(error)
    return None


def said(trace: str) -> str:
    """The error at the end of a trace. CUDA's go on for several lines of advice."""
    errors = [line for line in trace.splitlines() if re.match(r"[A-Za-z_.]+(Error|Exception|Exit)\b", line)]
    return errors[-1] if errors else trace.strip().splitlines()[-1]


def ranks(name: str, options: argparse.Namespace) -> int:
    """As many as the experiment wants, at most as many as there are GPUs; two on a CPU."""
    wanted = experiments(options.tiny, options.variant)[name][0]
    there = torch.cuda.device_count() if options.device == "cuda" else 2
    return options.world or min(wanted, there)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "experiment", nargs="+", help="; ".join((*experiments(False), "all", "collect", "plot", "docs"))
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--world", type=int, help="ranks")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--tiny", action="store_true", help="a tiny Swin on the CPU, to try the scripts")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no case later than this")
    parser.add_argument("--until", type=float, default=float("inf"), help="the same, in seconds since 1970")
    parser.add_argument("--case-seconds", type=float, default=300.0, help="after which a case has hung")
    parser.add_argument("--variant", type=int, help="of convergence: this one only")
    parser.add_argument(
        "--top-k", type=int, nargs="*", default=[], help="only cases that route a token to so many experts"
    )
    parser.add_argument("--timeout", type=float, default=120.0, help="of a collective, in seconds")
    parser.add_argument("--tag", default="", help="appended to the names of the JSON files")
    options = parser.parse_args()
    first = options.experiment[0]
    if first in ("plot", "docs"):
        from benchmarks.swin_moe import docs, plot

        {"plot": plot.main, "docs": docs.main}[first](options.out)
        return
    if first == "collect":
        collect(Path(options.experiment[1]), options.out)
        return
    unknown = set(options.experiment) - {*experiments(False), "all"}
    if unknown:
        parser.error(f"no experiment is called {sorted(unknown)}; there are {', '.join(experiments(False))}")
    if options.tiny:
        options.device = "cpu"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options.end = min(time.time() + options.seconds, options.until)
    names = ALL if first == "all" else tuple(options.experiment)
    for world in sorted({ranks(name, options) for name in names}, reverse=True):
        launch(tuple(name for name in names if ranks(name, options) == world), options)


if __name__ == "__main__":
    main()
