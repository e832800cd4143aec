"""Runs sections of bench_partition.py until all had their turn: one that fails or hangs costs only itself.

    python benchmarks/partition_run.py --gpus 0,1 --port 29501 --out parts/2a --deadline 140 --sections sweep --shapes mixtral

A launch ends at a failure; the next one begins with the unit (section and shape) after the one that failed. Each writes a
file of its own, OUT.0.json, OUT.1.json, ..., for merge_records.py, and its output to OUT.0.log, ...
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.bench_partition import SECTIONS, units  # noqa: E402
from benchmarks.partition_shapes import SHAPES, TINY  # noqa: E402

GRACE = 10.0


def run(wanted: list[str], processes: int, port: int, out: str, deadline: float, gpus: str, smoke: bool) -> list[str]:
    """The units that did not finish.

    Args:
        deadline: seconds for all launches together. The last is ended then; what it has recorded stays.
    """
    end = time.monotonic() + deadline
    left, lost, launch = list(wanted), [], 0
    while left and time.monotonic() < end - GRACE:
        path = f"{out}.{launch}.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--master_port", str(port + launch)]
        command += ["--nproc_per_node", str(processes), "benchmarks/bench_partition.py", "--out", path]
        command += ["--sections", ",".join(left), "--seconds", f"{end - time.monotonic() - GRACE:.0f}"] + [
            "--smoke"
        ] * smoke
        _launch(command, f"{out}.{launch}.log", gpus, end - time.monotonic())
        done = _finished(path)
        left = [unit for unit in left if unit not in done]
        lost += left[:1]
        left, launch = left[1:], launch + 1
    return lost + left


def _launch(command: list[str], log: str, gpus: str, seconds: float) -> None:
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {})
    with open(log, "w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    code = _wait(process, seconds)
    if code:
        lines = [line for line in Path(log).read_text(errors="replace").splitlines() if not line.startswith("{")]
        print(f"{' '.join(command)}\nended with {code}:", *lines[-100:], sep="\n", flush=True)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int:
    """The exit status. A launcher that takes too long, or as long as this process, is asked to end its ranks, then killed."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return _end(process)
    except BaseException:  # this process is ended
        _end(process)
        raise


def _end(process: subprocess.Popen[bytes]) -> int:
    process.terminate()
    try:
        return process.wait(GRACE) or -1
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait() or -1


def _finished(path: str) -> set[str]:
    if not Path(path).exists():
        return set()
    records = json.loads(Path(path).read_text())["records"]
    return {record["section"] for record in records if record["question"] == "seconds"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="", help="of CUDA_VISIBLE_DEVICES; also says how many processes")
    parser.add_argument("--processes", type=int, default=0)
    parser.add_argument("--port", type=int, default=29501)
    parser.add_argument("--out", required=True)
    parser.add_argument("--deadline", type=float, default=150.0)
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    wanted = units(args.sections.split(","), list(TINY) if args.smoke else args.shapes.split(","))
    processes = args.processes or len(args.gpus.split(","))
    start = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    lost = run(wanted, processes, args.port, args.out, args.deadline, args.gpus, args.smoke)
    took = f"{time.monotonic() - start:.0f} s"
    print(f"{args.out}: {len(wanted) - len(lost)} of {len(wanted)} sections in {took}", *lost, flush=True)


if __name__ == "__main__":
    main()
