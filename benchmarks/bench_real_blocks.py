"""`hexa_fx.optimize` on blocks as large as they really are: time, memory beside the model, kernels, and the first calls after it.

    python benchmarks/bench_real_blocks.py blocks [--blocks qwen3-30b,...] [--json FILE]
    python benchmarks/bench_real_blocks.py ranks [--ranks 4]
    python benchmarks/bench_real_blocks.py whole [--layers 48]

`blocks`: a model of one layer (benchmarks/real_blocks.py) in bf16. *Cold* is in a process of its own with an empty kernel cache;
*warm* are all blocks in one process whose cache has the kernels of all. Peaks are by what the process had before
`optimize`: torch's allocations on the device, and resident memory of the host. ``longest`` is the longest of the calls after a
cold `optimize`: the block on T = 1, 2, 3, 5, 8 ... 65536 tokens, forward and forward with backward, each waited for; ``again``
is the same call once more when all kernels are there.
`ranks`: several processes with one empty kernel cache; how often the compiler ran, against how many kernels there are.
`whole`: Qwen3-30B-A3B with all its layers: `optimize`, logits before and after, 64 tokens of `generate`.
`--shrink 32 --device cpu` tries the script without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import nn  # noqa: E402

from benchmarks.host_memory import HostPeak  # noqa: E402
from benchmarks.kept_rows import Row, answer, options_of, synchronize, wait_for_kernels  # noqa: E402
from benchmarks.real_blocks import REAL_BLOCKS, block_of, make, tokens_of  # noqa: E402

GIB = 2.0**30


class Peaks(HostPeak):
    """By how much the process's memory grows inside the block, on the device too."""

    device_gib = 0.0

    def __enter__(self) -> Peaks:
        self._cuda = torch.cuda.is_initialized()
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._allocated = torch.cuda.memory_allocated()
        super().__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        if self._cuda:
            self.device_gib = (torch.cuda.max_memory_allocated() - self._allocated) / GIB


def started(device: str) -> None:
    """Loads what every process loads once, so that it is not counted: the device's libraries and transformers."""
    import transformers.models.auto.modeling_auto  # noqa: F401

    x = torch.randn(64, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    (x @ x).sum().backward()
    if device != "cpu":
        (x.double() @ x.double()).sum().item()
        torch.cuda.synchronize()


def optimized(model: nn.Module, options: argparse.Namespace) -> tuple[Row, Any]:
    """One `optimize_`, measured; and its report."""
    import hexa_fx

    with Peaks() as peaks:
        begin = time.perf_counter()
        opt = hexa_fx.optimize_(model, {"input_ids": tokens_of(options.device, options.tokens)})
        synchronize()
        seconds = time.perf_counter() - begin
    report = opt.report
    checks = {str(block.check): block.check for block in report.blocks if block.check}  # blocks of a kind share one
    found = {
        "rewritten": len(report.rewritten),
        "reasons": [block.reason for block in report.blocks if block.reason],
        "seconds": round(seconds, 2),
        "device_gib": round(peaks.device_gib, 2),
        "host_gib": round(peaks.grown / GIB, 2),
        "checks": [{key: str(value) for key, value in vars(check).items()} for check in checks.values()],
    }
    return found, report


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Rows of blocks, one after the other in this process and with the kernel cache that is set."""
    started(options.device)
    for name in options.blocks.split(","):
        model = make(name, options.device, options.shrink)
        row: Row = {"block": name, "weights_gib": round(weight_bytes(block_of(model)) / GIB, 2)}
        found, _ = optimized(model, options)
        row |= found
        longest = sweep(block_of(model), options) if options.sweep else None
        begin = time.perf_counter()
        wait_for_kernels()
        row |= {"kernels": kernels_in_cache(), "all_kernels_after_s": round(time.perf_counter() - begin, 1)}
        if longest is not None:
            seconds, tokens, backward = longest
            again = min(call(block_of(model), tokens, backward) for _ in range(2))
            row |= {"longest_s": round(seconds, 3), "longest_at": f"T = {tokens}{', backward' * backward}"}
            row["again_s"] = round(again, 3)
        yield row
        del model
        if options.device != "cpu":
            torch.cuda.empty_cache()


def sweep(block: nn.Module, options: argparse.Namespace) -> tuple[float, int, bool]:
    """Seconds, tokens and kind of the longest call at growing sizes, forward and forward with backward."""
    sizes = [1, 2, 3, 5, 8]
    while sizes[-1] < options.largest:
        sizes.append(min(sizes[-1] * 2, options.largest))
    return max((call(block, tokens, backward), tokens, backward) for backward in (False, True) for tokens in sizes)


def call(block: nn.Module, tokens: int, backward: bool) -> float:
    """Seconds of one call, waited for."""
    device = next(block.parameters()).device
    x = torch.randn(1, tokens, width_of(block), device=device, dtype=torch.bfloat16, requires_grad=backward)
    synchronize()
    begin = time.perf_counter()
    with torch.set_grad_enabled(backward):
        out = block(x)
    out = out[0] if isinstance(out, tuple) else out
    if backward:
        out.sum().backward()
    synchronize()
    seconds = time.perf_counter() - begin
    block.zero_grad()
    return seconds


def width_of(block: nn.Module) -> int:
    """D, from the router's weight (E, D)."""
    return next(
        p.shape[1] for name, p in block.named_parameters() if p.dim() == 2 and ("gate" in name or "router" in name)
    )


def ranks(options: argparse.Namespace) -> Row:
    """Several processes optimize the same block with one empty kernel cache; a compiler that keeps count."""
    with tempfile.TemporaryDirectory() as folder, counted_compiler(pathlib.Path(folder)) as log:
        environment = {**os.environ, "HEXA_FX_CACHE_DIR": f"{folder}/cache"}
        command = [*child(options), "one", "--blocks", "qwen3-30b"]
        begin = time.perf_counter()
        running = [
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(options.ranks)
        ]
        rows = [json.loads(process.communicate()[0].splitlines()[-1]) for process in running]
        runs = len(log.read_text().splitlines())
    return {
        "question": "ranks",
        "ranks": options.ranks,
        "compiler_runs": runs,
        "kernels": rows[0]["kernels"],
        "seconds": [row["seconds"] for row in rows],
        "until_all_ended_s": round(time.perf_counter() - begin, 1),
    }


@contextlib.contextmanager
def counted_compiler(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Puts a script in nvcc's place that adds a line to a file for every cubin it makes."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    log, script = folder / "runs", folder / "nvcc"
    log.touch()
    script.write_text(f'#!/bin/sh\ncase "$*" in *-cubin*) echo run >> {log};; esac\nexec {nvcc} "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    before = os.environ.get("HEXA_FX_NVCC")
    os.environ["HEXA_FX_NVCC"] = str(script)
    yield log
    os.environ.pop("HEXA_FX_NVCC") if before is None else os.environ.__setitem__("HEXA_FX_NVCC", before)


def whole(options: argparse.Namespace) -> Row:
    """Qwen3-30B-A3B with all its layers on one device: logits before and after, and 64 tokens of `generate`."""
    started(options.device)
    model = make("qwen3-30b", options.device, options.shrink, options.layers)
    ids = tokens_of(options.device, 256)
    with torch.no_grad():
        before = model(input_ids=ids, use_cache=False).logits.float()
    row: Row = {"question": "whole", "layers": options.layers, "weights_gib": round(weight_bytes(model) / GIB, 2)}
    found, _ = optimized(model, options)
    with torch.no_grad():
        after = model(input_ids=ids, use_cache=False).logits.float()
        begin = time.perf_counter()
        new = model.generate(ids[:, :32], max_new_tokens=64, min_new_tokens=64, do_sample=False)
        synchronize()
    row |= found | {
        "logits_difference": float((after - before).norm() / before.norm()),
        "generated": new.shape[1] - 32,
        "generate_s": round(time.perf_counter() - begin, 2),
    }
    return row


def weight_bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def kernels_in_cache() -> int:
    folder = pathlib.Path(os.environ.get("HEXA_FX_CACHE_DIR", "")) / "kernels"
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def child(options: argparse.Namespace) -> list[str]:
    command = [sys.executable, __file__, "--device", options.device, "--shrink", str(options.shrink)]
    return [*command, "--tokens", str(options.tokens), "--largest", str(options.largest)]


def in_own_process(names: str, options: argparse.Namespace, cache: str, *more: str) -> Iterator[Row]:
    command = [*child(options), "one", "--blocks", names, *more]
    environment = {**os.environ, "HEXA_FX_CACHE_DIR": cache}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield from (json.loads(line) for line in process.stdout if line.startswith("{"))
    if process.returncode:
        yield {"block": names, "rewritten": 0, "reasons": [f"ended with status {process.returncode}"]}


def blocks(options: argparse.Namespace) -> Iterator[Row]:
    """Cold and warm rows of every block."""
    with tempfile.TemporaryDirectory() as folder:
        for name in options.blocks.split(","):
            for row in in_own_process(name, options, f"{folder}/{name}", "--sweep"):
                yield {"question": "blocks", "cache": "cold"} | row
            if pathlib.Path(f"{folder}/{name}/kernels").is_dir():
                shutil.copytree(f"{folder}/{name}/kernels", f"{folder}/all/kernels", dirs_exist_ok=True)
        for row in in_own_process(options.blocks, options, f"{folder}/all"):
            yield {"question": "blocks", "cache": "warm"} | row


def main() -> None:
    """Prints a JSON line a row; `--json` keeps them with what they depend on."""
    parser = options_of(__doc__)
    parser.add_argument("question", choices=("blocks", "ranks", "whole", "one"))
    parser.add_argument("--blocks", default=",".join(REAL_BLOCKS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shrink", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--largest", type=int, default=65536)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    if options.question == "one":
        for row in measure(options):
            print(json.dumps(row), flush=True)
        return
    options.questions = [options.question]
    answer({"blocks": blocks, "ranks": lambda given: [ranks(given)], "whole": lambda given: [whole(given)]}, options)


if __name__ == "__main__":
    main()
