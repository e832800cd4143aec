"""Trains a small mixture-of-experts language model from scratch on text that every machine has: the source code of Python packages.

    python examples/train_small_moe.py                                   # a tiny model on a CPU: a few seconds
    python examples/train_small_moe.py --device cuda --size small --steps 300 --impls grouped_mm,hexa,hexa-fp8

The model has OLMoE's form, with bytes as tokens. Weights are float32 under bf16 autocast, or bf16 with `--weights bfloat16`. Every
implementation starts from the same weights and sees the same batches: ``eager`` and ``grouped_mm`` are transformers' own, ``hexa``
is one line of hexa_fx, ``hexa-fp8`` lets experts multiply in FP8; ``-compiled`` behind any of them has `torch.compile` compile
every decoder layer. A step is `--micro` batches of `--tokens` tokens and AdamW with clipping, warm-up and a cosine. Steps are timed
once all kernels are there.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import sysconfig
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, OlmoeConfig

import hexa_fx
from hexa_fx.jit import builder

SIZES = {
    "tiny": {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 32, "num_experts": 8, "heads": 4, "k": 2},
    "small": {
        "num_hidden_layers": 8,
        "hidden_size": 1024,
        "intermediate_size": 512,
        "num_experts": 64,
        "heads": 8,
        "k": 8,
    },
    "wide": {
        "num_hidden_layers": 4,
        "hidden_size": 2048,
        "intermediate_size": 768,
        "num_experts": 128,
        "heads": 16,
        "k": 8,
    },
}


def corpus(least: int) -> torch.Tensor:
    """At least ``least`` bytes of Python source, (n,) uint8, files in a fixed order."""
    found, size = [], 0
    folders = [Path(sysconfig.get_paths()["stdlib"]), Path(torch.__file__).parent]
    for path in (path for folder in folders for path in sorted(folder.rglob("*.py"))):
        found.append(path.read_bytes())
        size += len(found[-1])
        if size >= least:
            break
    return torch.frombuffer(bytearray(b"\n".join(found)), dtype=torch.uint8)


def batches(text: torch.Tensor, tokens: int, length: int, steps: int, seed: int) -> list[torch.Tensor]:
    """Token ids (tokens / length, length) of every step."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(text) - length, (steps, tokens // length), generator=generator)
    return [torch.stack([text[s : s + length] for s in step.tolist()]).long() for step in starts]


def model_of(options: argparse.Namespace) -> Any:
    """The model, its weights by the seed."""
    torch.manual_seed(options.seed)
    size = dict(SIZES[options.size])
    heads, top_k = size.pop("heads"), size.pop("k")
    config = OlmoeConfig(
        **size,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        num_experts_per_tok=top_k,
        vocab_size=256,
        max_position_embeddings=options.length,
        router_aux_loss_coef=0.01,
        output_router_logits=True,
        use_cache=False,
        pad_token_id=None,
        eos_token_id=None,
    )
    with torch.device(options.device):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.weights)).train()


def train(implementation: str, data: list[torch.Tensor], options: argparse.Namespace) -> dict[str, Any]:
    """Losses of all steps, milliseconds and tokens a second of a step, and peak memory."""
    model = model_of(options)
    cuda = options.device == "cuda"
    cast = torch.autocast(options.device, torch.bfloat16) if options.weights == "float32" else nullcontext()
    way, compiled, _ = implementation.partition("-compiled")
    if way.startswith("hexa"):
        compute = "fp8_block" if way == "hexa-fp8" else "native"
        example = {"input_ids": data[0].to(options.device)} if compiled else None  # a compiler's trace analyses nothing
        with cast:
            config = hexa_fx.HexaConfig(compute=compute, own_code_when_small=False)
            model = hexa_fx.optimize_(model, example, config)
    else:
        model.set_experts_implementation(way)
    torch.compiler.reset()  # what was compiled for another implementation
    for layer in model.model.layers if compiled else ():
        layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.1, betas=(0.9, 0.95), fused=True)
    warm = max(1, options.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1, (s + 1) / warm) * (0.55 + 0.45 * math.cos(math.pi * s / options.steps))
    )
    losses, seconds = [], []
    for number in range(options.steps):
        micro = [batch.to(options.device) for batch in data[number * options.micro :][: options.micro]]
        if number == 3 and cuda:
            builder().wait()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        total = torch.zeros((), device=options.device)
        for ids in micro:
            with cast:
                loss = model(input_ids=ids, labels=ids).loss / len(micro)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(total.item())  # waits for the device
        seconds.append(time.perf_counter() - began)
    steady = statistics.median(seconds[5:] or seconds)
    row: dict[str, Any] = {
        "impl": implementation,
        "weights": options.weights,
        "seed": options.seed,
        "ms": round(1e3 * steady, 2),
        "tokens_s": round(options.micro * options.tokens / steady),
        "first_step_s": round(seconds[0], 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
        "last_loss": round(statistics.mean(losses[-10:]), 4),
        "losses": [round(loss, 4) for loss in losses],
    }
    if way.startswith("hexa") and not compiled:  # compiled calls are not counted
        calls = [block.calls for block in model.report.blocks]
        row["rewritten_calls"], row["own_calls"] = (
            sum(c.rewritten for c in calls),
            sum(sum(c.own.values()) for c in calls),
        )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--impls", default="grouped_mm,hexa")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--weights", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--micro", type=int, default=1, help="batches of a step")
    parser.add_argument("--tokens", type=int, default=0, help="of a batch; by default 16384, of a tiny model 512")
    parser.add_argument("--length", type=int, default=0, help="of a sequence; by default 512, of a tiny model 64")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tiny = options.size == "tiny"
    options.tokens, options.length = options.tokens or (512 if tiny else 16384), options.length or (64 if tiny else 512)
    text = corpus(1 << (20 if tiny else 25))
    data = batches(text, options.tokens, options.length, options.steps * options.micro, options.seed)
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    kept: dict[str, Any] = {"command": " ".join(sys.argv), "torch": torch.__version__, "device": device, "rows": []}
    for implementation in options.impls.split(","):
        row = train(implementation, data, options)
        print({key: value for key, value in row.items() if key != "losses"}, flush=True)
        kept["rows"].append(row)
        if options.json:
            options.json.write_text(json.dumps(kept) + "\n", encoding="utf-8")
        if options.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
