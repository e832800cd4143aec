"""Whole models: tokens a second and peak memory of training steps and of decoding, beside transformers' own implementations.

    python benchmarks/bench_whole_models.py [--models qwen3-30b,mixtral-8x7b,olmoe] [--layers 8] [--json FILE]

Models of `benchmarks/real_blocks.py` in bf16 with random weights: published widths, as many layers as asked for, a
vocabulary of 1024. ``hexa`` is `hexa_fx.optimize_` of the model as it is; the others are values of transformers'
``experts_implementation``: ``grouped_mm``, ``eager`` and the like; ``sonicmoe`` is the installed package. Behind ``+compile`` the
model trains through `torch.compile` and decodes with transformers' static cache, whose steps it compiles into CUDA graphs. One
that is not installed, or fails, gets a row with the reason. *Training* is forward, loss and backward of one batch, without an
optimizer; gradients are there before, so that peaks do not count them. *Decoding* is greedy `generate` from a short prompt with the
model's cache. Peaks are above what was allocated before. Each is the median of `--rounds`.
`--shrink 32 --device cpu --layers 2` tries the script without a GPU.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import nn  # noqa: E402

from benchmarks.kept_rows import Row, keep, options_of, synchronize, wait_for_kernels  # noqa: E402
from benchmarks.peers import register_sonic  # noqa: E402
from benchmarks.real_blocks import make, tokens_of  # noqa: E402
from hexa_fx.errors import kind_and_line  # noqa: E402

MIB = 2.0**20


def rows(name: str, options: argparse.Namespace) -> Iterator[Row]:
    """A row an implementation, all on one model."""
    model = make(name, options.device, options.shrink, options.layers)
    as_it_is = model.config._experts_implementation
    for implementation in options.impls.split(","):
        row: Row = {"model": name, "layers": options.layers, "impl": implementation}
        try:
            row |= measured(model, implementation, options)
        except Exception as error:  # of a package that is not there, or of this card
            row["reason"] = kind_and_line(error)
        model.set_experts_implementation(as_it_is)
        model.zero_grad()
        yield row


def measured(model: nn.Module, implementation: str, options: argparse.Namespace) -> Row:
    """Training and decoding with one implementation; the model is as it was afterwards."""
    import hexa_fx

    ids = tokens_of(options.device, options.tokens)
    experts, *more = implementation.split("+")
    compiled = more == ["compile"]
    torch.compiler.reset()
    if experts != "hexa":
        name = register_sonic() if experts == "sonicmoe" else experts
        model.set_experts_implementation(name)
        return training(model, ids, options, compiled) | decoding(model, options, compiled)
    hexa_fx.optimize_(model, {"input_ids": ids[:, :64]})
    try:
        wait_for_kernels()
        return training(model, ids, options, compiled) | decoding(model, options, compiled)
    finally:
        hexa_fx.undo_(model)


def training(model: nn.Module, ids: torch.Tensor, options: argparse.Namespace, compiled: bool) -> Row:
    """A step is forward, loss and backward of all tokens."""
    model.train()
    model.requires_grad_(True)
    run = torch.compile(model) if compiled else model

    def step() -> None:
        run(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    step()  # makes the gradients
    seconds, peak = timed(step, options.rounds)
    model.eval()
    return {"train_tokens_s": round(ids.numel() / seconds, 1), "train_peak_mib": peak}


def decoding(model: Any, options: argparse.Namespace, compiled: bool) -> Row:
    """New tokens of all sequences, one after the other from a prompt of 32."""
    kept = {"cache_implementation": "static"} if compiled else {}
    prompt = tokens_of(options.device, 32).expand(options.batch, -1)

    def generate() -> None:
        model.generate(prompt, max_new_tokens=options.new, min_new_tokens=options.new, do_sample=False, **kept)

    with torch.no_grad():
        generate()
        seconds, peak = timed(generate, options.rounds)
    return {"decode_tokens_s": round(options.batch * options.new / seconds, 1), "decode_peak_mib": peak}


def timed(run: Callable[[], None], rounds: int) -> tuple[float, float | None]:
    """Median seconds of a call, and its peak on the device in MiB above what was there."""
    cuda, found, peak = torch.cuda.is_initialized(), [], None
    for _ in range(rounds):
        synchronize()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        begin = time.perf_counter()
        run()
        synchronize()
        found.append(time.perf_counter() - begin)
        if cuda:
            peak = round((torch.cuda.max_memory_allocated() - before) / MIB, 1)
    return statistics.median(found), peak


def main() -> None:
    """Prints a JSON line a row; `--json` keeps them with what they depend on."""
    parser = options_of(__doc__)
    parser.add_argument("--models", default="qwen3-30b,mixtral-8x7b,olmoe")
    parser.add_argument("--impls", default="hexa,grouped_mm,sonicmoe,eager")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shrink", type=int, default=1)
    options = parser.parse_args()
    found = []
    for name in options.models.split(","):
        for row in rows(name, options):
            print(json.dumps(row), flush=True)
            found.append(row)
    keep(found, options.json, options.device)


if __name__ == "__main__":
    main()
