"""Cosines of an FP8 expert layer's results with float32: `hexa::moe_ffn_fp8`, and the same scales as DeepGEMM's recipe uses them.

    python benchmarks/fp8_accuracy.py [--device cuda] [--json FILE]

The recipe quantises routed rows, and rounds what lies between products (h, the activation, gradients) to bfloat16, from which it
quantises again; it keeps h in bfloat16, where ours keeps e4m3. Its products are emulated in float32 from quantised numbers; so are
ours on a CPU. Sizes are those of real layers, divided. Operands are normal numbers in bfloat16.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

import hexa_fx.ops  # noqa: F401  (defines the operators)
from hexa_fx.formats import fp8_scaling as scaling

SHAPES = {
    "qwen3-30b / 4": (512, 192),
    "mixtral / 16": (256, 896),
    "dsv3 / 8": (896, 256),
    "sonic-30b / 4": (1024, 128),
    "granite-fine / 4": (384, 128),
}
"""Model and intermediate size."""
EXPERTS, TOP_K, TOKENS = 8, 2, 4096
NAMES = ("y", "dx", "dgates", "dw1", "dw2")
STATIC = ("silu", "concat", [], "nk", "nk", False)


def operands(model: int, inner: int, device: str) -> tuple[Tensor, ...]:
    """x, ids, gates, w1, w2 and dy."""
    torch.manual_seed(0)
    x, dy = torch.randn(TOKENS, model), torch.randn(TOKENS, model)
    w1, w2 = torch.randn(EXPERTS, 2 * inner, model) / model**0.5, torch.randn(EXPERTS, model, inner) / inner**0.5
    gates, ids = torch.randn(TOKENS, EXPERTS).softmax(-1).topk(TOP_K)
    return (*(t.bfloat16().to(device) if t.is_floating_point() else t.to(device) for t in (x, ids, gates, w1, w2, dy)),)


def results(fp8: bool, x: Tensor, ids: Tensor, gates: Tensor, w1: Tensor, w2: Tensor, dy: Tensor) -> list[Tensor]:
    """Result and gradients of our operator, in FP8 or as it is."""
    leaves = [t.detach().requires_grad_() for t in (x, gates, w1, w2)]
    given = (leaves[0], ids, leaves[1], leaves[2], None, None, None, leaves[3], None, *STATIC)
    y = torch.ops.hexa.moe_ffn_fp8(*given, True) if fp8 else torch.ops.hexa.moe_ffn(*given)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def recipe(x: Tensor, ids: Tensor, gates: Tensor, w1: Tensor, w2: Tensor, dy: Tensor) -> list[Tensor]:
    """DeepGEMM's, expert by expert."""
    found = [torch.zeros_like(t, dtype=torch.float32) for t in (dy, x, gates, w1, w2)]
    y, dx, dgates, dw1, dw2 = found
    for e in range(EXPERTS):
        token, slot = torch.where(ids == e)
        share = gates[token, slot].float()[:, None]
        first, second = (_weight(w[e]) for w in (w1, w2))
        h = (_rows(x[token]) @ first.t()).bfloat16().float().requires_grad_()
        gate, up = h.chunk(2, 1)
        a = F.silu(gate) * up
        y_rows = (_rows(a.detach().bfloat16()) @ second.t()).bfloat16().float()
        y.index_add_(0, token, share * y_rows)
        g = (share * dy[token]).bfloat16()
        (dh,) = torch.autograd.grad(a, h, (_rows(g) @ second).bfloat16().float())
        dh, activation = dh.bfloat16(), a.detach().bfloat16()
        dx.index_add_(0, token, (_rows(dh) @ first).bfloat16().float())
        dgates[token, slot] = (dy[token].float() * y_rows).sum(1)
        dw1[e] = _columns(dh).t() @ _columns(x[token])
        dw2[e] = _columns(g).t() @ _columns(activation)
    return found


def _rows(t: Tensor) -> Tensor:
    """Quantised in blocks of 1 x 128, and read."""
    return scaling.read_rows(*scaling.quantize_rows(t))[:, : t.shape[1]]


def _columns(t: Tensor) -> Tensor:
    """Quantised in blocks of 128 x 1, and read."""
    return _rows(t.t()).t()


def _weight(matrix: Tensor) -> Tensor:
    """Quantised in blocks of 128 x 128, and read."""
    rows, columns = matrix.shape
    filled = F.pad(matrix, (0, scaling.padded(columns) - columns, 0, scaling.padded(rows) - rows))
    return scaling.read_weight(*scaling.quantize_weight(filled))[:rows, :columns]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    o = parser.parse_args()
    table = {}
    print(f"{'':18}{'':8}" + "".join(f"{name:>9}" for name in NAMES))
    for shape, sizes in SHAPES.items():
        given = operands(*sizes, o.device)
        exact = results(False, *(t.float() if t.is_floating_point() else t for t in given))
        table[shape] = {
            kind: {name: _cosine(*pair) for name, *pair in zip(NAMES, found, exact)}
            for kind, found in (("ours", results(True, *given)), ("recipe", recipe(*given)))
        }
        for kind, row in table[shape].items():
            print(f"{shape:18}{kind:8}" + "".join(f"{value:9.5f}" for value in row.values()))
    if o.json:
        about = {"torch": torch.__version__, "device": o.device, "experts": EXPERTS, "tokens": TOKENS, "top_k": TOP_K}
        o.json.write_text(json.dumps({"environment": about, "cosines": table}, indent=1) + "\n")


def _cosine(found: Tensor, exact: Tensor) -> float:
    return F.cosine_similarity(found.double().flatten(), exact.double().flatten(), 0).item()


if __name__ == "__main__":
    main()
