"""The kernels of FP8 block compute on one Hopper GPU, one by one at the sizes of a layer, beside DeepGEMM where it is installed.

    python benchmarks/bench_fp8.py [--shapes qwen3-30b,...] [--json FILE]

Products: ``up`` gathers and quantises in its epilogue, ``down`` is the second projection, ``dA`` with the activation's gradient,
``dX``, ``dW1`` and ``dW2``; TFLOP/s count the product only. Casts: rows, columns (gathered and turned round) and weights in both
orientations; GB/s of what they read and write. ``deepgemm`` rows are its m-grouped contiguous product of the operands of ``down``
and ``dX``, which lie in expert order, where experts have as many rows as it wants multiples of. Each runs alone at its sustained
clock (`common.steady`).
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import SHAPES, MoeShape, environment, steady
from layers import build_kernels
from torch import Tensor

from hexa_fx.formats.fp8_scaling import BLOCK, ELEMENT, group_count
from hexa_fx.ops import library

DEFAULT = "qwen3-30b,dsv3,mixtral,sonic-30b,granite-fine"


class Case(NamedTuple):
    """One kernel: what it does in a call, as FLOPs or bytes."""

    name: str
    work: float
    unit: str
    run: Callable[[], object]


def op(name: str, *args: Any) -> Callable[[], object]:
    kernel = library.kernel_for(name, "cuda")
    return lambda: kernel(*args)


def quantised(*shape: int) -> Tensor:
    """Elements that cost the power of real ones."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).clamp_(-4, 4).to(ELEMENT)


def scales(*shape: int) -> Tensor:
    return torch.rand(shape, device="cuda") + 0.5


def rows(count: int, width: int) -> tuple[Tensor, Tensor]:
    return quantised(count, width), scales(count, width // BLOCK)


def weight(experts: int, columns: int, depth: int) -> tuple[Tensor, Tensor]:
    return quantised(experts, columns, depth), scales(experts, columns // BLOCK, depth // BLOCK)


def groups(count: int, width: int) -> tuple[Tensor, Tensor]:
    return quantised(count, width, BLOCK), scales(count, width // BLOCK).repeat_interleave(BLOCK, 1)


def cases(shape: MoeShape) -> Iterator[Case]:
    """The kernels of a layer whose experts have equally many rows, one after the other."""
    n, experts, model, inner = shape.rows, shape.experts, shape.model, shape.inner
    index = (torch.arange(n, device="cuda") % experts).view(shape.tokens, shape.top_k)
    v, _, offs = torch.ops.hexa.reindex(index, experts)
    x = torch.randn(shape.tokens, model, device="cuda", dtype=torch.bfloat16)
    step, product = ("silu", True, ()), 2.0 * n * model * inner
    yield Case("rows", 3.0 * x.numel(), "GB/s", op("quantize_rows_fp8", x))
    yield Case("columns", 3.0 * n * model, "GB/s", op("quantize_columns_fp8", x, v, offs, shape.top_k, True))
    xq, w1 = rows(shape.tokens, model), weight(experts, 2 * inner, model)
    yield Case("up", 2 * product, "TFLOP/s", op("esmm_act_fp8", *xq, *w1, None, v, offs, shape.top_k, *step, True))
    a, w2 = rows(n, inner), weight(experts, model, inner)
    yield Case("down", product, "TFLOP/s", op("esmm_fp8", *a, *w2, None, offs))
    yield from deepgemm("down", product, a, w2, experts)
    h, w2_t = rows(n, 2 * inner), weight(experts, inner, model)
    back = (*xq, *w2_t, *h, None, v, offs, shape.top_k, *step, (True,) * 4)
    yield Case("dA", product, "TFLOP/s", op("esmm_act_backward_fp8", *back))
    w1_t = weight(experts, model, 2 * inner)
    yield Case("dX", 2 * product, "TFLOP/s", op("esmm_fp8", *h, *w1_t, None, offs))
    yield from deepgemm("dX", 2 * product, h, w1_t, experts)
    del h, w1_t, w2_t
    count = group_count(n, experts)
    of_x, of_dh, of_a = groups(count, model), groups(count, 2 * inner), groups(count, inner)
    dw1, dw2 = (
        torch.empty(experts, *size, device="cuda", dtype=torch.bfloat16)
        for size in ((2 * inner, model), (model, inner))
    )
    yield Case("dW1", 2 * product, "TFLOP/s", op("estmm_fp8", dw1, *of_dh, *of_x, offs, True, False))
    yield Case("dW2", product, "TFLOP/s", op("estmm_fp8", dw2, *of_x, *of_a, offs, True, False))
    made = (*weight(experts, 2 * inner, model), *weight(experts, model, 2 * inner))
    yield Case("weight 1", 4.0 * dw1.numel(), "GB/s", op("quantize_weight_fp8", *made, dw1, None, "nk", "concat"))


def deepgemm(
    name: str, work: float, x: tuple[Tensor, Tensor], w: tuple[Tensor, Tensor], experts: int
) -> Iterator[Case]:
    """DeepGEMM's product of the same operands; a line says why there is none."""
    try:
        gemm = importlib.import_module("deep_gemm")
        count, columns = x[0].shape[0] // experts, w[0].shape[1]
        if count % gemm.get_m_alignment_for_contiguous_layout():
            raise ValueError(f"{count} rows an expert")
        layout = torch.arange(experts, device="cuda", dtype=torch.int32).repeat_interleave(count)
        out = torch.empty(x[0].shape[0], columns, device="cuda", dtype=torch.bfloat16)
        run = lambda: gemm.m_grouped_fp8_gemm_nt_contiguous(x, w, out, layout)  # noqa: E731
        run()
    except Exception as error:  # a peer that is not there, or that cannot do this shape, leaves a line
        print(f"   deepgemm {name}: left out, {type(error).__name__}: {str(error)[:150]}", flush=True)
        return
    yield Case(f"deepgemm {name}", work, "TFLOP/s", run)


def main() -> None:
    """Prints a line a kernel, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=DEFAULT)
    parser.add_argument("--seconds", type=float, default=0.9, help="of which a mean is taken")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    names = options.shapes.split(",")
    build_kernels([SHAPES[name] for name in names], exact=False, fp8=True)
    for name in names:
        for case in cases(SHAPES[name]):
            ms = steady({case.name: case.run}, turns=1, warm_s=options.seconds / 2, timed_s=options.seconds)[case.name]
            rate = case.work / ms / (1e9 if case.unit == "TFLOP/s" else 1e6)
            found.append({"shape": name, "kernel": case.name, "ms": ms, "rate": rate, "unit": case.unit})
            print(f"{name:14s} {case.name:14s} {ms:8.3f} ms {rate:8.1f} {case.unit}", flush=True)
        torch.cuda.empty_cache()
        if options.json:  # after every shape
            options.json.write_text(json.dumps({"environment": environment(), "rows": found}, indent=1))


if __name__ == "__main__":
    main()
