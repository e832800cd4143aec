"""Training with frozen bases in few bits on one GPU: a layer beside bf16 bases, and the peak of a whole QLoRA step.

    python benchmarks/bench_qlora.py [layer] [step] [invariant] [--formats nf4,mxfp4] [--model gpt-oss-20b] [--json FILE]

`layer` is transformers' Qwen3-MoE experts at Qwen3-30B's widths: forward and backward of `--tokens` tokens with frozen weights, in
bf16 and in each format, with gradients of the input and the routing weights alone (rank 0) and of PEFT's adapters too. ``ratio`` is
to bf16 weights of the same rank. `step` is one step of AdamW on adapters of a whole model with random codes for experts, a
checkpoint for each layer, and 4096 tokens: what the model holds, and the step's peak. `invariant` is forward of a layer with every
sum in a fixed order beside without. ``bitsandbytes``, where it is installed, is its 4-bit parameters on transformers' experts, with
no adapters on these: PEFT 0.21 loses one of two on such parameters. Times as in bench_moe_layer.py.
`--shrink 32 --device cpu --tokens 64 --step-tokens 64 --layers 2` tries the script without a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from bench_adapters import ATTENTION, PARAMETERS, Layer, inputs, spread, times
from bench_whole_models import timed
from kept_rows import Row, answer, options_of, wait_for_kernels
from peft import LoraConfig, get_peft_model
from real_blocks import REAL_BLOCKS, make
from torch import Tensor, nn

import hexa_fx
from hexa_fx.formats import format_of
from hexa_fx.formats.quantized_weight import QuantizedWeight
from hexa_fx.sources.packed_parameters import set_packed

GIB = 2**30
LAYER_RATIO, INVARIANT_RATIO = 1.2, 1.05
"""At most: frozen bases in few bits over frozen bf16 ones; forward with every sum in a fixed order over without."""
DEPTH = {
    "gpt-oss-20b": {"num_hidden_layers": 24, "vocab_size": 201088},
    "qwen3-30b": {"num_hidden_layers": 48, "vocab_size": 151936},
}
HEADS = {
    "gpt-oss-20b": {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64},
    "qwen3-30b": {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
}


def layer_rows(options: argparse.Namespace) -> Iterator[Row]:
    """One row a format and a rank; peaks are above what was allocated before."""
    x, ids, gates, dy = inputs(options)
    few = x.detach()[:256], ids[:256], gates.detach()[:256]
    for rank in (0, options.rank):
        runs: dict[str, Callable[[], object]] = {}
        for format in ("bf16", *options.formats.split(","), *(() if rank else bitsandbytes())):
            experts = make("qwen3-30b", options.device, options.shrink).model.layers[0].mlp.experts
            layer: nn.Module = Layer(experts).train().requires_grad_(False)
            if format == "bitsandbytes":
                replace_parameters(experts)
            if rank:
                layer = get_peft_model(layer, LoraConfig(r=rank, target_parameters=PARAMETERS))
                spread(layer)
            if format == "bitsandbytes":
                experts.config._experts_implementation = "grouped_mm"
            else:
                hexa_fx.optimize_(layer, few, hexa_fx.HexaConfig(own_code_when_small=False))
            if format in options.formats.split(","):
                hexa_fx.quantize_experts_(layer, format)  # type: ignore[arg-type]
            wanted = [x, gates, *(p for p in layer.parameters() if p.requires_grad)]
            runs[format] = lambda layer=layer, wanted=wanted: torch.autograd.grad(layer(x, ids, gates), wanted, dy)
        found = times(runs, options, 0.3, 0.6)
        for format, ms in found.items():
            peak = timed(runs[format], 1)[1]
            row: Row = {"question": "layer", "rank": rank, "weights": format, "ms": round(ms, 3)}
            row |= {"ratio": round(ms / found["bf16"], 3), "peak_mib": peak}
            yield row | ({"bar_ratio": LAYER_RATIO} if format in options.formats.split(",") else {})


def bitsandbytes() -> list[str]:
    """Its name, where it is installed."""
    return ["bitsandbytes"] if importlib.util.find_spec("bitsandbytes") else []


def replace_parameters(experts: nn.Module) -> None:
    """Makes bitsandbytes' 4-bit parameters of a layer's."""
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    for name in ("gate_up_proj", "down_proj"):
        replace_parameter_4bit(experts, name, quant_type="nf4")


def step_rows(options: argparse.Namespace) -> Iterator[Row]:
    """One row a way to hold the experts."""
    for way in ("mxfp4" if options.model.startswith("gpt") else "nf4", *bitsandbytes()):
        packed = way != "bitsandbytes"
        model = whole(options, way)
        ids = torch.randint(1, model.config.vocab_size, (1, options.step_tokens), device=options.device)
        if packed:
            hexa_fx.optimize_(model, ids[:, :64], hexa_fx.HexaConfig(own_code_when_small=False))
        else:
            model.set_experts_implementation("grouped_mm")
        adapted = [f"mlp.{name}" for name in PARAMETERS] if packed else None
        lora = LoraConfig(r=options.rank, target_modules=ATTENTION, target_parameters=adapted)
        model = get_peft_model(model, lora).train()
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4)

        def step(model: Any = model, optimizer: Any = optimizer, ids: Tensor = ids) -> None:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        step()  # kernels that only a step shows, and the optimizer's moments
        wait_for_kernels()
        held = torch.cuda.memory_allocated() if options.device != "cpu" else 0
        seconds, above = timed(step, options.rounds)
        row: Row = {
            "question": "step",
            "model": options.model,
            "experts": way,
            "layers": model.config.num_hidden_layers,
        }
        row |= {"adapters": "attention and experts" if packed else "attention", "rank": options.rank}
        without = timed_without_experts(model, step, options)
        row |= {"tokens": options.step_tokens, "ms": round(1e3 * seconds, 1), "ms_without_experts": without}
        yield row | {"held_gib": round(held / GIB, 2), "peak_gib": round((held + (above or 0) * 2**20) / GIB, 2)}
        del model, trained, optimizer, step
        if options.device != "cpu":
            torch.cuda.empty_cache()


def timed_without_experts(model: nn.Module, step: Callable[[], None], options: argparse.Namespace) -> float:
    """Milliseconds of a step whose MoE layers hand their tokens on: what attention, the head and the optimizer take."""
    layers = [module.mlp for module in model.modules() if hasattr(module, "mlp")]
    before = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        layer.__dict__["forward"] = lambda x: (x, None) if options.model.startswith("gpt") else x
    step()
    seconds, _ = timed(step, options.rounds)
    for layer, forward_ in zip(layers, before):
        layer.__dict__.pop("forward")
        if forward_ is not None:
            layer.__dict__["forward"] = forward_
    return round(1e3 * seconds, 1)


def whole(options: argparse.Namespace, way: str) -> Any:
    """A model with all its layers, of which no dense form of all experts ever exists."""
    from transformers import AutoConfig, AutoModelForCausalLM

    block = REAL_BLOCKS[options.model]
    real = {**block.sizes, **DEPTH[options.model], **HEADS[options.model]}
    if options.shrink > 1:
        small = make(options.model, "meta", options.shrink).config
        real = {key: getattr(small, key) for key in (*block.sizes, *HEADS[options.model], "vocab_size")}
        real["num_hidden_layers"] = options.layers
    elif options.layers:
        real["num_hidden_layers"] = options.layers
    config = AutoConfig.for_model(block.kind, **real, pad_token_id=0, eos_token_id=None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for module in list(model.modules()):
        for name, weight in list(module._parameters.items()):
            if weight is None:
                continue
            if name in ("gate_up_proj", "down_proj") and way != "bitsandbytes":
                set_packed(module, name, random_codes(weight, way, options))
                continue
            data = torch.empty_like(weight, device=options.device).normal_(std=0.02)
            module._parameters[name] = nn.Parameter(data, requires_grad=False)
        if way == "bitsandbytes" and "gate_up_proj" in module._parameters:
            replace_parameters(module)
        for name, buffer in list(module._buffers.items()):  # rotary frequencies
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.rand(buffer.shape, dtype=buffer.dtype, device=options.device)
    return model


def random_codes(weight: Tensor, format: str, options: argparse.Namespace) -> nn.Parameter:
    """A packed weight of a shape, transposed where the model stores (E, in, out)."""
    transposed = options.model.startswith("gpt")
    shape = weight.transpose(1, 2).shape if transposed else weight.shape
    of = format_of(format)
    codes = torch.randint(0, 256, of.packed_shape(shape), dtype=torch.uint8, device=options.device)
    scales = [
        torch.full(s, 119 if d == torch.uint8 else 0.02, dtype=d, device=options.device)
        for s, d in zip(of.scale_shapes(shape), of.scale_dtypes(), strict=True)
    ]
    return nn.Parameter(QuantizedWeight(codes, scales, format, weight.dtype, transposed), requires_grad=False)


def invariant_rows(options: argparse.Namespace) -> Iterator[Row]:
    """One row a layer: forward in a fixed order and without."""
    for name in ("qwen3-30b", "mixtral-8x7b", "olmoe"):
        runs: dict[str, Callable[[], object]] = {}
        for fixed in (False, True):
            model = make(name, options.device, options.shrink)
            block = model.model.layers[0].mlp.eval().requires_grad_(False)
            x = torch.randn(1, options.tokens, model.config.hidden_size, device=options.device, dtype=torch.bfloat16)
            config = hexa_fx.HexaConfig(own_code_when_small=False, batch_invariant=fixed)
            with torch.no_grad():
                hexa_fx.optimize_(block, x[:, :256], config)
            runs["fixed" if fixed else "free"] = lambda block=block, x=x: forward(block, x)
        found = times(runs, options, 0.3, 0.6)
        row: Row = {"question": "invariant", "layer": name, "tokens": options.tokens}
        row |= {key: round(ms, 3) for key, ms in found.items()}
        yield row | {"ratio": round(found["fixed"] / found["free"], 3), "bar_ratio": INVARIANT_RATIO}


def forward(block: nn.Module, x: Tensor) -> Any:
    """Without gradients."""
    with torch.no_grad():
        return block(x)


QUESTIONS = {"layer": layer_rows, "step": step_rows, "invariant": invariant_rows}


def main() -> None:
    """Prints a JSON line a row; `--json` keeps them with what they depend on."""
    parser = options_of(__doc__)
    parser.add_argument("questions", nargs="*", default=["layer", "step"])
    parser.add_argument("--formats", default="nf4,mxfp4")
    parser.add_argument("--model", default="gpt-oss-20b", choices=tuple(DEPTH))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=0, help="of the whole model; 0 for all")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--step-tokens", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shrink", type=int, default=1)
    answer(QUESTIONS, parser.parse_args())


if __name__ == "__main__":
    main()
