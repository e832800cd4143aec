"""gemm_sm80: grouped matrix products with mma.sync, cp.async and ldmatrix; sm_80 and everything after it.

Serves esmm (with or without an activation in its epilogue) and estmm in bf16, fp16, fp32 (tf32, 3xTF32 or FMA) and
fp64 (FMA), any size, any row stride. ``esfk_sm80`` is an esmm and an estmm in one launch, with the same tile: the backward of a
projection. Its ``layout`` is the weight's in dX = dY W^T; with option ``transpose`` dW is (E, N, K).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from hexa_fx.codegen.cutlass import DataType, DataTypeSize, KernelScheduleType, MathOperation
from hexa_fx.codegen.family import FLOATS, Args, Family, LaunchShape, shared_limit
from hexa_fx.codegen.spec import KernelSpec


@dataclass(frozen=True)
class TileSm80:
    """Tile, stages and warps of one kernel of gemm_sm80."""

    bm: int
    bn: int
    bk: int
    stages: int
    warps_m: int
    warps_n: int


def math_of(spec: KernelSpec) -> str:
    """``tensor``, ``fast_f32`` (3xTF32) or ``simt``."""
    if spec.option("simt"):
        return "simt"
    return "fast_f32" if spec.math == MathOperation.multiply_add_fast_f32 else "tensor"


def row_bucket(rows: int, experts: int) -> int:
    """log2 of the rows an expert gets on average, rounded up; 0 for one row or none. The only thing tiles know of T."""
    return ((rows - 1) // (experts or 1)).bit_length() if rows > 1 else 0


def choose_tile(op: str, arch: int, dtype: DataType, math: str, bucket: int, columns: int) -> TileSm80:
    """The tile of one product.

    Args:
        op: ``esmm``, ``estmm`` or ``esfk``.
        arch: compute capability, 80 for 8.0.
        dtype: element type.
        math: as `math_of` says it.
        bucket: `row_bucket` of the launch; the height of tiles whose rows are an expert's.
        columns: columns of the result.
    """
    if math == "simt":
        return TileSm80(64, 64, 16 if dtype == DataType.f32 else 8, 3, 2, 4)
    narrow = columns <= 64
    if dtype == DataType.f32:
        tile = TileSm80(64, 64, 16, 4, 2, 2) if narrow or math == "fast_f32" else TileSm80(128, 128, 16, 4, 2, 2)
        low = TileSm80(16, 64, 16, 4, 1, 4)
    else:
        tile = TileSm80(64, 64, 64, 3, 2, 2) if narrow else TileSm80(128, 128, 32, 4, 2, 2)
        low = TileSm80(16, 64, 64, 4, 1, 4)
    if op != "esmm" and not narrow and dtype != DataType.f32:
        roomy = op == "esfk" and shared_limit(arch) > 2 * 98 * 1024  # two blocks a multiprocessor
        tile = TileSm80(128, 128, 64, 3, 2, 4) if roomy else TileSm80(128, 128, 32, 4, 2, 4)
    if op == "esmm":
        tile = low if bucket <= 4 else _lower(tile) if bucket <= 6 else tile
    if op == "esfk" and bucket <= 6:
        tile = _lower(tile)
    if shared_limit(arch) < 163 * 1024 and tile.stages > 3:  # two blocks a multiprocessor with 100 KiB
        tile = TileSm80(tile.bm, tile.bn, tile.bk, 3, tile.warps_m, tile.warps_n)
    return tile


def candidates(op: str, dtype: DataType, math: str, bucket: int) -> list[TileSm80]:
    """Tiles worth timing for a product; some may not fit a card."""
    if math == "simt":
        return [TileSm80(64, 64, 16 if dtype == DataType.f32 else 8, 3, 2, 4)]
    k = 16 if dtype == DataType.f32 else 32
    square = [TileSm80(64, 64, k, 4, 2, 2), TileSm80(64, 128, k, 4, 2, 2), TileSm80(128, 64, k, 4, 2, 2)]
    large = [TileSm80(128, 128, k, s, *warps) for s in (3, 4) for warps in ((2, 2), (2, 4))]
    large += [TileSm80(128, 128, 2 * k, 3, 2, 4), TileSm80(128, 256, k, 3, 2, 4), TileSm80(256, 128, k, 3, 4, 2)]
    low = [TileSm80(16, 64, 2 * k, 4, 1, 4), TileSm80(16, 128, 2 * k, 4, 1, 4), TileSm80(32, 128, k, 4, 1, 4)]
    if op != "esmm":
        return square + large
    return low + square[:2] if bucket <= 4 else low[2:] + square if bucket <= 6 else square + large


def _lower(tile: TileSm80) -> TileSm80:
    """Half the rows, for experts of 17 to 64 rows."""
    return tile if tile.bm == 64 else TileSm80(tile.bm // 2, tile.bn, tile.bk, tile.stages, tile.warps_m, tile.warps_n)


def _bytes(spec: KernelSpec) -> int:
    return int(DataTypeSize[spec.dtype]) // 8


def _warps(spec: KernelSpec) -> tuple[int, int]:
    return int(spec.option("warps_m")), int(spec.option("warps_n"))


def _shape(spec: KernelSpec) -> LaunchShape:
    warps_m, warps_n = _warps(spec)
    a_along_k = spec.op == "esmm"
    b_along_k = a_along_k and spec.layout == "nk"
    pipeline = _operand_bytes(spec, spec.bm, a_along_k) + _operand_bytes(spec, spec.bn, b_along_k)
    rows = 8 * warps_m if spec.option("simt") else 16 * warps_m
    staged = rows * (spec.bn + 8) * (8 if spec.dtype == DataType.f64 else 4)
    return LaunchShape(threads=32 * warps_m * warps_n, shared_bytes=max(pipeline, staged))


def _operand_bytes(spec: KernelSpec, extent: int, along_k: bool) -> int:
    size = _bytes(spec)
    if not spec.option("simt"):
        return spec.stages * extent * spec.bk * size
    vector = 16 // size
    line, lines = (spec.bk, extent) if along_k else (extent, spec.bk)
    return (spec.stages * lines * (line + vector) - vector) * size


def _check(spec: KernelSpec) -> Iterable[str]:
    yield from _check_math(spec)
    yield from _check_tile(spec)
    yield from _check_registers(spec)
    if spec.op == "estmm" and (spec.activation != "none" or spec.glu != "none" or spec.bias):
        yield "estmm has no epilogue"


def _check_math(spec: KernelSpec) -> Iterable[str]:
    if spec.dtype == DataType.f64 and not spec.option("simt"):
        yield "f64 needs option simt"
    if spec.option("simt") and spec.dtype in (DataType.bf16, DataType.f16):
        yield "option simt is for f32 and f64"
    if spec.math == MathOperation.multiply_add_fast_f32 and spec.dtype != DataType.f32:
        yield "multiply_add_fast_f32 (3xTF32) is for f32"


def _check_tile(spec: KernelSpec) -> Iterable[str]:
    warps_m, warps_n = _warps(spec)
    m, n = (8 * warps_m, 4 * warps_n) if spec.option("simt") else (16 * warps_m, 16 * warps_n)
    if spec.bm % m or spec.bn % n or not spec.bm or not spec.bn:
        yield f"tile {spec.bm}x{spec.bn} is not a multiple of the warps' {m}x{n}"
    vector = 16 // _bytes(spec)
    if spec.bk not in (4 * vector, 8 * vector):
        yield f"BK {spec.bk}; expected {4 * vector} or {8 * vector}: 64 or 128 bytes of {spec.dtype.name}"
    if spec.bn % 32 or (spec.op == "estmm" and spec.bm % 32):
        yield f"tile {spec.bm}x{spec.bn}: operands that run across k need multiples of 32"
    threads = 32 * warps_m * warps_n
    if any(threads % (extent // vector) for extent in (spec.bn, *((spec.bm,) if spec.op == "estmm" else ()))):
        yield f"tile {spec.bm}x{spec.bn}: {threads} threads do not divide into its columns"


def _check_registers(spec: KernelSpec) -> Iterable[str]:
    warps_m, warps_n = _warps(spec)
    accumulators = spec.bm * spec.bn // (32 * warps_m * warps_n)
    if spec.dtype == DataType.f64 or spec.math == MathOperation.multiply_add_fast_f32:  # 3xTF32 sums in two steps
        accumulators *= 2
    if accumulators > 128:
        yield f"{accumulators} accumulators a thread, more than 128 would spill: use more warps or a smaller tile"


def _products(spec: KernelSpec) -> tuple[KernelSpec, KernelSpec]:
    """What an esfk consists of."""
    rows = replace(spec, op="esmm", gather=False, bias=False, accumulate=False, out_dtype=None)
    return rows, replace(spec, op="estmm", bias=False)


def _fused_shape(spec: KernelSpec) -> LaunchShape:
    rows, weight = (_shape(product) for product in _products(spec))
    return LaunchShape(threads=rows.threads, shared_bytes=max(rows.shared_bytes, weight.shared_bytes))


def _fused_check(spec: KernelSpec) -> Iterable[str]:
    rows, weight = _products(spec)
    yield from dict.fromkeys((*_check(rows), *_check(weight)))


GEMM = Args(
    "P a, b, b2, bias, bias2, d, act, a_index, b_index, offs; q a_stride, b_stride, b_expert, d_stride, d_expert, act_stride; "
    "i rows, m, n, k, experts; 3I top_k; 2f act_params"
)

_WARPS = (1, 2, 4, 8)
_TAKES: dict[str, Collection[object]] = {"dtype": FLOATS, "schedule": (KernelScheduleType.Multistage,)}
_TAKES |= {"warps_m": _WARPS, "warps_n": _WARPS, "stages": range(2, 9)}

FAMILIES = (
    Family(
        name="gemm_sm80",
        ops=("esmm", "estmm"),
        args=GEMM,
        shape=_shape,
        takes=_TAKES,
        adds=("estmm",),
        check=_check,
    ),
    Family(
        name="esfk_sm80",
        ops=("esfk",),
        args=Args(f"{GEMM.within('rows')}; {GEMM.within('weight')}; P db"),
        shape=_fused_shape,
        takes=_TAKES,
        adds=("esfk",),
        check=_fused_check,
    ),
)
