"""Low-rank adapters on experts: one layer's forward and backward, and a whole step of a model, on one GPU.

    python benchmarks/bench_adapters.py [layer] [few] [products] [model] [--rank 16] [--layers 6] [--tokens 16384] [--json FILE]

`layer` is transformers' Qwen3-MoE experts at Qwen3-30B's widths with PEFT's ``target_parameters``. Rows: ``full`` trains the
weights themselves, ``frozen`` has gradients of the input and the routing weights alone, ``adapters`` those of the adapters too,
``peft`` is PEFT on ``grouped_mm``; all but the last are optimized by hexa_fx. Times as in bench_moe_layer.py. `few` are results of
few tokens without gradients, microseconds a layer of a CUDA graph of `--layers` layers with weights of their own. `products` are
that layer's launches one by one, with the second product in the accumulator and without; narrow ones with a few tiles. `model` has
`--layers` layers, in train mode: a step is forward, loss and backward, with adapters on attention, or on attention and experts.
Peaks are above what was allocated before, with gradients there already; a model that does not fit has no time.
`--shrink 32 --device cpu --tokens 64` tries the script without a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from bench_whole_models import timed
from common import captured, steady
from kept_rows import Row, answer, options_of, wait_for_kernels
from launching import on_tensors, prebuild
from peft import LoraConfig, get_peft_model
from real_blocks import make, tokens_of
from torch import Tensor, nn

import hexa_fx
from hexa_fx.codegen.family_gemm_sm90 import NARROW_CANDIDATES
from hexa_fx.cuda import gemm_sm90
from hexa_fx.ops.table import Esmm, Estmm

PARAMETERS = ["experts.gate_up_proj", "experts.down_proj"]
FEW_TOKENS = (1, 8, 64, 256)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LAYER_MS, STEP_LAYERS, STEP_RATIO, STEP_PEAK_MIB = 5.6, 6, 1.08, 512
"""At most, on an H200: the adapted layer of Qwen3-30B; a step of so many with adapters on experts too, over attention alone."""


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
        layer = layers_of(name, 1, options)[0]
        wanted = [x, gates, *(p for p in layer.parameters() if p.requires_grad)]
        runs[name] = lambda layer=layer, wanted=wanted: torch.autograd.grad(layer(x, ids, gates), wanted, dy)
    milliseconds = times(runs, options)
    for name, run in runs.items():
        row: Row = {"question": "layer", "way": name, "ms": round(milliseconds[name], 3), "peak_mib": timed(run, 1)[1]}
        yield row | ({"bar_ms": LAYER_MS} if name == "adapters" else {})


def layers_of(name: str, count: int, options: argparse.Namespace) -> list[nn.Module]:
    """Layers with random weights, in train mode, as the row of that name has them."""
    x, ids, gates, _ = inputs(options)
    few, found = (x.detach()[:256], ids[:256], gates.detach()[:256]), []
    for block in make("qwen3-30b", options.device, options.shrink, count).model.layers:
        layer: nn.Module = Layer(block.mlp.experts).train().requires_grad_(name == "full")
        if name in ("adapters", "peft"):
            layer = get_peft_model(layer, LoraConfig(r=options.rank, target_parameters=PARAMETERS))
            spread(layer)
        if name == "peft":
            block.mlp.experts.config._experts_implementation = "grouped_mm"
        else:
            hexa_fx.optimize_(layer, few, hexa_fx.HexaConfig(own_code_when_small=False))
        found.append(layer)
    return found


@torch.no_grad()
def few_rows(options: argparse.Namespace) -> Iterator[Row]:
    """One row a number of tokens."""
    x, ids, gates, _ = inputs(options)
    layers = {name: layers_of(name, options.layers, options) for name in ("frozen", "adapters", "peft")}
    for tokens in FEW_TOKENS:
        few = x[:tokens], ids[:tokens], gates[:tokens]
        runs: dict[str, Callable[[], object]] = {
            name: lambda own=own, few=few: [layer(*few) for layer in own] for name, own in layers.items()
        }
        if options.device != "cpu":
            for run in runs.values():
                run()
            wait_for_kernels()
            runs = {name: captured(run) for name, run in runs.items()}
        found = times(runs, options, 0.2, 0.3)
        us = {f"{name}_us": round(1e3 * each / options.layers, 1) for name, each in found.items()}
        yield {"question": "few", "tokens": tokens, "layers": options.layers} | us


def times(
    runs: dict[str, Callable[[], object]], options: argparse.Namespace, warm_s: float = 0.5, timed_s: float = 0.9
) -> dict[str, float]:
    """Milliseconds of each."""
    wait_for_kernels()
    if options.device == "cpu":
        return {name: 1e3 * timed(lambda run=run: run(), 1)[0] for name, run in runs.items()}
    return steady(runs, options.turns, warm_s, timed_s)


def inputs(options: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, distinct expert ids, routing weights and the result's gradient."""
    config = make("qwen3-30b", "meta", options.shrink).config
    experts, top_k, width = config.num_experts, config.num_experts_per_tok, config.hidden_size
    with torch.device(options.device):
        weights, ids = torch.randn(options.tokens, experts).softmax(-1).topk(top_k, dim=-1)
        x, dy = (torch.randn(options.tokens, width, dtype=torch.bfloat16) for _ in range(2))
    return x.requires_grad_(), ids, weights.bfloat16().requires_grad_(), dy


def product_rows(options: argparse.Namespace) -> Iterator[Row]:
    """One row a product of the adapted layer."""
    config, ops = make("qwen3-30b", "meta", options.shrink).config, torch.ops.hexa
    experts, top_k = config.num_experts, config.num_experts_per_tok
    model, inner = config.hidden_size, config.moe_intermediate_size
    x, ids, gates, dy = (t.detach() for t in inputs(options))
    v, _, offs = ops.reindex(ids, experts)
    n, rank = v.shape[0], options.rank
    gathered, own = (v, offs, top_k), (None, offs, 1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=options.device) * 0.02

    w1, w2, u = random(experts, 2 * inner, model), random(experts, model, inner), random(n, rank)
    a, h = random(n, inner), random(n, 2 * inner)
    a1, c1 = random(experts, rank, model), random(experts, 2 * inner, rank)
    a2, c2 = random(experts, rank, inner), random(experts, model, rank)
    act, none = ("silu", "concat", []), (None, None, None)
    up, down = (x, w1, *none, *gathered, "nk", *act, True), (a, w2, None, *own, "nk")
    da, dx = (dy, w2, h, gates, *gathered, "kn", *act), (h, w1, None, *own, "kn")
    narrow = {
        "x A1": Esmm(x, a1, None, *gathered, "nk"),
        "a A2": Esmm(a, a2, None, *own, "nk"),
        "dy C2": Esmm(dy, c2, None, *gathered, "kn"),
        "dh C1": Esmm(h, c1, None, *own, "kn"),
        "dA1": Estmm(x, u, v, None, offs, top_k, "nk"),
        "dC1": Estmm(u, h, None, None, offs, 1, "nk"),
        "dA2": Estmm(a, u, None, None, offs, 1, "nk"),
        "dC2": Estmm(u, dy, None, v, offs, top_k, "nk"),
    }
    runs: dict[str, Callable[[], object]] = {
        "up": lambda: ops.esmm_act(*up),
        "up, second product": lambda: ops.esmm_act_low_rank(*up, u, c1, None),
        "down": lambda: ops.esmm(*down),
        "down, second product": lambda: ops.esmm_low_rank(*down, u, c2),
        "dA": lambda: ops.esmm_act_backward(*da),
        "dA, second product": lambda: ops.esmm_act_backward_low_rank(*da, u, a2),
        "dX": lambda: ops.esmm(*dx),
        "dX, second product": lambda: ops.esmm_low_rank(*dx, u, a1),
    }
    # C of the second projection, as PEFT has it
    stored = torch.randn(c2.shape[1] * rank, experts, device=options.device)
    runs["C, transposed and cast"] = lambda: ops.scaled_transpose(stored, torch.bfloat16, 0.5)
    runs["C, by torch"] = lambda: stored.t().to(torch.bfloat16).contiguous() * 0.5
    for name, record in narrow.items():
        operator = ops.esmm if isinstance(record, Esmm) else ops.estmm
        runs[name] = lambda operator=operator, record=record: operator(*record)
        if options.device == "cpu":
            continue
        sm90 = on_tensors(gemm_sm90)
        product: Any = sm90.esmm if isinstance(record, Esmm) else sm90.estmm
        for tile in NARROW_CANDIDATES[1:]:
            label = f"{name}, {tile.bm}x{tile.bn}, {tile.stages} stages"
            runs[label] = lambda product=product, record=record, tile=tile: product(record, tile)
    if options.device != "cpu":
        prebuild(lambda: [run() for run in runs.values()])
    for name, found in times(runs, options, 0.2, 0.3).items():
        yield {"question": "products", "product": name, "ms": round(found, 4)}


def spread(model: nn.Module) -> None:
    """PEFT's adapters begin with zeros in one factor; random data takes the power that training takes."""
    for name, p in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(p, std=0.02)


def model_rows(options: argparse.Namespace) -> Iterator[Row]:
    """One row a model and a place of adapters."""
    ids = tokens_of(options.device, options.tokens)
    for implementation in ("hexa", "grouped_mm"):
        alone: tuple[float, float | None] = 0.0, None
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

            row: Row = {"question": "model", "layers": options.layers, "impl": implementation, "adapters": adapted}
            try:
                step()
                seconds, peak = timed(step, options.rounds)
            except torch.OutOfMemoryError:
                yield row | {"ms": None, "peak_mib": None, "left_out": "does not fit"}
            else:
                row |= {"ms": round(1e3 * seconds, 1), "peak_mib": peak}
                yield row | over(alone, (seconds, peak), options.layers)
                alone = seconds, peak
            del model, step


def over(alone: tuple[float, float | None], both: tuple[float, float | None], layers: int) -> Row:
    """Time and peak with adapters on experts too, over those with adapters on attention alone, beside their bars."""
    if not alone[0]:
        return {}
    row: Row = {"time_ratio": round(both[0] / alone[0], 3)}
    row |= {"bar_ratio": STEP_RATIO, "bar_peak_mib": STEP_PEAK_MIB} if layers == STEP_LAYERS else {}
    more = None if alone[1] is None or both[1] is None else round(both[1] - alone[1], 1)
    return row | {"more_peak_mib": more}


QUESTIONS = {"layer": layer_rows, "few": few_rows, "products": product_rows, "model": model_rows}


def main() -> None:
    """Prints a JSON line a row; `--json` keeps them with what they depend on."""
    parser = options_of(__doc__)
    parser.add_argument("questions", nargs="*", default=["layer", "model"])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=STEP_LAYERS)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shrink", type=int, default=1)
    answer(QUESTIONS, parser.parse_args())


if __name__ == "__main__":
    main()
