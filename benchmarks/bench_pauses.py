"""How long a loaded model pauses at a kind of call that it has not had: its first call, then other modes, precisions and ``top_k``.

    python benchmarks/bench_pauses.py [--models qwen3-30b,...] [--json FILE]

Models of `benchmarks/real_blocks.py` with `--layers` identical layers. All kernels of the calls are built before, in a model of the
same sizes, so that ``first_s`` is analysis; ``then_ms`` is the mean of calls after it. ``kinds`` counts the kinds of calls that the
first block was analysed for so far, ``rewritten`` and ``own`` the calls of all blocks in this row. `--shrink 32 --device cpu` tries
the script without a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import hexa_fx
from benchmarks.bench_use import size_options, timed
from benchmarks.kept_rows import Row, answer, calls_of, options_of, synchronize, wait_for_kernels
from benchmarks.real_blocks import make, tokens_of

Model = Any


def _top_k_halved(model: Model) -> None:
    for module in model.modules():
        if isinstance(getattr(module, "top_k", None), int):
            module.top_k //= 2


CHANGES: dict[str, Callable[[Model], Any]] = {
    "first call": lambda model: model.train(),
    "top_k": _top_k_halved,
    "eval mode": lambda model: model.eval(),
    "float16": lambda model: model.half(),
    "float32 under autocast": lambda model: model.float(),
}
"""What is done to the model before each kind of call, one after the other."""


def rows(name: str, o: argparse.Namespace) -> Iterator[Row]:
    """A row a change; what is only built for it lies before all of them."""
    for built in (False, True):
        model = make(name, o.device, o.shrink, o.layers)
        hexa_fx.optimize_(model, config=hexa_fx.HexaConfig.from_environment(own_code_when_small=False))
        ids = tokens_of(o.device, o.tokens).view(-1, min(o.tokens, o.length))
        for change, make_it in CHANGES.items():
            make_it(model)
            before, call = calls_of(model), _step(model, ids, o.device, "autocast" in change)
            synchronize()
            began = time.perf_counter()
            call()
            synchronize()
            first = round(time.perf_counter() - began, 2)
            if not built:
                wait_for_kernels()
                call()
                wait_for_kernels()
                continue
            then = round(1e3 * timed(call, o.seconds), 2)
            counts = {how: after - before[how] for how, after in calls_of(model).items()}
            kinds = model.report.blocks[0].calls.kinds
            yield {"model": name, "change": change, "first_s": first, "then_ms": then, "kinds": kinds} | counts
        del model, call


def _step(model: Model, ids: torch.Tensor, device: str, cast: bool) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad()
        with torch.autocast(device, torch.bfloat16) if cast else nullcontext():
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()

    return step


def main() -> None:
    """Prints a JSON line a row; `--json` keeps them."""
    parser = options_of(__doc__)
    parser.add_argument("--models", dest="questions", type=lambda names: names.split(","), default=["qwen3-30b"])
    size_options(parser, layers=4)
    options = parser.parse_args()
    answer({name: (lambda o, name=name: rows(name, o)) for name in options.questions}, options)


if __name__ == "__main__":
    main()
