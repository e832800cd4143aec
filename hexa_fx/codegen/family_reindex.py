"""reindex: slots sorted by expert. ``reindex_count`` then ``reindex_place``, or ``reindex_place`` alone in one block."""

from __future__ import annotations

from collections.abc import Iterable

from hexa_fx.codegen.arguments import Args
from hexa_fx.codegen.family import Family, LaunchShape, shared_limit
from hexa_fx.codegen.spec import KernelSpec

ID_TYPES = ("long long", "int", "short", "signed char", "unsigned char")
"""Option ``id``: C++ type of the routing ids."""


def _shape(spec: KernelSpec) -> LaunchShape:
    warps, bins = int(spec.option("warps")), int(spec.option("experts")) + 1
    return LaunchShape(threads=32 * warps, shared_bytes=4 * bins * (warps + 2))


def _check(spec: KernelSpec) -> Iterable[str]:
    if spec.option("id") not in ID_TYPES:
        yield f"routing ids are {spec.option('id')!r}; expected one of {', '.join(ID_TYPES)}"
    warps = int(spec.option("warps"))
    if not 1 <= warps <= 32:
        yield f"{warps} warps a block; expected 1 to 32"


def reindex_warps(experts: int, arch: int) -> int:
    """Most warps a block (a power of two up to 16) whose tallies fit in shared memory; 0 if not even one's."""
    for warps in (16, 8, 4, 2, 1):
        if 4 * (experts + 1) * (warps + 2) <= shared_limit(arch):
            return warps
    return 0


FAMILIES = (
    Family(
        name="reindex",
        template="reindex.cu.j2",
        ops=("reindex_count", "reindex_place"),
        args=Args("P ids, counts, v, inv, offs; i n, experts, chunk, pad"),
        shape=_shape,
        check=_check,
        min_arch=70,
    ),
)
