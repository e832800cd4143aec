"""Forward of dense layers on one GPU by number of tokens, beside what the card allows and peers: microseconds a layer.

    python benchmarks/bench_decode.py [--shapes qwen3-30b,mixtral] [--tokens 1,2,4,...] [--layers 6] [--tiles] [--json FILE]

Each time is that of a CUDA graph that runs `--layers` layers one after another (two from 512 tokens on), over their number: they
have weights and routings of their own, so that no weight is found in a cache. ``hexa`` is `hexa::moe_ffn` as it comes, ``general``
the same with HEXA_FX_FEW_TOKENS=0, up to 256 tokens, ``grouped`` transformers' experts with `grouped_mm`, ``vllm`` and ``sglang``
the Triton layers of these packages where they are installed (else a line says why not). ``limit`` is the time in which the card
can read the weights of the experts that are reached once at its nominal rate (H200: 4.8 TB/s, H100: 3.35), or multiply at 989
TFLOP/s if that takes longer; ``read`` the time of reading at the rate at which it reads one large tensor. ``error`` is ||out -
ref|| / ||ref|| of the first layer against ``general``, or ``grouped``. ``--tiles`` times tiles of both products.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any
from unittest import mock

import peers
import torch
from bench_packed import captured, read_rate
from common import SHAPES, MoeShape, steady
from kept_rows import keep, options_of
from layers import Weights as Parameters
from layers import transformers_experts
from torch import Tensor

import hexa_fx.ops  # noqa: F401  (defines torch.ops.hexa)
from hexa_fx.codegen.family_decode import DecodeTile, candidates
from hexa_fx.cuda import calls, choosing
from hexa_fx.jit import kernel as jit_kernel

OPS, DEVICE, BF16 = torch.ops.hexa, "cuda", torch.bfloat16
NOMINAL_BYTES, NOMINAL_FLOPS = {"H200": 4.8e12, "H100": 3.35e12}, 989e12
MOST_FEW, MANY = 256, 512
"""Tokens up to which a layer may take launches of its own; and from which on two layers are more than any cache holds."""
Weights = tuple[Tensor, Tensor]
Call = tuple[Tensor, Tensor, Tensor]
Step = Callable[[], object]


@contextmanager
def way(few: bool, tile: DecodeTile | None = None) -> Iterator[None]:
    """A context in which layers of few tokens take launches of their own, or none do; with a tile of one's own."""
    with mock.patch.dict(os.environ, HEXA_FX_FEW_TOKENS=str(int(few))):
        patches = [mock.patch.object(calls, "chosen_tile", return_value=tile)] if tile is not None else []
        for patch in patches:
            patch.start()
        _forget()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()
    _forget()


def _forget() -> None:
    jit_kernel.get_kernel.cache_clear()
    choosing.forget_choices()


def random_weights(s: MoeShape) -> Weights:
    """(E, 2 I, D) and (E, D, I)."""
    sizes = ((s.experts, 2 * s.inner, s.model), (s.experts, s.model, s.inner))
    w1, w2 = (torch.empty(size, dtype=BF16, device=DEVICE).normal_(0, size[2] ** -0.5) for size in sizes)
    return w1, w2


def random_call(s: MoeShape, tokens: int) -> Call:
    """x, distinct ids and gates."""
    ids = torch.randn(tokens, s.experts, device=DEVICE).topk(s.top_k, dim=1).indices
    x = torch.randn(tokens, s.model, dtype=BF16, device=DEVICE)
    return x, ids, torch.rand(tokens, s.top_k, device=DEVICE).softmax(-1)


def run(c: Call, w: Weights) -> Tensor:
    """The layer as the package runs it."""
    static = ("silu", "concat", [], "nk", "nk", False)
    return OPS.moe_ffn(*c, w[0], None, None, None, w[1], None, *static)  # type: ignore[no-any-return]


def grouped(c: Call, w: Weights) -> Tensor:
    """transformers' experts on the same."""
    w1, w2 = (torch.nn.Parameter(t, requires_grad=False) for t in w)
    p = Parameters(c[0], c[1], c[2], w1, None, w2, None)
    shape = MoeShape(c[0].shape[0], c[1].shape[1], w[0].shape[0], w[0].shape[2], w[1].shape[2])
    return transformers_experts(shape, p, "grouped_mm")(*c)  # type: ignore[no-any-return]


def of_peer(name: str) -> Callable[[Call, Weights], Tensor] | None:
    """A peer's layer; None, with a line, where it cannot be had."""
    try:
        layer = getattr(peers, f"{name}_experts")()
    except Exception as reason:
        print(f"{name}: {type(reason).__name__}: {str(reason)[:200]}", flush=True)
        return None
    return lambda c, w: layer(c[0], w[0], w[1], c[2], c[1])


def bench(name: str, tokens: int, options: argparse.Namespace, rate: float, weights: list[Weights]) -> dict[str, Any]:
    """A row of the table."""
    s = SHAPES[name]
    weights = weights if tokens < MANY else weights[:2]
    calls_of = [random_call(s, tokens) for _ in weights]
    pairs = list(zip(calls_of, weights, strict=True))
    graphs: dict[str, Step] = {}
    outputs: dict[str, Tensor] = {}
    for key in ("hexa", "general") if tokens <= MOST_FEW else ("hexa",):
        with way(key == "hexa"):
            outputs[key] = run(*pairs[0])
            graphs[key] = captured(lambda: [run(*pair) for pair in pairs])
    for key, layer in options.peers.items():
        try:
            outputs[key] = layer(*pairs[0])
            graphs[key] = captured(lambda layer=layer: [layer(*pair) for pair in pairs])
        except Exception as reason:
            print(f"{key}: {type(reason).__name__}: {str(reason)[:200]}", flush=True)
    times = steady(graphs, turns=options.turns, warm_s=options.seconds / 2, timed_s=options.seconds)
    row: dict[str, Any] = {"shape": name, "tokens": tokens}
    for key in ("general", "grouped"):
        if key in outputs:
            ref = outputs[key].float()
            row["error"] = float((outputs["hexa"].float() - ref).norm() / ref.norm())
            break
    row |= {f"{key}_us": ms * 1e3 / len(pairs) for key, ms in times.items()}
    row["bytes"] = sum(c[1].unique().numel() for c in calls_of) / len(pairs) * 6 * s.model * s.inner
    flops = 6.0 * tokens * s.top_k * s.model * s.inner
    nominal = next((of_card for card, of_card in NOMINAL_BYTES.items() if card in torch.cuda.get_device_name()), rate)
    row["limit_us"] = max(row["bytes"] / nominal, flops / NOMINAL_FLOPS) * 1e6
    row["read_us"] = row["bytes"] / rate * 1e6
    if options.tiles:
        row["tiles"] = list(tile_times(pairs))
    return row


def tile_times(pairs: list[tuple[Call, Weights]]) -> Iterator[dict[str, Any]]:
    """Microseconds of the layer with each tile that this card can hold, for both products."""
    for tile in candidates():
        try:
            with way(True, tile):
                graph = captured(lambda: [run(*pair) for pair in pairs])
        except Exception as reason:
            print(f"      {tile}: {str(reason)[:120]}", flush=True)
            continue
        ms = steady({"tile": graph}, turns=1, warm_s=0.05, timed_s=0.1)["tile"]
        found = {**asdict(tile), "us": ms * 1e3 / len(pairs)}
        print("     ", found, flush=True)
        yield found


def line(row: dict[str, Any]) -> str:
    names = [key.removesuffix("_us") for key in row if key.endswith("_us")]
    times = " ".join(f"{key} {row[f'{key}_us']:7.1f}" for key in names)
    part, error = row["limit_us"] / row["hexa_us"], row.get("error", float("nan"))
    return f"{row['shape']:10s} {row['tokens']:5d} tokens  us: {times}  {part:.0%} of limit  error {error * 1e3:.2f}e-3"


def main() -> None:
    """Prints a line for each shape and number of tokens, writes the JSON."""
    parser = options_of(__doc__)
    parser.add_argument("--shapes", default="qwen3-30b,mixtral")
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64,128,256")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--peers", default="grouped,vllm,sglang")
    parser.add_argument("--tiles", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    found = {name: grouped if name == "grouped" else of_peer(name) for name in options.peers.split(",") if name}
    options.peers = {name: layer for name, layer in found.items() if layer is not None}
    rate, rows = read_rate(), list[dict[str, Any]]()
    print(f"reads {rate / 1e12:.2f} TB/s", flush=True)
    for name in options.shapes.split(","):
        weights = [random_weights(SHAPES[name]) for _ in range(options.layers)]
        for tokens in map(int, options.tokens.split(",")):
            rows.append(bench(name, tokens, options, rate, weights))
            print(line(rows[-1]), flush=True)
            keep(rows, options.json, bytes_per_second=rate, layers=options.layers)


if __name__ == "__main__":
    main()
