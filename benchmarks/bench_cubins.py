"""Times Hopper kernels against another revision's cubins, in turns in one process: what changed in SASS and was not timed since.

    git worktree add OLD REVISION                                       # where nvcc is; no GPU is needed
    PYTHONPATH=OLD python benchmarks/bench_cubins.py --build FOLDER     # FOLDER/NAME.cubin, by OLD's templates
    python benchmarks/bench_cubins.py --old FOLDER [--json FILE]        # on the GPU, from this revision

A ratio is this revision's time over the other's. Both take the same arguments, so the argument structs must be the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from kept_rows import keep, options_of

from hexa_fx.codegen import KernelSpec, render
from hexa_fx.jit import BuiltKernel, KernelHandle, build
from hexa_fx.jit.driver import driver

Case = tuple[str, str, Callable[[], object]]

_SWAPPED = {"arch": 90, "bk": 64, "bm": 288, "bn": 128, "stages": 4, "schedule": "TmaWarpSpecializedCooperative"}
_COMMON = {"family": "gather_gemm_sm90", "arch": 90, "bk": 64, "stages": 4, "schedule": "TmaWarpSpecializedCooperative"}
SPECS = {
    "estmm_adds": {
        **_COMMON,
        "op": "estmm",
        "bm": 128,
        "bn": 256,
        "gather": True,
        "accumulate": True,
        "out_dtype": "f32",
        "options": [["chunks", 2], ["cluster", 1], ["experts", 256], ["transpose", False]],
    },
    "esmm_swapped_2_nk": {
        **_COMMON,
        **_SWAPPED,
        "op": "esmm",
        "options": [["cluster", 2], ["experts", 256], ["swapped", True]],
    },
    "esmm_swapped_2_kn": {
        **_COMMON,
        **_SWAPPED,
        "op": "esmm",
        "layout": "kn",
        "options": [["cluster", 2], ["experts", 256], ["swapped", True]],
    },
    "esmm_act_swapped": {
        **_COMMON,
        **_SWAPPED,
        "op": "esmm_act",
        "gather": True,
        "activation": "silu",
        "glu": "concat",
        "options": [["cluster", 1], ["experts", 256], ["store_h", True], ["swapped", True]],
    },
}
"""The kernels that differ since device code was sorted by role. Staging ``chunks`` were an option before that."""


def build_all(folder: Path) -> None:
    """Builds `SPECS` by the package that is imported."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, fields in SPECS.items():
        (folder / f"{name}.cubin").write_bytes(build(render(KernelSpec.from_json(json.dumps(fields)))).cubin)
        print(name, flush=True)


def cases() -> Iterator[Case]:
    """Name, shape and one launch of each; tensors of one case at a time."""
    from common import SHAPES, routing
    from launching import on_tensors

    from hexa_fx.codegen.family_gemm_sm90 import COOPERATIVE, SWAPPED
    from hexa_fx.cuda import gemm_sm90
    from hexa_fx.ops.table import Esmm, EsmmAct, Estmm

    sm90 = on_tensors(gemm_sm90)

    def sized(name: str) -> tuple[int, int, int, int, torch.Tensor, torch.Tensor]:
        shape = SHAPES[name]
        v, _, offs = torch.ops.hexa.reindex(routing("balanced", shape), shape.experts)
        return shape.tokens, shape.top_k, shape.model, shape.inner, v, offs

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, device="cuda", dtype=torch.bfloat16)

    pair = replace(SWAPPED, cluster=2)
    tokens, k, d, i, v, offs = sized("qwen3-30b")
    experts = offs.shape[0] - 1
    into = torch.zeros(experts, d, 2 * i, device="cuda")
    o = Estmm(randn(tokens, d), randn(tokens * k, 2 * i), v, None, offs, k, "kn")
    yield "estmm_adds", "qwen3-30b", lambda: sm90.estmm(o, COOPERATIVE, into)
    tokens, k, d, i, v, offs = sized("dsv3")
    experts, rows = offs.shape[0] - 1, randn(tokens * k, i)
    down = Esmm(rows, randn(experts, d, i), None, None, offs, 1, "nk")
    yield "esmm_swapped_2_nk", "dsv3", lambda: sm90.esmm(down, pair)
    back = Esmm(rows, randn(experts, i, d), None, None, offs, 1, "kn")
    yield "esmm_swapped_2_kn", "dsv3", lambda: sm90.esmm(back, pair)
    up = EsmmAct(randn(tokens, d), randn(experts, 2 * i, d), None, None, None, v, offs, k, "nk", "silu", "concat", ())
    yield "esmm_act_swapped", "dsv3", lambda: sm90.esmm_act(up, SWAPPED)


def compare(run: Callable[[], object], old: Path) -> dict[str, float]:
    """Milliseconds of both."""
    from common import steady

    from hexa_fx.cuda.choosing import collect, forget_choices
    from hexa_fx.cuda.kernel import kernel_of

    with collect() as specs:
        run()
    kernel = kernel_of(specs[0])
    own = kernel.handle
    other = KernelHandle(render(kernel.spec), BuiltKernel("old", old.parent, old.read_bytes()), driver())

    def with_handle(handle: KernelHandle) -> None:
        if kernel.loaded is not handle:  # plans hold handles
            forget_choices()
            kernel_of(kernel.spec).loaded = kernel.loaded = handle
        run()

    return steady({"new": lambda: with_handle(own), "old": lambda: with_handle(other)}, turns=3)


def main() -> None:
    """Builds, or times and prints."""
    parser = options_of(__doc__)
    parser.add_argument("--build", type=Path)
    parser.add_argument("--old", type=Path)
    options = parser.parse_args()
    if options.build:
        build_all(options.build)
        return
    rows = []
    for name, shape, run in cases():
        ms = compare(run, options.old / f"{name}.cubin")
        rows.append({"kernel": name, "shape": shape, **ms, "ratio": ms["new"] / ms["old"]})
        print(rows[-1], flush=True)
        torch.cuda.empty_cache()
    keep(rows, options.json)


if __name__ == "__main__":
    main()
