"""The bandwidth-bound kernels.

reindex, which sorts slots by expert (``reindex_count`` then ``reindex_place``, or the latter alone in one block), combine, ess,
activate, activate_backward and scaled_transpose; and quantize_fp8, activate_fp8 and combine_bytes, which is what FP8 block compute
does besides products.
"""

from __future__ import annotations

from collections.abc import Iterable

from hexa_fx.codegen.cutlass import DataType
from hexa_fx.codegen.family import FLOAT_NAMES, FLOATS, Args, Family, LaunchShape, shared_limit
from hexa_fx.codegen.spec import KernelSpec

UNROLLED_TOP_K = (1, 2, 4, 6, 8, 10)
"""Values of combine's option ``top_k`` whose loads are all in flight at once; any other k is 0, a loop."""

COMBINE_THREADS = (32, 64, 128, 256)
TRANSPOSE_SIDE = 64
"""Rows and columns of a matrix that a block of scaled_transpose takes."""


def _check_ess(spec: KernelSpec) -> Iterable[str]:
    if spec.bm < 8:
        yield f"segments of {spec.bm} rows; expected 8 or more"
    if spec.scale and not spec.gather:
        yield "a scale is by slot, so rows must be gathered by v"


def _transpose_shape(spec: KernelSpec) -> LaunchShape:
    wide = 8 if DataType.f64 in (spec.dtype, spec.out) else 4
    return LaunchShape(threads=256, shared_bytes=TRANSPOSE_SIDE * (TRANSPOSE_SIDE + 1) * wide)


ID_NAMES = ("long long", "int", "short", "signed char", "unsigned char")
"""Option ``id``: C++ type of the routing ids, from 64 bits down."""


def _reindex_shape(spec: KernelSpec) -> LaunchShape:
    warps, bins = int(spec.option("warps")), int(spec.option("experts")) + 1
    return LaunchShape(threads=32 * warps, shared_bytes=4 * bins * (warps + 2))


def reindex_warps(experts: int, arch: int) -> int:
    """Most warps a block (a power of two up to 16) whose tallies fit in shared memory; 0 if not even one's."""
    for warps in (16, 8, 4, 2, 1):
        if 4 * (experts + 1) * (warps + 2) <= shared_limit(arch):
            return warps
    return 0


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


_TYPES = {"dtype": FLOATS, "weights": FLOAT_NAMES}
_COMBINES = {**_TYPES, "top_k": (0, *UNROLLED_TOP_K), "threads": COMBINE_THREADS}

FAMILIES = (
    Family(
        name="combine",
        ops=("combine",),
        args=Args("P y, weights, inv, routed, out; q y_stride, out_stride; i width, top_k"),
        shape=lambda spec: LaunchShape(threads=int(spec.option("threads"))),
        takes=_COMBINES,
        min_arch=70,
    ),
    Family(
        name="ess",
        ops=("ess_partial", "ess_finish"),
        args=Args("P g, v, offs, scale, partial, out; q g_stride; i experts, width, top_k, pad"),
        shape=lambda spec: LaunchShape(threads=256),
        takes=_TYPES,
        adds=("ess_finish",),
        check=_check_ess,
        min_arch=70,
    ),
    Family(
        name="activate",
        ops=("activate", "activate_backward"),
        args=Args("P h, da, weights, v, routed, a, dh, dweights; q h_stride, da_stride; i rows, width; 2f act"),
        shape=lambda spec: LaunchShape(threads=128),
        takes={**_TYPES, "warps_per_row": (1, 2, 4)},
        min_arch=70,
    ),
    Family(
        name="scaled_transpose",
        ops=("scaled_transpose",),
        args=Args("P x, out; q rows, columns; d scale; i column_tiles"),
        shape=_transpose_shape,
        takes={"dtype": FLOATS, "out": FLOATS},
        min_arch=70,
    ),
    Family(
        name="reindex",
        ops=("reindex_count", "reindex_place"),
        args=Args("P ids, counts, v, inv, offs; i n, experts, chunk, pad"),
        shape=_reindex_shape,
        takes={"id": ID_NAMES, "warps": range(1, 33)},
        min_arch=70,
    ),
    Family(
        name=QUANTIZE,
        ops=tuple(_FUNCTIONS),
        args=Args(
            "P x, x3, v, offs, q, s, q_t, s_t, sum; q by_expert, by_line, by_column; "
            "i lines, columns, experts, top_k, line_halves, column_halves"
        ),
        shape=lambda spec: LaunchShape(threads=THREADS, shared_bytes=TILE_BYTES if spec.op in _BLOCKS else 0),
        values=lambda spec: {"function": _FUNCTIONS[spec.op], "blocks": _BLOCKS.get(spec.op, 1)},
        takes={"dtype": FLOATS[:3]},
        min_arch=89,
    ),
    Family(
        name=ACTIVATE,
        ops=("activate_backward",),
        args=Args(
            "P da, h, hs, weights, v, offs, dh, dhs, dh_t, dhs_t, a_t, at_scales, dots; i experts, columns; 2f act_params"
        ),
        shape=lambda spec: LaunchShape(threads=THREADS, shared_bytes=_activate_bytes(spec)),
        takes={"glu": ("none", "concat")},  # a quantised h holds gate before up
        min_arch=89,
    ),
    Family(
        name=COMBINE,
        ops=("combine",),
        args=Args("P y, scales, weights, inv, routed, out; i width, padded, top_k, tokens"),
        shape=_combine_shape,
        values=lambda spec: {"blocks": combining_blocks(spec)},
        takes=_COMBINES,
    ),
)
