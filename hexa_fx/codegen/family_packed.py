"""packed_gemm: grouped products of few rows with packed weights, by mma.sync; sm_80 and everything after it.

Serves esmm, with or without an activation in its epilogue, in bf16 and fp16. Weights are (E, N, K) with one or two codes in a byte
and a scale for each `block` values along K of `scale_rows` lines.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from hexa_fx.codegen.cutlass import DataType
from hexa_fx.codegen.family import HALVES, Args, Family, LaunchShape, shared_limit
from hexa_fx.codegen.spec import KernelSpec, Option
from hexa_fx.formats.format import ceil_div

FAMILY = "packed_gemm"
MOST_EXPERTS = 512
DEPTH = 128
"""Values along K that a warp takes in a step."""
LANE = 32
"""Of them a lane's."""
SCALES = ("f32", "bf16", "e8m0")
ELEMENTS = ("code4", "e4m3", "int8")

_TABLE_BYTES = 256 * 256
_MOST_WARPS = 16
_MOST_STEPS = 4
_ROOM = {1: 18, 2: 16, 3: 16, 4: 8}
"""By steps: warps of a multiprocessor whose registers suffice."""
_HALF = 8
"""Warps of a block, of which two fit with two steps of eight bits."""
_MANY = 12
"""Warps of a block, where few share K."""
_FEW_ROWS = 1
"""Bucket up to which four rows at a time suffice for most experts."""
_PASS_DEPTH = DEPTH * _MOST_WARPS * _MOST_STEPS
"""K of a pass, at most: the rows of x stay in registers."""
MOST_DEPTH = 8 * _PASS_DEPTH
"""K, at most. Also a block that no line is longer than."""


@dataclass(frozen=True)
class PackedTile:
    """Shape of one kernel of packed_gemm.

    Args:
        warps_m: warps of a block side by side along the weight's lines, 32 of them each.
        warps_k: warps that share K.
        steps: how often each takes `DEPTH` values of it, in each pass over a part of K.
        blocks: a multiprocessor's blocks that registers have to suffice for.
        on_sums: scales multiply sums, so that nothing is rounded for them; else values, and more rows are multiplied at a time.
    """

    warps_m: int
    warps_k: int
    steps: int
    blocks: int
    on_sums: bool = False

    def passes(self, k: int) -> int:
        """Parts of K, one after the other."""
        return ceil_div(k, DEPTH * self.warps_k * self.steps)


def converts(arch: int, element: Option) -> bool:
    """Whether an instruction makes numbers of elements, and no table."""
    return arch >= 89 and element == "e4m3"


def choose_tile(k: int, block: int, bucket: int, converted: bool) -> PackedTile:
    """The tile of a product over `k` values that nobody measured.

    Codes of four bits: eight warps that share K if three steps of each suffice, else sixteen, in as few passes as x needs. Of eight
    bits: one block of at most sixteen warps and two steps, which leaves room for what is under way; two blocks of up to eight warps
    where elements are converted.

    Args:
        block: values that share a scale; 128 or more are of eight bits.
        bucket: `hexa_fx.codegen.family_gemm_sm80.row_bucket` of the launch.
        converted: what `converts` says.
    """
    if converted and k <= 2 * DEPTH * _HALF:
        warps_k = _warps(k, 2)
        return PackedTile(_HALF // warps_k, warps_k, 2, 2, True)
    if block >= DEPTH:
        steps = 1 if k <= DEPTH * _MOST_WARPS else 2
        warps_k = _warps(k, steps)
        return PackedTile(max(1, _MANY // warps_k), warps_k, steps, 1, True)
    chunks = ceil_div(k, DEPTH * ceil_div(k, _PASS_DEPTH))
    sizes = [(steps, ceil_div(chunks, steps)) for steps in range(1, _MOST_STEPS + 1)]
    few = [size for size in sizes[:3] if size[1] <= 8]
    steps, warps_k = few[0] if few else next((size for size in sizes[1:] if size[1] <= _MOST_WARPS), sizes[-1])
    warps_m = max(1, _MANY // warps_k)
    blocks = max(1, _ROOM[steps] // (warps_m * warps_k))
    return PackedTile(warps_m, warps_k, steps, blocks, block == 64 and bucket <= _FEW_ROWS)


def _warps(k: int, steps: int) -> int:
    """That share K, in as few passes as their steps allow."""
    return ceil_div(k, DEPTH * steps * ceil_div(k, DEPTH * steps * _MOST_WARPS))


def candidates(k: int, block: int) -> list[PackedTile]:
    """Tiles worth timing for a product over `k` values in blocks; some may not fit a card."""
    found = []
    for steps, most in _ROOM.items():
        warps_k = _warps(k, steps)
        for warps in (warps_m * warps_k for warps_m in (1, 2, 4)):
            if 4 <= warps <= _MOST_WARPS:
                tile = PackedTile(warps // warps_k, warps_k, steps, max(1, min(3, most // warps)))
                found += [tile, replace(tile, on_sums=True)] if block >= 64 else [tile]
    return found


def rows_of_tile(spec: KernelSpec) -> int:
    """Rows of an expert that are multiplied at a time."""
    return 4 if spec.option("on_sums") and spec.option("block") == 64 else 8


def columns_of_tile(spec: KernelSpec) -> int:
    """Columns of the result (of one glu half) that one unit of work gives."""
    return int(spec.option("warps_m")) * (32 if spec.glu == "none" else 16)


def resident_blocks(spec: KernelSpec) -> int:
    """Blocks of a multiprocessor at a time."""
    limit = shared_limit(spec.arch)
    return max(1, min(int(spec.option("blocks")), (limit + 1024) // (_shape(spec).shared_bytes + 1024)))


def _shape(spec: KernelSpec) -> LaunchShape:
    warps = int(spec.option("warps_m")) * int(spec.option("warps_k"))
    tables = -(-2 * (MOST_EXPERTS + 1) * 4 // 16) * 16
    return LaunchShape(threads=32 * warps, shared_bytes=_TABLE_BYTES + tables)


def _check(spec: KernelSpec) -> Iterable[str]:
    if spec.option("scale") == "e8m0" and spec.dtype == DataType.f16:
        yield "f16 does not hold every power of two that E8M0 does"
    block = int(spec.option("block"))
    if block < 32 or block & (block - 1):
        yield f"blocks of {block} values; expected a power of two, 32 or more"
    if spec.option("on_sums") and block < 64:
        yield f"blocks of {block} values cannot be scaled in sums"
    warps_m, warps_k, steps = (int(spec.option(name)) for name in ("warps_m", "warps_k", "steps"))
    if not 1 <= steps <= _MOST_STEPS or warps_m < 1 or warps_k < 1 or warps_m * warps_k > _MOST_WARPS:
        yield f"{warps_m}x{warps_k} warps, {steps} steps; expected at most {_MOST_WARPS} warps and {_MOST_STEPS} steps"


FAMILIES = (
    Family(
        name=FAMILY,
        ops=("esmm",),
        args=Args(
            "P x, code, code2, scale, scale2, bias, bias2, d, act, v, offs; "
            "q x_stride, code_expert, scale_expert, d_stride, act_stride; "
            "i rows, n, k, experts; 3I top_k; 2f act_params; 8I values"
        ),
        shape=_shape,
        takes={"dtype": HALVES, "layout": ("nk",), "aligned": (True,), "scale": SCALES, "element": ELEMENTS},
        check=_check,
    ),
)
