"""Every tile of the Hopper family on the products of a layer, one GPU: which is fastest, and the table that ships.

    python benchmarks/bench_tiles.py [--shapes mixtral,...] [--only esmm_act,...] [--json FILE] [--table FILE]

Rows: the operator, the dense matmul of the same FLOPs, and every tile of `tiles_sm90.CANDIDATES`, each alone at its sustained
clock. `--table` writes the best ones in the form of hexa_fx/codegen/tuned_h200.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from common import LARGE, SHAPES, MoeShape, medians, routing
from kept_rows import keep, options_of
from launching import on_tensors, prebuild

import hexa_fx.ops  # noqa: F401  (defines torch.ops.hexa)
from hexa_fx.codegen.family_gemm_sm90 import CANDIDATES, TileSm90
from hexa_fx.codegen.tuned import Problem, TunedTable
from hexa_fx.cuda import calls, gemm_sm90
from hexa_fx.cuda.choosing import forget_choices
from hexa_fx.cuda.product import ProductKey
from hexa_fx.errors import KernelError
from hexa_fx.ops.table import Esfk, Esmm, EsmmAct, EsmmActBackward, Estmm

sm90 = on_tensors(gemm_sm90)

Product = Callable[[TileSm90], object]


def products(shape: MoeShape) -> dict[str, tuple[Product, Callable[[], object]]]:
    """Name -> the product with a tile, and the plain matmul of the same FLOPs."""
    tokens, k, experts, d, i = shape.tokens, shape.top_k, shape.experts, shape.model, shape.inner
    n, bf16 = shape.rows, {"dtype": torch.bfloat16, "device": "cuda"}
    v, _, offs = torch.ops.hexa.reindex(routing("balanced", shape), experts)
    gates = torch.rand(n, device="cuda")
    x, h, a = torch.randn(tokens, d, **bf16), torch.randn(n, 2 * i, **bf16), torch.randn(n, i, **bf16)
    w1, w2 = torch.randn(experts, 2 * i, d, **bf16) / d**0.5, torch.randn(experts, d, i, **bf16) / i**0.5
    dy, wide = torch.randn(tokens, d, **bf16), torch.randn(n, d, **bf16)
    static = ("silu", "concat", ())

    def esfk(tile: TileSm90) -> object:
        return sm90.esfk(Esfk(x, h, w1, v, offs, k, "nk", False), tile)

    return {
        "esmm_act": (
            lambda t: sm90.esmm_act(EsmmAct(x, w1, None, None, None, v, offs, k, "nk", *static, True), t),
            lambda: wide @ w1[0].t(),
        ),
        "esmm": (lambda t: sm90.esmm(Esmm(a, w2, None, None, offs, 1, "nk"), t), lambda: a @ w2[0].t()),
        "esmm_act_backward": (
            lambda t: sm90.esmm_act_backward(EsmmActBackward(dy, w2, h, gates, v, offs, k, "kn", *static), t),
            lambda: wide @ w2[0],
        ),
        "estmm": (lambda t: sm90.estmm(Estmm(a, dy, None, v, offs, k, "nk"), t), lambda: wide.t() @ a),
        "esfk": (esfk, lambda: (h @ w1[0], h.t() @ wide)),
    }


def launched(run: Callable[[], object]) -> Problem:
    """What the table calls the one launch that `run` makes."""
    found: list[Problem] = []
    chosen_tile = calls.chosen_tile

    def recorded(key: ProductKey) -> Any:
        found.append(key.problem())
        return chosen_tile(key)

    forget_choices()
    calls.chosen_tile = recorded  # type: ignore[assignment]
    try:
        run()
    finally:
        calls.chosen_tile = chosen_tile
    return found[0]


def main() -> None:
    """Prints the table, writes the files."""
    parser = options_of(__doc__)
    parser.add_argument("--shapes", default=",".join(LARGE))
    parser.add_argument("--only", default=",".join(CANDIDATES))
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    rows, table = [], TunedTable(torch.cuda.get_device_name())
    for name in options.shapes.split(","):
        torch.manual_seed(0)
        chosen = {op: each for op, each in products(SHAPES[name]).items() if op in options.only.split(",")}
        if not rows:
            prebuild(lambda c=chosen: [run(t) for op, (run, _) in c.items() for t in CANDIDATES[op]])
        for op, (run, dense) in chosen.items():
            runs: dict[str, Callable[[], object]] = {"dense": dense}
            for tile in CANDIDATES[op]:
                try:
                    run(tile)
                    runs[json.dumps(asdict(tile))] = lambda t=tile, r=run: r(t)
                except KernelError:
                    continue
            times = medians(runs, 5, warm_s=0.06)
            floor = times.pop("dense")
            best = min(times, key=lambda tile: times[tile])
            problem = launched(lambda r=run: r(None))
            table = table.with_entry(problem, json.loads(best), times[best])
            print(f"-- {name} {op} dense {floor:.3f} ms", flush=True)
            for text, ms in sorted(times.items(), key=lambda item: item[1]):
                tile = json.loads(text)
                words = " ".join(f"{key}{int(value)}" for key, value in tile.items())
                print(f"   {ms:8.3f} ms  x{ms / floor:.3f}  {words}", flush=True)
                rows.append({"shape": name, "op": op, "dense_ms": floor, "ms": ms, "tile": tile})
        torch.cuda.empty_cache()
        keep(rows, options.json)
        if options.table:
            options.table.write_text(table.to_json())


if __name__ == "__main__":
    main()
