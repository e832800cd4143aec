"""Builds the kernels that bench_partition.py will need, all at a time, on one GPU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks.launching import prebuild as build
from benchmarks.partition_shapes import MEMORY, SHAPES, UNEQUAL
from benchmarks.partition_unequal import SETTINGS, tile, work
from hexa_fx.distributed.geometry import Geometry
from hexa_fx.plan import ExpertShape

DEVICE = "cuda:0"


def prebuild(worlds: Sequence[int], names: Sequence[str]) -> None:
    """Runs every product that the sections will run, in the sizes of every rank count, without launching anything."""

    def run() -> None:
        for world in worlds:
            for name in names:
                _sweep(*SHAPES[name], world)
                torch.cuda.empty_cache()
            for sizes in SETTINGS[world]:
                _unequal(sizes)
        _correctness()
        _data_centric(MEMORY, 2048)

    start = time.monotonic()
    print(f"{build(run)} kernels in {time.monotonic() - start:.1f} s", flush=True)


def _sweep(shape: ExpertShape, counts: Sequence[int], world: int) -> None:
    for tokens in counts:
        _experts(shape, tokens // world, shape.intermediate_size)
        _experts(shape, tokens, shape.intermediate_size // world)
        one = replace(shape, num_experts=shape.num_experts // world, top_k=1)
        _experts(one, tokens * shape.top_k // world, shape.intermediate_size)
        _data_centric(shape, tokens // world)


def _unequal(sizes: Sequence[int]) -> None:
    for name, (tokens, _) in UNEQUAL.items():
        shape = SHAPES[name][0]
        whole = shape.intermediate_size
        _experts(shape, 1024, 512)
        _experts(shape, tokens, whole)
        share = min(tokens, int(1.5 * tokens / len(sizes)))
        for count, channels in ((share, whole), (share // 4, whole), (tokens, whole // 2), (tokens, whole // 8)):
            _experts(shape, count, channels // 128 * 128)  # of profile_costs
        for part in (share / sum(sizes) for share in sizes):
            _experts(shape, tokens, int(whole * part) // tile(shape) * tile(shape))
            _experts(shape, int(tokens * part), whole)
            _data_centric(shape, int(tokens * part))
        torch.cuda.empty_cache()


def _correctness() -> None:
    small = ExpertShape(8, 256, 512, 3, 2)
    for dtype in (torch.bfloat16, torch.float32):
        for tokens in (256, 512, 1024):
            for channels in (512, 384, 256, 192, 128, 64):
                _experts(small, tokens, channels, dtype)
            _data_centric(small, tokens, dtype)


def _experts(shape: ExpertShape, tokens: int, channels: int, dtype: torch.dtype = torch.bfloat16) -> None:
    work(shape, tokens, channels, DEVICE, dtype, None)()


def _data_centric(shape: ExpertShape, tokens: int, dtype: torch.dtype = torch.bfloat16) -> None:
    gated = shape.matrices == 3
    geometry = Geometry(shape, "split" if gated else "none", "nk", "kn", False)
    rows = torch.empty(shape.intermediate_size, geometry.row, device=DEVICE, dtype=dtype)
    views = [None if w is None else w.detach().requires_grad_() for w in geometry.views(rows)]
    x = torch.empty(tokens, shape.hidden_size, device=DEVICE, dtype=dtype).requires_grad_()
    index = torch.zeros(tokens, shape.top_k, device=DEVICE, dtype=torch.int64)
    weights = torch.empty(tokens, shape.top_k, device=DEVICE, dtype=dtype).requires_grad_()
    static = ("silu" if gated else "gelu", geometry.glu, [], "nk", "kn", False)
    y = torch.ops.hexa.moe_ffn(x, index, weights, *views, None, *static)
    torch.autograd.grad(y, [x, weights, *(v for v in views if v is not None)], torch.ones_like(y))
