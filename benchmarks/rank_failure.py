"""How long until somebody says that a rank is lost, and which: torchrun, a barrier before every step, or the backend alone.

Two processes sum a tensor over and over; after some steps rank 1 ends (``exit``), is killed (``kill``) or stops without ending
(``hang``). Measured from that moment: when rank 0 or its launcher first names rank 1, and when rank 0 has ended.

    python benchmarks/rank_failure.py                             over Gloo on CPUs
    python benchmarks/rank_failure.py --backend nccl --json OUT   over NCCL on two GPUs; about four minutes

``torchrun`` is a launcher that ends all ranks when one has ended, ``barrier`` is `hexa_fx.distributed.lockstep.guarded`
with its barrier in every step, ``backend`` nothing but the process group's timeout (on NCCL its watchdog).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.kept_rows import keep

CONTESTANTS = ("torchrun", "barrier", "backend")
ENDS = ("exit", "kill", "hang")
STEPS = 20
NAMED = re.compile(r"ranks? *:? *\[?1\b(?! *timeout)", re.IGNORECASE)
"""How rank 1 is named: ``Rank 1 failed to pass monitoredBarrier``, ``rank      : 1``, ``local_rank: 1``."""


# --- a rank ----------------------------------------------------------------------------------------------------------


def rank_main(rank: int, backend: str, contestant: str, end: str, seconds: float, moment: Path) -> None:
    """One of the two processes. Rank 1 writes the time to ``moment`` just before its end."""
    import torch
    import torch.distributed as dist

    from hexa_fx.distributed.collectives import all_reduce_
    from hexa_fx.distributed.groups import make_groups
    from hexa_fx.distributed.lockstep import guarded

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo", timeout=timedelta(seconds=seconds))
    groups = make_groups(None, timedelta(seconds=seconds))
    x = torch.ones(1 << 16, device=device)
    guard = (
        contextlib.nullcontext()
        if contestant == "backend"
        else guarded("a step", groups if contestant == "barrier" else None)
    )
    for number in range(10**6):
        with guard:
            all_reduce_(x, groups.main_name)
            if backend == "nccl":
                torch.cuda.synchronize()
        x.fill_(1)
        if rank == 1 and number == STEPS:
            moment.write_text(str(time.time()))
            _end(end)


def _end(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        os._exit(17)
    time.sleep(10**6)


# --- the job ---------------------------------------------------------------------------------------------------------


def measure(backend: str, contestant: str, end: str, seconds: float) -> dict[str, object]:
    """One job: seconds from the end of rank 1 until it is named, and until rank 0 has ended; None where that did not happen."""
    with tempfile.TemporaryDirectory() as folder:
        moment, log = Path(folder) / "moment", Path(folder) / "log"
        arguments = [str(Path(__file__)), "--rank-of", backend, contestant, end, str(seconds), str(moment)]
        port = _free_port()
        environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONUNBUFFERED": "1"}
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
        with log.open("w") as output:
            if contestant == "torchrun":
                jobs = [_start([*torchrun, *arguments], environment, output)]
            else:
                ranks = [environment | {"RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)]
                jobs = [_start(arguments, ranks[0], output), _start(arguments, ranks[1], subprocess.DEVNULL)]
            try:
                return {
                    "backend": backend,
                    "contestant": contestant,
                    "end": end,
                    **_watch(jobs[0], moment, log, 3 * seconds + 60),
                }
            finally:
                for job in jobs:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(job.pid, signal.SIGKILL)
                    job.wait()


def _watch(survivor: subprocess.Popen[str], moment: Path, log: Path, limit: float) -> dict[str, object]:
    named: float | None = None
    until, began = time.time() + limit, 0.0
    while time.time() < until:
        time.sleep(0.02)
        began = began or (float(moment.read_text() or 0) if moment.exists() else 0.0)
        if began and named is None and NAMED.search(log.read_text(errors="replace")):
            named = round(time.time() - began, 2)
        if survivor.poll() is not None:
            break
    text = log.read_text(errors="replace")
    if began and named is None and NAMED.search(text):
        named = round(time.time() - began, 2)
    ended = None if survivor.poll() is None or not began else round(time.time() - began, 2)
    words = next((line.strip()[:160] for line in text.splitlines() if NAMED.search(line)), "")
    return {"named": named, "ended": ended, "words": words or text.strip()[-160:]}


def _start(arguments: list[str], environment: dict[str, str], output: object) -> subprocess.Popen[str]:
    command = [sys.executable, *arguments]
    return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
        command, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """Measures every contestant in every case and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--timeout", type=float, default=20.0, help="of the process groups, in seconds")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=CONTESTANTS)
    parser.add_argument("--ends", nargs="+", choices=ENDS, default=ENDS)
    parser.add_argument("--json", type=Path, help="where to write the records")
    parser.add_argument("--rank-of", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        backend, contestant, end, seconds, moment = options.rank_of
        rank_main(int(os.environ["RANK"]), backend, contestant, end, float(seconds), Path(moment))
        return
    records: list[dict[str, Any]] = []
    print(
        f"{options.backend}, timeout {options.timeout:g} s: seconds until rank 1 is named, and until rank 0 has ended"
    )
    for end in options.ends:
        for contestant in options.contestants:
            records.append(record := measure(options.backend, contestant, end, options.timeout))
            print(
                "{end:5} {contestant:18} named {named!s:>6}  ended {ended!s:>6}  {words}".format(**record), flush=True
            )
            keep(records, options.json, "cuda" if options.backend == "nccl" else "cpu")


if __name__ == "__main__":
    main()
