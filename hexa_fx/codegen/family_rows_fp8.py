"""quantize_fp8, activate_fp8 and combine_bytes: what FP8 block compute does besides products, bandwidth-bound."""

from __future__ import annotations

from collections.abc import Iterable

from hexa_fx.codegen.arguments import Args
from hexa_fx.codegen.cutlass import DataType
from hexa_fx.codegen.family import Family, LaunchShape
from hexa_fx.codegen.family_rows import check_activation, check_combine
from hexa_fx.codegen.spec import KernelSpec

QUANTIZE, ACTIVATE, COMBINE = "quantize_fp8", "activate_fp8", "combine_bytes"
THREADS = 256
"""Of a block: a tile of 128 x 128 numbers, or 16 blocks of a row."""

TILE_BYTES = 128 * 128 + (8 + 1) * 4 * 128
"""sizeof(TileMemory): a tile of elements, and what warps know of its columns."""

_FUNCTIONS = {
    "quantize_rows": "template rows<hexa::BlockScale>",
    "quantize_rows_binary": "template rows<hexa::BinaryScale>",
    "quantize_columns": "columns",
    "group_rows": "groups",
    "quantize_weight": "weight",
    "ess": "sum",
}
_BLOCKS = {"quantize_columns": 3, "group_rows": 4, "quantize_weight": 4}
"""Of a multiprocessor, for operators that take tiles."""


def _activate_bytes(spec: KernelSpec) -> int:
    """sizeof(ActivateFp8::Memory): a tile of da and of h, its scales, weights of rows, and what is turned round with its scales."""
    parts = 2 if spec.glu == "concat" else 1
    turned = 2 * 128 * 128 + parts * (8 * 16 * 16 + 4 * 128) + 4 * 8
    return (2 + parts) * 128 * 128 + (parts + 1) * 4 * 128 + turned


def combining_blocks(spec: KernelSpec) -> int:
    """Blocks of a multiprocessor that sums rows: 768 threads, whose copies keep the memory busy."""
    return max(768 // int(spec.option("threads")), 1)


def _combine_shape(spec: KernelSpec) -> LaunchShape:
    threads = int(spec.option("threads"))
    return LaunchShape(threads=threads, shared_bytes=2 * max(int(spec.option("top_k")), 1) * threads * 16)


def _check_quantize(spec: KernelSpec) -> Iterable[str]:
    if spec.dtype not in (DataType.bf16, DataType.f16, DataType.f32):
        yield f"element type {spec.dtype.name}; expected bf16, f16 or f32"


def _check_activate(spec: KernelSpec) -> Iterable[str]:
    yield from check_activation(spec)
    if spec.glu not in ("none", "concat"):
        yield f"h holds {spec.glu} gate and up; a quantised one holds gate before up"


FAMILIES = (
    Family(
        name=QUANTIZE,
        template="quantize_fp8.cu.j2",
        ops=tuple(_FUNCTIONS),
        args=Args(
            "P x, x3, v, offs, q, s, q_t, s_t, sum; q by_expert, by_line, by_column; "
            "i lines, columns, experts, top_k, line_halves, column_halves"
        ),
        shape=lambda spec: LaunchShape(threads=THREADS, shared_bytes=TILE_BYTES if spec.op in _BLOCKS else 0),
        values=lambda spec: {"function": _FUNCTIONS[spec.op], "blocks": _BLOCKS.get(spec.op, 1)},
        check=_check_quantize,
        min_arch=89,
    ),
    Family(
        name=ACTIVATE,
        template="activate_fp8.cu.j2",
        ops=("activate_backward",),
        args=Args(
            "P da, h, hs, weights, v, offs, dh, dhs, dh_t, dhs_t, a_t, at_scales, dots; i experts, columns; 2f act_params"
        ),
        shape=lambda spec: LaunchShape(threads=THREADS, shared_bytes=_activate_bytes(spec)),
        check=_check_activate,
        min_arch=89,
    ),
    Family(
        name=COMBINE,
        template="combine_bytes.cu.j2",
        ops=("combine",),
        args=Args("P y, scales, weights, inv, routed, out; i width, padded, top_k, tokens"),
        shape=_combine_shape,
        values=lambda spec: {"blocks": combining_blocks(spec)},
        check=check_combine,
        min_arch=80,
    ),
)
