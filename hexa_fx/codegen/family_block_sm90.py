"""block_gemm_sm90: the products of FP8 block compute on Hopper. Persistent, warp-specialised wgmma; see config_fp8_sm90.cuh."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

from hexa_fx.codegen.cutlass import DataType
from hexa_fx.codegen.family import FLOATS, Args, Family, LaunchShape, shared_limit
from hexa_fx.codegen.family_gemm_sm90 import ARGS, CHUNK_BYTES, bookkeeping_bytes, cluster_of, expert_tables, whole_kib
from hexa_fx.codegen.spec import KernelSpec

FAMILY = "block_gemm_sm90"
TILE_M, TILE_N, TILE_K = 128, 256, 128
"""Of every kernel: two warpgroups of 64 rows, which multiply two parts of 128 columns in turn, a block of scales at a time."""

PART = 128
"""Columns of a part."""

SCALES = Args("P a_scale, w_scale, h_scale, act_scale, p_scale, q_scale; i p_scale_ld, q_scale_ld")
"""hexa::sm90::BlockParams, in its order: GroupedParams, scales, and two strides."""

_TAKES = {
    "dtype": (DataType.e4m3,),
    "out": (*FLOATS[:3], DataType.u8, DataType.e4m3),
    "aligned": (True,),
    "bm": (TILE_M,),
    "bn": (TILE_N,),
    "bk": (TILE_K,),
    "layout": ("nk",),
    "glu": ("none", "concat"),  # gate before up
}


def block_shape(spec: KernelSpec) -> SimpleNamespace:
    """What the template states beyond the spec, from which all of it follows.

    Options: ``store_h``; ``shared``, for weight tiles: columns of a part of Q share their scale; ``experts``, which the tables have
    room for; ``cluster``: blocks that share a weight tile.
    """
    paired = spec.op == "esmm_act" and spec.glu == "concat"
    return SimpleNamespace(
        ops=2 if spec.op == "estmm" else 1,
        epilogue="activate" if spec.op == "esmm_act" else "store",
        store_h=bool(spec.option("store_h", False)),
        paired_weight=paired,
        row_columns=PART if paired else TILE_N,
        part_scales=spec.op != "estmm" or bool(spec.option("shared", False)),
        staging_bytes=_chunks(spec) * CHUNK_BYTES,
        max_experts=expert_tables(spec),
        producer_registers=72 if spec.gather else 40,
        consumer_registers=216 if spec.gather else 232,
    )


def _chunks(spec: KernelSpec) -> int:
    """Chunks of staging a warp: as many as a plain result of 16 bits has, where they fit."""
    return next(n for n in (4, 2, 1) if n == 1 or _smem_bytes(spec, n) <= shared_limit(spec.arch))


def _smem_bytes(spec: KernelSpec, chunks: int) -> int:
    """sizeof(BlockSmem): what the bf16 kernels have (`hexa_fx.codegen.family_gemm_sm90`), and the scales of every stage."""
    stages = spec.stages * (TILE_M + TILE_N) * TILE_K
    scales = 4 * spec.stages * (TILE_M + (TILE_N if spec.op == "estmm" else 4))
    return whole_kib(stages + 8 * chunks * CHUNK_BYTES + bookkeeping_bytes(spec)) + whole_kib(scales)


def _shape(spec: KernelSpec) -> LaunchShape:
    return LaunchShape(threads=384, shared_bytes=_smem_bytes(spec, _chunks(spec)), cluster=cluster_of(spec))


def _check(spec: KernelSpec) -> Iterable[str]:
    if spec.accumulate and spec.out not in FLOATS:
        yield f"results of {spec.out.name} are added; expected bf16, f16 or f32"
    if (spec.op == "esmm_act") != (spec.out is spec.dtype):
        yield f"{spec.op} -> {spec.out.name}: activations leave quantised, all else does not"
    if spec.out is DataType.u8 and spec.op != "esmm":
        yield f"{spec.op} -> bytes; rows that are only summed leave so, of esmm"
    if spec.op == "estmm" and cluster_of(spec) > 1:
        yield "both warpgroups of one block share a weight tile, so no clusters"
    if spec.op == "estmm" and spec.gather:
        yield "weight gradients read rows that are turned round already"


FAMILIES = (
    Family(
        name=FAMILY,
        ops=("esmm", "esmm_act", "estmm"),
        args=Args(f"{ARGS.text}; {SCALES.text}"),
        shape=_shape,
        values=lambda spec: {"shape": block_shape(spec)},
        takes=_TAKES,
        adds=("estmm",),
        check=_check,
        min_arch=90,
        arch_specific=True,
    ),
)
