"""A checkpoint with experts in FP8 blocks, of real size: loaded, optimized, run and adapted, beside the dequantised model.

    python benchmarks/bench_fp8_checkpoint.py [--model qwen3-30b] [--layers 48] [--json FILE] [--few 1,8,32]

The checkpoint is made and saved by the script (30 GiB for Qwen3-30B, in memory where there is /dev/shm): random codes and scales of
128 x 128 for experts, bf16 for the rest. It comes from ``from_pretrained`` once as it is, and once dequantised by transformers.

    fp8       `hexa_fx.optimize_` of the model as loaded: its seconds, what it holds more and takes for a while; tokens a second
    adapters  seconds of each of the first steps with PEFT's LoRA on its experts
    fp8, fp8_block   optimized with compute="fp8_block", which multiplies in FP8 where no gradients are wanted
    bf16      the dequantised model, by hexa_fx, and before and after it by transformers' ``grouped_mm``: a drift of the host shows

``apart`` is how far logits are from those of the dequantised model by ``grouped_mm``, relative to them, and ``same_first`` how
often both find the same token likeliest. *Prefill* is a forward of `--tokens` without a cache, *decoding* greedy `generate`;
``rewritten`` and ``own`` count the calls of blocks that a row took.

`--few TOKENS` times one layer without gradients in place of all this, by tokens: ``device_us`` of a call in a captured CUDA graph,
and ``host_us`` of one that is launched, of checkpoints in FP8 and in bf16, each with and without ``compute="fp8_block"``.
`--shrink 32 --device cpu --layers 2 --tokens 64 --new 4` tries the script without a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

import hexa_fx
from benchmarks.bench_qlora import DEPTH, HEADS
from benchmarks.bench_whole_models import decoding, timed
from benchmarks.common import captured
from benchmarks.kept_rows import Row, calls_of, in_memory, keep, options_of, synchronize, wait_for_kernels
from benchmarks.mesh_set_ups import adapt
from benchmarks.real_blocks import REAL_BLOCKS, make, tokens_of

os.environ["HEXA_FX_WAIT_FOR_KERNELS"] = ""  # as users have it: no step waits for kernels that are being built
GIB = 2.0**30
BLOCK, ELEMENT, STD = 128, torch.float8_e4m3fn, 0.02
SEQUENCE, STEPS = 2048, 4
PEER = "grouped_mm"
ELSEWHERE = ["q_proj", "k_proj", "v_proj", "o_proj", "mlp.gate", "lm_head"]


def save(folder: str, options: argparse.Namespace) -> None:
    """Writes the checkpoint, a file for each layer."""
    block = REAL_BLOCKS[options.model]
    sizes = {**block.sizes, **DEPTH[options.model], **HEADS[options.model]}
    if options.shrink > 1:
        small = make(options.model, "meta", options.shrink).config
        sizes = {key: getattr(small, key) for key in sizes}
        sizes |= {"hidden_size": 2 * BLOCK, "moe_intermediate_size": BLOCK}
    sizes["num_hidden_layers"] = options.layers
    config = AutoConfig.for_model(block.kind, **sizes, pad_token_id=0, eos_token_id=None, dtype="bfloat16")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    files: dict[str, dict[str, Tensor]] = {}
    for name, weight in model.state_dict().items():
        layer = name.split(".")[2] if ".layers." in name else "rest"
        files.setdefault(f"{layer}.safetensors", {})[name] = weight
    where, size = dict[str, str](), 0
    for file, weights in files.items():
        made = {key: value for name, weight in weights.items() for key, value in values(name, weight, options).items()}
        save_file(made, f"{folder}/{file}", {"format": "pt"})
        where |= dict.fromkeys(made, file)
        size += sum(value.nbytes for value in made.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    Path(folder, "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    config.quantization_config = FineGrainedFP8Config(modules_to_not_convert=ELSEWHERE).to_dict()
    config.save_pretrained(folder)


def values(name: str, weight: Tensor, options: argparse.Namespace) -> dict[str, Tensor]:
    """Random codes and scales of experts, by the names of published checkpoints; any other weight in bf16."""
    shape, device = weight.shape, options.device
    if ".experts." not in name:
        ones = torch.ones(shape, device=device, dtype=torch.bfloat16)
        return {name: (ones if weight.dim() == 1 else torch.empty_like(ones).normal_(std=STD)).cpu()}
    codes = torch.randn(shape, device=device, dtype=torch.bfloat16).mul_(100).clamp_(-448, 448).to(ELEMENT)
    scales = torch.rand(shape[0], shape[1] // BLOCK, shape[2] // BLOCK, device=device).add_(0.5).mul_(STD / 100)
    path, _, last = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
    made = {}
    for kind, stacked in (("weight", codes.cpu()), ("weight_scale_inv", scales.cpu())):
        for number, of_expert in enumerate(stacked):
            for part, value in zip(parts, of_expert.chunk(len(parts)), strict=True):
                made[f"{path}.{number}.{part}.{kind}"] = value
    return made


def load(folder: str, options: argparse.Namespace, **more: Any) -> Any:
    if options.device == "cpu":  # where transformers would dequantise
        FineGrainedFP8HfQuantizer.validate_environment = lambda *_, **__: None
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map=options.device, experts_implementation="eager", **more
    ).eval()


def held(peak: bool = False) -> float:
    if not torch.cuda.is_initialized():
        return 0.0
    return (torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()) / GIB


def optimized(model: Any, ids: Tensor, compute: Any) -> Row:
    """What `optimize_` takes, with all kernels that it asks for."""
    before = held()
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    hexa_fx.optimize_(model, {"input_ids": ids[:1, :64]}, hexa_fx.HexaConfig(compute=compute))
    row: Row = {"optimize_s": round(time.perf_counter() - began, 2), "blocks": len(model.report.rewritten)}
    row |= {"held_gib": round(held(), 2), "more_gib": round(held() - before, 2)}
    row["taken_gib"] = round(held(peak=True) - before, 2)
    wait_for_kernels()
    return row | {"kernels_s": round(time.perf_counter() - began, 2)}


def speeds(model: Any, ids: Tensor, options: argparse.Namespace) -> Row:
    """Tokens a second."""

    def prefill() -> None:
        model(input_ids=ids, use_cache=False, logits_to_keep=1)

    with torch.no_grad():
        prefill()
        wait_for_kernels()
        seconds, _ = timed(prefill, options.rounds)
    return {"prefill_tokens_s": round(ids.numel() / seconds, 1)} | decoding(model, options, compiled=False)


def first_steps(model: Any, ids: Tensor) -> list[float]:
    """Seconds of each of the first steps of adapters on experts, without an optimizer."""
    adapt(model, 16)
    model.train()
    found = []
    for _ in range(STEPS):
        began = time.perf_counter()
        model(input_ids=ids[:1], labels=ids[:1], use_cache=False).loss.backward()
        synchronize()
        found.append(round(time.perf_counter() - began, 3))
    return found


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """A row a way to run it."""
    ids = tokens_of(options.device, options.tokens).view(-1, min(SEQUENCE, options.tokens))
    found: dict[str, Tensor] = {}

    def ran(way: str, model: Any) -> Row:
        with torch.no_grad():
            found[way] = model(input_ids=ids[:1], use_cache=False).logits.float().cpu()
        return {"way": way} | speeds(model, ids, options) | calls_of(model)

    with in_memory() as folder:
        began = time.perf_counter()
        save(folder, options)
        saved = time.perf_counter()
        model = load(folder, options)
        yield {"way": "checkpoint", "save_s": round(saved - began, 1), "load_s": round(time.perf_counter() - saved, 1)}
        row = optimized(model, ids, "native")
        yield ran("fp8", model) | row
        row = optimized(hexa_fx.undo_(model), ids, "fp8_block")
        yield ran("fp8, fp8_block", model) | row
        optimized(hexa_fx.undo_(model), ids, "native")
        yield {"way": "adapters", "steps_s": first_steps(model, ids)}
        del model
        gc.collect()
        model = load(folder, options, quantization_config=FineGrainedFP8Config(dequantize=True))
    model.set_experts_implementation(PEER)
    yield ran(f"bf16, {PEER}", model)
    row = optimized(model, ids, "native")
    yield ran("bf16", model) | row
    hexa_fx.undo_(model)
    yield ran(f"bf16, {PEER} again", model)
    exact = found.pop(f"bf16, {PEER}")
    for way, logits in found.items():
        same = (logits.argmax(-1) == exact.argmax(-1)).float().mean()
        yield {
            "way": way,
            "apart": round(float((logits - exact).norm() / exact.norm()), 4),
            "same_first": round(float(same), 4),
        }


def few_rows(options: argparse.Namespace) -> Iterator[Row]:
    """A row for a way and a number of tokens."""
    options.layers = 1
    ids = tokens_of(options.device, 64).view(1, -1)
    with in_memory() as folder:
        save(folder, options)
        for stored in ("fp8", "bf16"):
            dense = {"quantization_config": FineGrainedFP8Config(dequantize=True)} if stored == "bf16" else {}
            for compute in ("native", "fp8_block"):
                model = load(folder, options, **dense)
                hexa_fx.optimize_(model, {"input_ids": ids}, hexa_fx.HexaConfig(compute=compute))
                wait_for_kernels()
                for tokens in map(int, options.few.split(",")):
                    call = call_of(model, tokens, options.device)
                    with torch.no_grad():
                        times = {"device_us": device_us(call), "host_us": host_us(call)}
                    yield {"stored": stored, "compute": compute, "tokens": tokens} | times


def call_of(model: Any, tokens: int, device: str) -> Callable[[], Any]:
    """Its layer's experts on random tokens, and experts chosen at random."""
    experts, random = model.model.layers[0].mlp.experts, torch.Generator(device=device).manual_seed(tokens)
    x = torch.randn(tokens, model.config.hidden_size, device=device, dtype=torch.bfloat16, generator=random)
    scores = torch.rand(tokens, model.config.num_experts, device=device, generator=random)
    weights, index = scores.topk(model.config.num_experts_per_tok)
    return lambda: experts(x, index, weights.bfloat16())


def device_us(call: Callable[[], Any], calls: int = 10, replays: int = 20) -> float:
    """Of a call, the mean of many in a row; 0 without a GPU."""
    if not torch.cuda.is_initialized():
        return 0.0
    replay = captured(lambda: [call() for _ in range(calls)])
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replay()
    begin.record()
    for _ in range(replays):
        replay()
    end.record()
    synchronize()
    return round(begin.elapsed_time(end) * 1e3 / (calls * replays), 1)


def host_us(call: Callable[[], Any], calls: int = 20, rounds: int = 20) -> float:
    """Of a call, the least mean of some in a row that start on an idle device: fewer than its queue holds."""
    found = []
    for _ in range(rounds):
        synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - began) * 1e6 / calls)
    return round(min(found), 1)


def main() -> None:
    """Prints a JSON line a row; `--json` keeps them with what they depend on."""
    parser = options_of(__doc__)
    parser.add_argument("--model", default="qwen3-30b", choices=("qwen3-30b",))
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shrink", type=int, default=1)
    parser.add_argument("--few", default="", help="numbers of tokens")
    options = parser.parse_args()
    found: list[Row] = []
    for row in few_rows(options) if options.few else rows(options):
        print(json.dumps(row), flush=True)
        found.append(row)
        keep(found, options.json, options.device)


if __name__ == "__main__":
    main()
