"""The kernels of FP8 block compute on one Hopper GPU, one by one at the sizes of a layer, beside DeepGEMM where it is installed.

    python benchmarks/bench_fp8.py [--shapes qwen3-30b,...] [--json FILE]

Products: ``up`` gathers and quantises in its epilogue, ``down`` is the second projection, ``dA`` with the activation's gradient,
``dX``, ``dW1`` and ``dW2``; TFLOP/s count the product only. Casts: rows, columns (gathered and turned round) and weights in both
orientations; GB/s of what they read and write. ``deepgemm`` rows are its products of operands of the same sizes, where experts have
as many rows as it wants multiples of: m-grouped for ``down`` and ``dX``, whose rows lie in expert order, and k-grouped for ``dW1``
and ``dW2``, which it adds to float32. Its scales are laid out as it reads them beforehand, and what it returns is compared with
float32. A product and its peer take turns, each alone at its sustained clock (`common.steady`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from common import SHAPES, MoeShape, steady
from kept_rows import keep, options_of
from layers import build_kernels
from peer_products import PEERS, Product
from torch import Tensor

from hexa_fx.formats.fp8_scaling import BLOCK, ELEMENT, group_count
from hexa_fx.ops import library

DEFAULT = "qwen3-30b,dsv3,mixtral,sonic-30b,granite-fine"


class Case(NamedTuple):
    """One kernel: what it does in a call, as FLOPs or bytes. operands: of a peer's product, if there is one."""

    name: str
    work: float
    unit: str
    run: Callable[[], object]
    operands: Product | None = None


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
    yield Case("rows", 3.0 * x.numel(), "GB/s", op("quantize_rows_fp8", x, True))
    xq, w1 = torch.ops.hexa.quantize_rows_fp8(x, True), weight(experts, 2 * inner, model)
    yield Case("columns of dy", 3.0 * n * model, "GB/s", op("quantize_columns_fp8", x, v, offs, shape.top_k))
    yield Case("columns of x", 2.0 * n * model, "GB/s", op("group_rows_fp8", *xq, v, offs, shape.top_k))
    yield Case("up", 2 * product, "TFLOP/s", op("esmm_act_fp8", *xq, *w1, None, v, offs, shape.top_k, *step, True))
    a, w2 = rows(n, inner), weight(experts, model, inner)
    yield Case("down", product, "TFLOP/s", op("esmm_fp8", *a, *w2, None, offs), Product("rows", *a, *w2))
    h, w2_t = rows(n, 2 * inner), weight(experts, inner, model)
    back = (*xq, *w2_t, *h, None, v, offs, shape.top_k, *step, (True,) * 4)
    yield Case("dA", product, "TFLOP/s", op("esmm_act_backward_fp8", *back))
    w1_t = weight(experts, model, 2 * inner)
    yield Case("dX", 2 * product, "TFLOP/s", op("esmm_fp8", *h, *w1_t, None, offs), Product("rows", *h, *w1_t))
    del h, w1_t, w2_t
    count = group_count(n, experts)
    of_x, of_dh, of_a = groups(count, model), groups(count, 2 * inner), groups(count, inner)
    dw1, dw2 = (
        torch.empty(experts, *size, device="cuda", dtype=torch.bfloat16)
        for size in ((2 * inner, model), (model, inner))
    )
    first, second = Product("weights", *of_dh, *of_x, experts), Product("weights", *of_x, *of_a, experts)
    yield Case("dW1", 2 * product, "TFLOP/s", op("estmm_fp8", dw1, *of_dh, *of_x, offs, True, False), first)
    yield Case("dW2", product, "TFLOP/s", op("estmm_fp8", dw2, *of_x, *of_a, offs, True, False), second)
    made = (*weight(experts, 2 * inner, model), *weight(experts, model, 2 * inner))
    yield Case("weight 1", 4.0 * dw1.numel(), "GB/s", op("quantize_weight_fp8", *made, dw1, None, "nk", "concat"))


def with_peers(case: Case) -> dict[str, Callable[[], object]]:
    """The kernel, and each peer that can do the same; a line says why one cannot."""
    found = {case.name: case.run}
    if case.operands is None:
        return found
    for peer, make in PEERS.items():
        try:
            found[f"{peer} {case.name}"] = make(case.operands)
        except Exception as error:  # a peer that is not there, or that cannot do this shape
            print(f"   {peer} {case.name}: left out, {type(error).__name__}: {str(error)[:300]}", flush=True)
    return found


def main() -> None:
    """Prints a line a kernel, writes the JSON."""
    parser = options_of(__doc__)
    parser.add_argument("--shapes", default=DEFAULT)
    parser.add_argument("--seconds", type=float, default=0.9, help="of which a mean is taken")
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    names = options.shapes.split(",")
    build_kernels([SHAPES[name] for name in names], exact=False, fp8=True)
    for name in names:
        for case in cases(SHAPES[name]):
            runs = with_peers(case)
            turns = 1 if len(runs) == 1 else 2
            for kernel, ms in steady(runs, turns, options.seconds / 2, options.seconds).items():
                rate = case.work / ms / (1e9 if case.unit == "TFLOP/s" else 1e6)
                found.append({"shape": name, "kernel": kernel, "ms": ms, "rate": rate, "unit": case.unit})
                print(f"{name:14s} {kernel:14s} {ms:8.3f} ms {rate:8.1f} {case.unit}", flush=True)
            del runs, case
        torch.cuda.empty_cache()
        keep(found, options.json)


if __name__ == "__main__":
    main()
