"""Correctness, step time, memory and overlap of partitioned MoE layers.

    sh benchmarks/gpu_partition.sh                                                          # all of it, on four GPUs
    torchrun --nproc_per_node 2 benchmarks/bench_partition.py --out results.json            # CUDA, NCCL
    torchrun --nproc_per_node 2 benchmarks/bench_partition.py --out results.json --smoke    # CPU, Gloo, tiny
    python benchmarks/bench_partition.py --prebuild 2,4      # builds the kernels of those runs, all at a time, on one GPU

A model of attention, router and experts (`hexa::moe_ffn`) a layer, forward and backward, no optimizer, random weights and
routing. Sections (``--sections``, each whole or of one shape: ``sweep:mixtral``):

    correctness  relative error of outputs and gradients to float32 on one device, beside that of one device in bf16
    sweep        step time and peak memory by shape and number of global tokens:
                 local        every rank holds all weights, nothing is communicated (gradients stay partial)
                 data         data-centric, two slots         model        model-centric, reduce-scatter
                 model-paper  the paper's all-reduce          auto         what partition_model picks, and its numbers
                 ep           whole experts, tokens by all-to-all (its own routing loop)       fsdp2  fully_shard a layer
    overlap      a profiler trace of data-centric steps: share of gather and reduce-scatter time beside compute
    memory       gathered weights and peak memory from 2 to 12 layers
    unequal      unequal devices by green contexts (partition_unequal.py)

Records are written one by one. A section that fails ends the run, and so does a minute and a half without a record, with
the stacks of all threads; partition_run.py goes on with the sections after it.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import chain

import torch
import torch.distributed as dist

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from benchmarks.kept_rows import environment
from benchmarks.partition_correctness import correctness
from benchmarks.partition_prebuild import prebuild
from benchmarks.partition_shapes import SHAPES, TINY, UNEQUAL, Options, Record, clean
from benchmarks.partition_sweep import links, memory, overlap, sweep
from benchmarks.partition_unequal import unequal, unequal_steps

os.environ.setdefault("HEXA_FX_WAIT_FOR_KERNELS", "1")  # what is measured are kernels, as in benchmarks.common
SECTIONS = ("correctness", "sweep", "overlap", "memory", "unequal")
LONGEST = 90.0
"""Seconds without a record after which a rank gives up."""


def units(sections: Sequence[str], names: Sequence[str]) -> list[str]:
    """``sweep`` -> ``sweep:mixtral``, ``sweep:qwen3-30b``, ...: what can fail alone."""
    shapes = {"sweep": names, "overlap": names, "unequal": [n for n in names if n in UNEQUAL or n in TINY]}
    found = [[f"{s}:{n}" for n in shapes[s]] if s in shapes else [s] for s in sections]
    return list(chain.from_iterable(found))


def records_of(unit: str, o: Options) -> Iterator[Record]:
    section, _, name = unit.partition(":")
    if section == "correctness":
        return correctness(o)
    if section == "memory":
        return memory(o)
    if section == "broken":  # for the test of partition_run.py
        return _broken()
    shape, counts = (TINY if o.smoke else SHAPES)[name]
    if section == "sweep":
        return chain(links(o), sweep(name, shape, counts, o))
    if section == "overlap":
        return overlap(name, shape, counts, o)
    tokens, length = (counts[-1], o.length) if o.smoke else UNEQUAL[name]
    clean(o)
    return chain(*(run(shape, name, tokens, length, o.device, o.dtype, o.seconds) for run in (unequal, unequal_steps)))


def _broken() -> Iterator[Record]:
    yield {"question": "broken", "shape": "tiny"}
    if dist.get_rank() == 1:
        raise ValueError("broken on purpose")
    dist.barrier()


def main() -> None:
    args = _arguments()
    if args.prebuild:
        prebuild([int(n) for n in args.prebuild.split(",")], args.shapes.split(","))
        return
    rank = int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available() and not args.smoke
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    faulthandler.dump_traceback_later(LONGEST, exit=True)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", device_id=device if cuda else None)
    options = Options(
        device,
        torch.bfloat16 if cuda else torch.float32,
        args.smoke,
        args.layers,
        args.repeats,
        length=16 if args.smoke else 2048,
        seconds=0.01 if args.smoke else 0.5,
        end=time.monotonic() + args.seconds,
    )
    names = list(TINY) if args.smoke else args.shapes.split(",")
    log = _Log(args.out, _header(args, cuda))
    for unit in units(args.sections.split(","), names):
        log.run(unit, options)
    if cuda:
        from hexa_fx.cuda import fallback as cuda_fallback

        log.add({"question": "fallbacks", "section": args.sections, "found": dict(cuda_fallback.fallbacks)})
    dist.barrier()
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="partition.json")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--prebuild", default="")
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=600.0, help="skip what would start later")
    return parser.parse_args()


def _header(args: argparse.Namespace, cuda: bool) -> Record:
    header: Record = (
        environment() if cuda else {"device": "cpu", "python": sys.version.split()[0], "torch": torch.__version__}
    )
    if cuda:
        header["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    options = f"--sections {args.sections} --layers {args.layers} --repeats {args.repeats}" + " --smoke" * args.smoke
    world = dist.get_world_size()
    header["command"] = f"torchrun --nproc_per_node {world} benchmarks/bench_partition.py {options}"
    return header | {"ranks": world}


class _Log:
    """The records so far, on disk after each one."""

    def __init__(self, path: str, header: Record) -> None:
        self.path, self.header = path, header
        self.records: list[Record] = []

    def run(self, unit: str, o: Options) -> None:
        start = time.monotonic()
        try:
            for record in records_of(unit, o):
                self.add(record)
        except Exception as error:
            self.add({"question": "failed", "section": unit, "error": f"{type(error).__name__}: {error}"[:400]})
            raise
        self.add({"question": "seconds", "section": unit, "seconds": round(time.monotonic() - start, 1)})

    def add(self, record: Record) -> None:
        faulthandler.dump_traceback_later(LONGEST, exit=True)
        self.records.append(record)
        if dist.get_rank():
            return
        print(json.dumps(record), flush=True)
        with open(f"{self.path}.partial", "w") as file:
            json.dump(self.header | {"records": self.records}, file, indent=1)
        os.replace(f"{self.path}.partial", self.path)


if __name__ == "__main__":
    main()
