"""Low-rank adapters on experts: one layer's forward and backward, and a whole step of a model, on one GPU.

    python benchmarks/bench_adapters.py [layer] [model] [--rank 16] [--layers 6] [--tokens 16384] [--json FILE]

`layer` is transformers' Qwen3-MoE experts at Qwen3-30B's widths with PEFT's ``target_parameters``. Rows: ``full`` trains the
weights themselves, ``frozen`` has gradients of the input and the routing weights alone, ``adapters`` those of the adapters too,
``peft`` is PEFT on ``grouped_mm``; all but the last are optimized by hexa_fx. Times as in bench_moe_layer.py. `model` has
`--layers` layers, in train mode: a step is forward, loss and backward, with adapters on attention, or on attention and experts.
Peaks are above what was allocated before, with gradients there already.
`--shrink 32 --device cpu --tokens 64` tries the script without a GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from bench_real_blocks import environment, wait_for_kernels
from bench_whole_models import timed
from common import steady
from peft import LoraConfig, get_peft_model
from real_blocks import make, tokens_of
from torch import Tensor, nn

import hexa_fx

Row = dict[str, Any]
PARAMETERS = ["experts.gate_up_proj", "experts.down_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


class Layer(nn.Module):
    """A module around experts, for PEFT to find their parameters in."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        """(T, D) tokens, expert ids and routing weights (T, k): (T, D)."""
        return self.experts(x, ids, gates)  # type: ignore[no-any-return]


def layer_rows(options: argparse.Namespace) -> Iterator[Row]:
    """One row a way to train a layer."""
    x, ids, gates, dy = inputs(options)
    runs: dict[str, Callable[[], object]] = {}
    for name in ("full", "frozen", "adapters", "peft"):
        experts = make("qwen3-30b", options.device, options.shrink).model.layers[0].mlp.experts
        layer: nn.Module = Layer(experts).train().requires_grad_(name == "full")
        if name in ("adapters", "peft"):
            layer = get_peft_model(layer, LoraConfig(r=options.rank, target_parameters=PARAMETERS))
            spread(layer)
        if name == "peft":
            experts.config._experts_implementation = "grouped_mm"
        else:
            few = x.detach()[:256], ids[:256], gates.detach()[:256]
            hexa_fx.optimize_(layer, few, hexa_fx.HexaConfig(own_code_when_small=False))
        wanted = [x, gates, *(p for p in layer.parameters() if p.requires_grad)]
        runs[name] = lambda layer=layer, wanted=wanted: torch.autograd.grad(layer(x, ids, gates), wanted, dy)
    wait_for_kernels()
    if options.device == "cpu":
        milliseconds = {name: 1e3 * timed(lambda run=run: run(), 1)[0] for name, run in runs.items()}
    else:
        milliseconds = steady(runs, options.turns)
    for name, run in runs.items():
        yield {"question": "layer", "way": name, "ms": round(milliseconds[name], 3), "peak_mib": timed(run, 1)[1]}


def inputs(options: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, distinct expert ids, routing weights and the result's gradient."""
    config = make("qwen3-30b", "meta", options.shrink).config
    experts, top_k, width = config.num_experts, config.num_experts_per_tok, config.hidden_size
    with torch.device(options.device):
        weights, ids = torch.randn(options.tokens, experts).softmax(-1).topk(top_k, dim=-1)
        x, dy = (torch.randn(options.tokens, width, dtype=torch.bfloat16) for _ in range(2))
    return x.requires_grad_(), ids, weights.bfloat16().requires_grad_(), dy


def spread(model: nn.Module) -> None:
    """PEFT's adapters begin with zeros in one factor; random data takes the power that training takes."""
    for name, p in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(p, std=0.02)


def model_rows(options: argparse.Namespace) -> Iterator[Row]:
    """One row a model and a place of adapters."""
    ids = tokens_of(options.device, options.tokens)
    for implementation in ("hexa", "grouped_mm"):
        for adapted in ("attention", "attention and experts"):
            model = make("qwen3-30b", options.device, options.shrink, options.layers)
            parameters = PARAMETERS if "experts" in adapted else None
            config = LoraConfig(r=options.rank, target_modules=ATTENTION, target_parameters=parameters)
            model = get_peft_model(model, config).train()
            spread(model)
            if implementation == "hexa":
                hexa_fx.optimize_(model, ids[:, :64], hexa_fx.HexaConfig(own_code_when_small=False))
                wait_for_kernels()
            else:
                model.get_base_model().set_experts_implementation(implementation)

            def step(model: Any = model) -> None:
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

            step()
            seconds, peak = timed(step, options.rounds)
            row: Row = {"question": "model", "impl": implementation, "adapters": adapted}
            yield row | {"ms": round(1e3 * seconds, 1), "peak_mib": peak}
            del model, step


def main() -> None:
    """Prints a JSON line a row; `--json` keeps them with what they depend on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", default=["layer", "model"])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shrink", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: list[Row] = []
    for question in options.questions:
        for row in (layer_rows if question == "layer" else model_rows)(options):
            print(json.dumps(row), flush=True)
            found.append(row)
        if options.json is not None:
            kept = {"environment": environment(options.device), "rows": found}
            options.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
