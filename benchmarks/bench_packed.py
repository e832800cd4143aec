"""Decode of layers with packed experts on one GPU, beside bf16 and what bytes allow: microseconds a layer.

    python benchmarks/bench_packed.py [--shapes qwen3-30b-fp8,...] [--tokens 1,8,64] [--layers 6] [--tiles] [--json FILE]

A layer is `hexa::moe_ffn_sources`. Each time is that of a CUDA graph that runs `--layers` layers in a row, over their number:
they have weights and routings of their own, so that no weight is found in a cache. ``limit`` is the time in which the packed bytes
of the experts that are reached can be read once, as fast as the card reads one large tensor. ``up`` and ``down`` are the products
alone, the same way. ``error`` is ||out - ref|| / ||ref|| of the first layer against bf16 weights as they are unpacked. ``--tiles``
times every tile of both products. ``humming_up`` and ``humming_down`` are Humming's products of as many rows and weights of its own
in the same format, where it is installed: its rows are in expert order before, and no activation follows.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from typing import Any
from unittest import mock

import torch
from common import captured, steady
from kept_rows import keep, options_of
from launching import on_tensors, prebuild
from peer_products import humming
from torch import Tensor

import hexa_fx.ops  # noqa: F401  (defines torch.ops.hexa)
from hexa_fx.codegen.family_packed import PackedTile, candidates
from hexa_fx.codegen.spec import KernelSpec
from hexa_fx.cuda import calls, choosing, packed
from hexa_fx.cuda.packed import PackedProduct, Streamed
from hexa_fx.formats import FP8_BLOCK, INT8_ROWS, MXFP4, NF4
from hexa_fx.jit import background
from hexa_fx.ops.table import Esmm, EsmmAct

OPS, DEVICE = torch.ops.hexa, "cuda"
BF16 = torch.bfloat16
QWEN3_8_US = 70
"""At most, on an H200: a layer of Qwen3-30B with 8 tokens."""


@dataclass(frozen=True)
class Shape:
    """A layer of a model: E experts, k a token, D model size, I intermediate size."""

    layer: str
    experts: int
    top_k: int
    model: int
    inner: int
    format: Streamed
    activation: str
    glu: str
    params: tuple[float, ...]
    bias: bool


SHAPES = {
    "qwen3-30b": Shape("qwen3-30b", 128, 8, 2048, 768, NF4, "silu", "concat", (), False),
    "qwen3-30b-fp8": Shape("qwen3-30b", 128, 8, 2048, 768, FP8_BLOCK, "silu", "concat", (), False),
    "qwen3-30b-int8": Shape("qwen3-30b", 128, 8, 2048, 768, INT8_ROWS, "silu", "concat", (), False),
    "dsv3-fp8": Shape("dsv3", 256, 8, 7168, 2048, FP8_BLOCK, "silu", "concat", (), False),
    "mixtral": Shape("mixtral", 8, 2, 4096, 14336, NF4, "silu", "concat", (), False),
    "mixtral-fp8": Shape("mixtral", 8, 2, 4096, 14336, FP8_BLOCK, "silu", "concat", (), False),
    "gpt-oss-20b": Shape("gpt-oss-20b", 32, 4, 2880, 2880, MXFP4, "swiglu_oai", "interleaved", (1.702, 7.0), True),
    "tiny": Shape("tiny", 6, 2, 192, 64, NF4, "silu", "concat", (), False),
}


Packed = tuple[Tensor, Tensor]
"""Codes and their scales."""


@dataclass
class Layer:
    """A layer's packed weights and biases."""

    shape: Shape
    w1: Packed
    w2: Packed
    b1: Tensor | None
    b2: Tensor | None


@dataclass
class Call:
    """What a layer is called with, and its rows in expert order."""

    x: Tensor
    ids: Tensor
    gates: Tensor
    rows: tuple[Tensor, Tensor, Tensor]
    a: Tensor


def random_weight(shape: Shape, columns: int, k: int) -> Packed:
    """Any codes, under scales that keep results of the operands' size."""
    f, experts = shape.format, shape.experts
    codes = torch.randint(0, 256, f.packed_shape((experts, columns, k)), dtype=torch.uint8, device=DEVICE)
    (size,), (dtype,) = f.scale_shapes((experts, columns, k)), f.scale_dtypes()
    if f.per_item == 1:
        codes.sub_(codes.bitwise_and(127).eq(127).byte())  # E4M3's are NaN
        return codes.view(f.dtype), (torch.rand(size, device=DEVICE) + 0.5) * k**-0.5 / 128
    if dtype == torch.uint8:
        return codes, torch.randint(117, 121, size, dtype=dtype, device=DEVICE)
    return codes, (torch.rand(size, device=DEVICE) + 0.5) * k**-0.5


def make_layer(shape: Shape) -> Layer:
    columns = (2 if shape.glu != "none" else 1) * shape.inner
    w1, w2 = random_weight(shape, columns, shape.model), random_weight(shape, shape.model, shape.inner)
    widths = (columns, shape.model)
    biases = (
        [torch.randn(shape.experts, width, dtype=BF16, device=DEVICE) for width in widths] if shape.bias else [None] * 2
    )
    return Layer(shape, w1, w2, *biases)


def make_call(shape: Shape, tokens: int) -> Call:
    ids = torch.randn(tokens, shape.experts, device=DEVICE).topk(shape.top_k, dim=1).indices
    x = torch.randn(tokens, shape.model, dtype=BF16, device=DEVICE)
    gates = torch.rand(tokens, shape.top_k, device=DEVICE).softmax(-1).to(BF16)
    a = torch.randn(tokens * shape.top_k, shape.inner, dtype=BF16, device=DEVICE)
    return Call(x, ids, gates, OPS.reindex(ids, shape.experts), a)


def up(layer: Layer, c: Call, rows: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    s, (v, _, offs) = layer.shape, rows
    static: Any = (s.top_k, "nk", s.activation, s.glu, s.params, False)
    base = EsmmAct(c.x, layer.w1[0], layer.b1, None, None, v, offs, *static)
    return on_tensors(packed).streamed_esmm_act(PackedProduct(base, layer.w1[1], None, s.format))[1]


def down(layer: Layer, a: Tensor, rows: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    base = Esmm(a, layer.w2[0], layer.b2, None, rows[2], 1, "nk").plain
    return on_tensors(packed).streamed_esmm(PackedProduct(base, layer.w2[1], None, layer.shape.format))


def run_packed(layer: Layer, c: Call) -> Tensor:
    s, name = layer.shape, layer.shape.format.name
    weights = (layer.w1[0], layer.b1, None, None, layer.w2[0], layer.b2)
    sources = (*[None] * 6, [0.0] * 3, [layer.w1[1]], [], [layer.w2[1]], [name, "dense", name])
    static = (s.activation, s.glu, list(s.params), "nk", "nk", False)
    return OPS.moe_ffn_sources(c.x, c.ids, c.gates, *weights, *sources, *static)  # type: ignore[no-any-return]


def dense(layer: Layer) -> tuple[Tensor | None, ...]:
    """The layer's operands of moe_ffn, in bf16."""
    w1, w2 = (layer.shape.format.dense(codes, [scales], BF16) for codes, scales in (layer.w1, layer.w2))
    return w1, layer.b1, None, None, w2, layer.b2


def run_dense(shape: Shape, weights: tuple[Tensor | None, ...], c: Call) -> Tensor:
    static = (shape.activation, shape.glu, list(shape.params), "nk", "nk", False)
    return OPS.moe_ffn(c.x, c.ids, c.gates, *weights, *static)  # type: ignore[no-any-return]


def packed_bytes(shape: Shape, c: Call) -> int:
    """Of the experts that are reached: codes and scales of both weights."""
    f, columns = shape.format, (2 if shape.glu != "none" else 1) * shape.inner
    sizes = [(1, columns, shape.model), (1, shape.model, shape.inner)]
    codes = sum(prod(f.packed_shape(size)) for size in sizes)
    scales = sum(prod(f.scale_shapes(size)[0]) for size in sizes) * f.scale_dtypes()[0].itemsize
    return int(c.ids.unique().numel()) * (codes + scales)


def read_rate() -> float:
    """Bytes a second at which the card reads one tensor: a sum over 2 GiB."""
    large = torch.ones(1 << 30, dtype=BF16, device=DEVICE)
    return large.nbytes / steady({"read": lambda: large.sum(dtype=torch.float32)}, turns=1)["read"] * 1e3


def bench(name: str, tokens: int, options: argparse.Namespace, rate: float, cache: dict[str, Any]) -> dict[str, Any]:
    shape, count = SHAPES[name], options.layers
    if cache.get("name") != name:
        cache.clear()
        cache.update(name=name, layers=[make_layer(shape) for _ in range(count)])
        first = dense(cache["layers"][0])
        cache["dense"] = [first, *(tuple(None if t is None else t.clone() for t in first) for _ in range(count - 1))]
    layers, calls = cache["layers"], [make_call(shape, tokens) for _ in range(count)]
    pairs = list(zip(layers, calls, strict=True))
    steps: dict[str, Callable[[], object]] = {
        "packed": lambda: [run_packed(layer, c) for layer, c in pairs],
        "bf16": lambda: [run_dense(shape, w, c) for w, c in zip(cache["dense"], calls, strict=True)],
        "up": lambda: [up(layer, c, c.rows) for layer, c in pairs],
        "down": lambda: [down(layer, c.a, c.rows) for layer, c in pairs],
    }
    prebuild(lambda: [step() for step in steps.values()])
    steps |= peers(shape, calls)
    out, ref = run_packed(*pairs[0]).float(), run_dense(shape, cache["dense"][0], calls[0]).float()
    wait_for_builds()
    times = steady({key: captured(step) for key, step in steps.items()}, turns=options.turns)
    row: dict[str, Any] = {
        "shape": shape.layer,
        "format": shape.format.name,
        "tokens": tokens,
        "error": float((out - ref).norm() / ref.norm()),
    }
    row |= {f"{key}_us": ms * 1e3 / count for key, ms in times.items()}
    row["bytes"] = sum(packed_bytes(shape, c) for c in calls) / count
    row["limit_us"] = row["bytes"] / rate * 1e6
    if options.tiles:
        row["tiles"] = tile_times(shape, pairs, count)
    return row


def peers(shape: Shape, calls: list[Call]) -> dict[str, Callable[[], object]]:
    """Humming's products, of weights that no other call has."""
    columns = (2 if shape.glu != "none" else 1) * shape.inner
    steps: dict[str, Callable[[], object]] = {}
    try:
        for name, width in (("up", columns), ("down", shape.model)):
            runs = []
            for c in calls:
                v, _, offs = c.rows
                runs.append(humming(shape.format.name, width, c.x[v // shape.top_k] if name == "up" else c.a, offs))
            steps[f"humming_{name}"] = partial(_each, runs)
    except Exception as error:  # not installed, or whatever it raises here
        print(f"      no row of humming: {error!r}"[:300], flush=True)
        return {}
    return steps


def _each(runs: list[Callable[[], object]]) -> None:
    for run in runs:
        run()


def wait_for_builds() -> None:
    """A layer's first call requests its kernels for any number of tokens, and compilers keep the host busy."""
    for thread in threading.enumerate():
        if thread.name == "hexa_fx kernel set":
            thread.join()
    background.builder().wait()


def tile_times(shape: Shape, pairs: list[tuple[Layer, Call]], count: int) -> list[dict[str, Any]]:
    """Microseconds of each product with each tile."""
    products: dict[str, tuple[int, Callable[[], object]]] = {
        "up": (shape.model, lambda: [up(layer, c, c.rows) for layer, c in pairs]),
        "down": (shape.inner, lambda: [down(layer, c.a, c.rows) for layer, c in pairs]),
    }
    rows = []
    block = int(packed.codes_of(shape.format)["block"])
    background.prebuild(
        [spec for k, step in products.values() for tile in candidates(k, block) for spec in wanted(tile, step)]
    )
    for product, (k, step) in products.items():
        for tile in candidates(k, block):
            with fixed_tile(tile):
                ms = steady({"tile": captured(step)}, turns=1, warm_s=0.1, timed_s=0.2)["tile"]
            rows.append({"product": product, **asdict(tile), "us": ms * 1e3 / count})
            print("     ", rows[-1], flush=True)
    return rows


def wanted(tile: PackedTile, step: Callable[[], object]) -> list[KernelSpec]:
    """The kernels of a step with this tile."""
    with fixed_tile(tile), choosing.collect() as specs:
        step()
    return list(dict.fromkeys(specs))


class fixed_tile:
    """A context in which every product takes one tile."""

    def __init__(self, tile: PackedTile) -> None:
        self.patch = mock.patch.object(calls, "chosen_tile", return_value=tile)

    def __enter__(self) -> None:
        choosing.forget_choices()
        self.patch.start()

    def __exit__(self, *exception: object) -> None:
        self.patch.stop()
        choosing.forget_choices()


def main() -> None:
    """Prints a line for each shape and number of tokens, writes the JSON."""
    parser = options_of(__doc__)
    parser.add_argument("--shapes", default="qwen3-30b,qwen3-30b-fp8,gpt-oss-20b")
    parser.add_argument("--tokens", default="1,8,64")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--tiles", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    rate, rows, cache = read_rate(), [], {}
    print(f"reads {rate / 1e12:.2f} TB/s", flush=True)
    for name in options.shapes.split(","):
        for tokens in map(int, options.tokens.split(",")):
            row = bench(name, tokens, options, rate, cache)
            rows.append(row)
            print(line(row), flush=True)
            keep(rows, options.json, bytes_per_second=rate, layers=options.layers)


def line(row: dict[str, Any]) -> str:
    keys = ("packed", "bf16", "up", "down", "humming_up", "humming_down", "limit")
    times = " ".join(f"{key} {row[f'{key}_us']:7.1f}" for key in keys if f"{key}_us" in row)
    bar = f"   bar {QWEN3_8_US}" if (row["shape"], row["format"], row["tokens"]) == ("qwen3-30b", "nf4", 8) else ""
    return f"{row['shape']:11s} {row['format']:9s} {row['tokens']:3d} tokens   us: {times}   error {row['error'] * 1e3:.2f}e-3{bar}"


if __name__ == "__main__":
    main()
