"""Loaded models in the set-ups that people use: what ran, how fast beside transformers' ``grouped_mm``, what a first call takes.

    python benchmarks/bench_use.py [--models olmoe,qwen3-30b,...] [--cells "bf16;prefill"] [--impls hexa,hexa-fp8] [--json FILE]

Models of `benchmarks/real_blocks.py`: published widths, `--layers` layers, a vocabulary of 1024. Each is saved to a folder once
and comes from ``from_pretrained`` in every cell, which is a set-up. ``hexa`` is `hexa_fx.optimize_` without an example, except
where a cell says so; ``hexa-fp8`` is the same with ``compute="fp8_block"``. ``ms`` is the mean of calls that follow each other
without end, ``first_s`` what the first call takes with all analysis, while kernels build. ``rewritten`` and ``own`` count calls of
blocks while they are timed; compiled ones are not counted. `--shrink 32 --device cpu` tries the script without a GPU.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.kept_rows import Row, calls_of, in_memory, keep, options_of, synchronize, wait_for_kernels
from benchmarks.real_blocks import REAL_BLOCKS, make, tokens_of
from hexa_fx.errors import kind_and_line

Model = Any
GIB = 2.0**30
IMPLEMENTATIONS = ("hexa", "hexa-fp8", "grouped_mm")
TURNS = 4
"""How often each takes its turn where the host is what takes time."""


@dataclass(frozen=True)
class Cell:
    """A set-up.

    Args:
        weights: dtype that the model is loaded in.
        cast: dtype of autocast, if it is on.
        scaled: whether losses are scaled by a `torch.amp.GradScaler`.
        change: what is done to the model once it is optimized (the peer's: loaded).
        example: whether the model is analysed on an example before ``change``.
        tokens: of a call; with gradients unless ``inference``.
        dense_bytes: memory that the cell needs, in bytes of the weights in bf16.
        batches: of a step, whose gradients add up.
    """

    weights: torch.dtype = torch.bfloat16
    cast: torch.dtype | None = None
    scaled: bool = False
    change: Callable[[Model], Model] | None = None
    example: bool = False
    tokens: int = 0
    inference: bool = False
    only_hexa: Callable[[Model], Model] | None = None
    outputs: dict[str, Any] | None = None
    dense_bytes: float = 3
    batches: int = 1


def _fully_sharded(model: Model) -> Model:
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if not dist.is_initialized():
        store = dist.FileStore(tempfile.mkstemp()[1], 1)
        dist.init_process_group(
            "nccl" if next(model.parameters()).is_cuda else "gloo", store=store, rank=0, world_size=1
        )
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def _checkpointed(reentrant: bool) -> Callable[[Model], Model]:
    def change(model: Model) -> Model:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model

    return change


def _frozen(model: Model) -> Model:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" not in name)
    return model


def _adapted(model: Model) -> Model:
    import peft

    first = "layers.0."
    named = [name for name, p in model.named_parameters() if "experts" in name and p.dim() == 3 and first in name]
    stacked = sorted({name.partition(first)[2] for name in named})
    config = peft.LoraConfig(r=16, target_modules=["q_proj"], target_parameters=stacked)
    return peft.get_peft_model(model, config)


def _assigned(model: Model) -> Model:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return model


def _packed(model: Model) -> Model:
    import hexa_fx

    return hexa_fx.quantize_experts_(model, "fp8_block")


CELLS = {
    "bf16": Cell(),
    "float32, autocast": Cell(torch.float32, torch.bfloat16, dense_bytes=6),
    "bf16, autocast": Cell(cast=torch.bfloat16),
    "fp16 autocast, scaled": Cell(torch.float32, torch.float16, scaled=True, dense_bytes=6),
    "cast after": Cell(torch.float32, change=lambda model: model.bfloat16(), example=True, dense_bytes=4),
    "bf16, four batches": Cell(batches=4),
    "autocast, four batches": Cell(torch.float32, torch.bfloat16, dense_bytes=6, batches=4),
    "FSDP2, bf16 policy": Cell(torch.float32, change=_fully_sharded, dense_bytes=8),
    "checkpoints": Cell(change=_checkpointed(False)),
    "reentrant checkpoints": Cell(change=_checkpointed(True)),
    "LoRA on experts": Cell(change=_adapted, dense_bytes=5),
    "frozen experts": Cell(change=_frozen),
    "router logits": Cell(outputs={"output_router_logits": True}),
    "deepcopy": Cell(change=copy.deepcopy, example=True, dense_bytes=4),
    "assigned weights": Cell(change=_assigned, example=True, dense_bytes=4),
    "packed, 8 tokens": Cell(only_hexa=_packed, example=True, inference=True, tokens=8),
    "compiled": Cell(change=torch.compile, example=True),
    "prefill": Cell(inference=True),
    "8 tokens": Cell(inference=True, tokens=8),
}
TRAINED = tuple(name for name, cell in CELLS.items() if not cell.inference)


def rows(name: str, options: argparse.Namespace) -> Iterator[Row]:
    """A row a cell and implementation, of one model."""
    with in_memory() as folder:
        model = make(name, options.device, options.shrink, options.layers)
        weights = sum(p.numel() * 2 for p in model.parameters())
        model.save_pretrained(folder)
        del model
        for kind in options.cells.split(";") if options.cells else CELLS:
            cell = CELLS[kind]
            room = torch.cuda.mem_get_info()[0] if options.device == "cuda" else float("inf")
            if weights * cell.dense_bytes > room:
                yield {"model": name, "cell": kind, "reason": f"needs {weights * cell.dense_bytes / GIB:.0f} GiB"}
                continue
            every = options.impls.split(",")
            for implementations in [every] if cell.tokens else [[one] for one in every]:
                yield from _measured(name, kind, implementations, folder, options)


@dataclass
class Ready:
    """A model in its set-up.

    Args:
        call: one call of it.
        owner: the model that has the report.
        row: what is known before it is timed.
    """

    call: Callable[[], None]
    owner: Model
    row: Row


def _measured(
    name: str, kind: str, implementations: list[str], folder: str, options: argparse.Namespace
) -> Iterator[Row]:
    """One cell with each of these, which take turns if they are several."""
    cell, ready = CELLS[kind], []
    for implementation in implementations:
        row: Row = {"model": name, "cell": kind, "impl": implementation}
        try:
            ready.append(prepared(folder, cell, implementation, row, options))
        except Exception as error:  # of a peer in a set-up that it does not take, or of memory
            yield row | {"reason": kind_and_line(error)}
    before = [calls_of(each.owner) for each in ready]
    turns = TURNS if len(ready) > 1 else 1
    times: list[list[float]] = [[] for _ in ready]
    for _ in range(turns):
        for each, found in zip(ready, times, strict=True):
            found.append(timed(each.call, options.seconds))
    for each, counts, found in zip(ready, before, times, strict=True):
        each.row["ms"] = round(1e3 * statistics.mean(found), 3)
        if each.row["impl"] != "grouped_mm":
            each.row |= {how: after - counts[how] for how, after in calls_of(each.owner).items()}
        yield each.row
    del each
    ready.clear()
    torch.compiler.reset()
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()


def prepared(folder: str, cell: Cell, implementation: str, row: Row, options: argparse.Namespace) -> Ready:
    """The model of a cell after its first calls, whose peak is that of the second and of nothing beside it."""
    from transformers import AutoModelForCausalLM

    import hexa_fx

    tokens = cell.tokens or options.tokens
    ids = tokens_of(options.device, tokens).view(-1, min(tokens, options.length))
    beside = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=cell.weights, device_map=None).to(options.device)
    model.train(not cell.inference)
    hexa, owner = implementation != "grouped_mm", model
    began = time.perf_counter()
    if hexa:
        example = {"input_ids": ids[:, :64]} if cell.example else None
        compute = "fp8_block" if implementation == "hexa-fp8" else "native"
        config = hexa_fx.HexaConfig.from_environment(own_code_when_small=False, compute=compute)
        model = hexa_fx.optimize_(model, example, config)
        model = cell.only_hexa(model) if cell.only_hexa else model
    else:
        model.set_experts_implementation(implementation)
    model = cell.change(model) if cell.change is not None else model
    owner = next((m for m in model.modules() if "report" in vars(m)), owner) if cell.change is copy.deepcopy else owner
    call = _call(model, ids, cell, options.device)
    call()
    synchronize()
    row["first_s"] = round(time.perf_counter() - began, 2)
    if hexa:
        wait_for_kernels()
    call()
    synchronize()
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
        call()
        synchronize()
        row["peak_gib"] = round((torch.cuda.max_memory_allocated() - beside) / GIB, 2)
    return Ready(call, owner, row)


def _call(model: Model, ids: torch.Tensor, cell: Cell, device: str) -> Callable[[], None]:
    """A step, or a forward where there are no gradients."""
    scaler = torch.amp.GradScaler(device) if cell.scaled else None
    given = {"input_ids": ids, "use_cache": False, **(cell.outputs or {})}

    def forward() -> Any:
        with torch.autocast(device, cell.cast) if cell.cast is not None else nullcontext():
            return model(**given, **({} if cell.inference else {"labels": ids}))

    def infer() -> None:
        with torch.no_grad():
            forward()

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        for _ in range(cell.batches):
            loss = forward().loss
            (loss if scaler is None else scaler.scale(loss)).backward()

    return infer if cell.inference else step


def timed(call: Callable[[], None], seconds: float) -> float:
    """Mean seconds of calls that follow each other for a while, after as long a warm-up."""
    found = 0.0
    for _ in range(2):
        synchronize()
        began, calls = time.perf_counter(), 0
        while time.perf_counter() - began < seconds or calls < 3:
            call()
            calls += 1
            if calls % 4 == 0:
                synchronize()
        synchronize()
        found = (time.perf_counter() - began) / calls
    return found


def size_options(parser: argparse.ArgumentParser, layers: int) -> None:
    """Options of what is run, for how long and where; layers: how many unless one says."""
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--length", type=int, default=512, help="of a sequence")
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shrink", type=int, default=1)


def main() -> None:
    """Prints a JSON line a row; `--json` keeps them with what they depend on."""
    parser = options_of(__doc__)
    parser.add_argument(
        "--models", default="olmoe,qwen3-30b,mixtral-8x7b,gpt-oss-20b,deepseek-v2-lite,glm-4.5,deepseek-v3"
    )
    parser.add_argument("--cells", default="", help=f"some of: {'; '.join(CELLS)}")
    parser.add_argument("--impls", default="hexa,grouped_mm", help=f"some of: {', '.join(IMPLEMENTATIONS)}")
    size_options(parser, layers=1)
    options = parser.parse_args()
    assert set(options.models.split(",")) <= set(REAL_BLOCKS)
    assert set(options.impls.split(",")) <= set(IMPLEMENTATIONS)
    found: list[Row] = []
    for name in options.models.split(","):
        for row in rows(name, options):
            print(json.dumps(row), flush=True)
            found.append(row)
            keep(found, options.json, options.device)


if __name__ == "__main__":
    main()
