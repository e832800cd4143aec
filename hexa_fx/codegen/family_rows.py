"""The bandwidth-bound operators: combine, ess, activate, activate_backward and scaled_transpose."""

from __future__ import annotations

from collections.abc import Iterable

from hexa_fx.codegen.arguments import Args
from hexa_fx.codegen.cutlass import DataType
from hexa_fx.codegen.family import Family, LaunchShape
from hexa_fx.codegen.spec import KernelSpec

FLOATS = (DataType.bf16, DataType.f16, DataType.f32, DataType.f64)
ACTIVATIONS = (
    "none",
    "relu",
    "relu2",
    "gelu",
    "gelu_tanh",
    "silu",
    "quick_gelu",
    "sigmoid",
    "tanh",
    "swiglu_oai",
    "swiglu_limited",
)
"""Names that templates/include/hexa_fx/epilogue/activations.cuh knows: those of hexa_fx.ops.activations."""

UNROLLED_TOP_K = (1, 2, 4, 6, 8, 10)
"""Values of combine's option ``top_k`` whose loads are all in flight at once; any other k is 0, a loop."""

COMBINE_THREADS = (32, 64, 128, 256)
TRANSPOSE_SIDE = 64
"""Rows and columns of a matrix that a block of scaled_transpose takes."""


def _check_types(spec: KernelSpec) -> Iterable[str]:
    if spec.dtype not in FLOATS:
        yield f"element type {spec.dtype.name}; expected bf16, f16, f32 or f64"
    if spec.option("weights", "f32") not in {t.name for t in FLOATS}:
        yield f"weights are {spec.option('weights')}; expected bf16, f16, f32 or f64"


def check_accumulate(spec: KernelSpec, op: str) -> Iterable[str]:
    """Reasons why the result of `spec` cannot be added to what is there; `op` is the operator that can."""
    if spec.accumulate and spec.op != op:
        yield f"{spec.op} adds to nothing"
    if spec.out is not (spec.wide if spec.accumulate else spec.dtype):
        yield f"{spec.dtype.name} -> {spec.out.name}; results have the operands' type, sums of launches {spec.wide.name}"


def check_combine(spec: KernelSpec) -> Iterable[str]:
    """Reasons why a sum of tokens' rows cannot be generated."""
    yield from _check_types(spec)
    if spec.option("top_k") not in (0, *UNROLLED_TOP_K):
        yield f"top_k {spec.option('top_k')} is not unrolled; use 0"
    if spec.option("threads") not in COMBINE_THREADS:
        yield f"{spec.option('threads')} threads; expected one of {COMBINE_THREADS}"


def _check_ess(spec: KernelSpec) -> Iterable[str]:
    yield from _check_types(spec)
    yield from check_accumulate(spec, "ess_finish")
    if spec.bm < 8:
        yield f"segments of {spec.bm} rows; expected 8 or more"
    if spec.scale and not spec.gather:
        yield "a scale is by slot, so rows must be gathered by v"


def check_activation(spec: KernelSpec) -> Iterable[str]:
    """Reasons why the activation of `spec` cannot be generated."""
    if spec.activation not in ACTIVATIONS:
        yield f"activation {spec.activation!r}; expected one of {', '.join(ACTIVATIONS)}"
    if spec.activation in ("swiglu_oai", "swiglu_limited") and spec.glu == "none":
        yield f"{spec.activation} is a function of gate and up, so glu cannot be none"


def _check_activate(spec: KernelSpec) -> Iterable[str]:
    yield from _check_types(spec)
    yield from check_activation(spec)
    if spec.option("warps_per_row") not in (1, 2, 4):
        yield f"{spec.option('warps_per_row')} warps a row; expected 1, 2 or 4"


def _check_transpose(spec: KernelSpec) -> Iterable[str]:
    for dtype in (spec.dtype, spec.out):
        if dtype not in FLOATS:
            yield f"element type {dtype.name}; expected bf16, f16, f32 or f64"


def _transpose_shape(spec: KernelSpec) -> LaunchShape:
    wide = 8 if DataType.f64 in (spec.dtype, spec.out) else 4
    return LaunchShape(threads=256, shared_bytes=TRANSPOSE_SIDE * (TRANSPOSE_SIDE + 1) * wide)


FAMILIES = (
    Family(
        name="combine",
        template="combine.cu.j2",
        ops=("combine",),
        args=Args("P y, weights, inv, routed, out; q y_stride, out_stride; i width, top_k"),
        shape=lambda spec: LaunchShape(threads=int(spec.option("threads"))),
        check=check_combine,
        min_arch=70,
    ),
    Family(
        name="ess",
        template="ess.cu.j2",
        ops=("ess_partial", "ess_finish"),
        args=Args("P g, v, offs, scale, partial, out; q g_stride; i experts, width, top_k, pad"),
        shape=lambda spec: LaunchShape(threads=256),
        check=_check_ess,
        min_arch=70,
    ),
    Family(
        name="activate",
        template="activate.cu.j2",
        ops=("activate", "activate_backward"),
        args=Args("P h, da, weights, v, routed, a, dh, dweights; q h_stride, da_stride; i rows, width; 2f act"),
        shape=lambda spec: LaunchShape(threads=128),
        check=_check_activate,
        min_arch=70,
    ),
    Family(
        name="scaled_transpose",
        template="scaled_transpose.cu.j2",
        ops=("scaled_transpose",),
        args=Args("P x, out; q rows, columns; d scale; i column_tiles"),
        shape=_transpose_shape,
        check=_check_transpose,
        min_arch=70,
    ),
)
