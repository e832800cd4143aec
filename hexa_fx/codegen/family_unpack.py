"""unpack: the matrices of some experts, from packed weights to numbers; bandwidth-bound, for products of many rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from hexa_fx.codegen.arguments import Args
from hexa_fx.codegen.family import Family, LaunchShape
from hexa_fx.codegen.family_rows import FLOATS
from hexa_fx.codegen.spec import KernelSpec
from hexa_fx.formats import FORMATS
from hexa_fx.formats.blocks import Blocks
from hexa_fx.formats.four_bit import FourBit, Mxfp4, Nf4Double

FAMILY = "unpack"
VALUES_A_BLOCK = 256 * 4 * 8
"""Values that a block of threads unpacks."""


def _values(spec: KernelSpec) -> Mapping[str, object]:
    """What the format is to the template."""
    format = FORMATS[str(spec.option("format"))]
    if isinstance(format, FourBit):
        scale = "power" if isinstance(format, Mxfp4) else "nested" if isinstance(format, Nf4Double) else "block"
        return {"element": "code4", "high_first": format.high_first, "scale": scale, "rows": 1, "columns": format.block}
    assert isinstance(format, Blocks)
    element = "int8" if format.dtype == torch.int8 else "e4m3"
    rows, columns = format.block
    return {"element": element, "high_first": False, "scale": "tile", "rows": rows, "columns": columns or 0}


def _check(spec: KernelSpec) -> Iterable[str]:
    if spec.dtype not in FLOATS:
        yield f"element type {spec.dtype.name}; expected bf16, f16, f32 or f64"
    if spec.option("format") not in FORMATS:
        yield f"format {spec.option('format')!r}; expected one of {', '.join(FORMATS)}"


FAMILIES = (
    Family(
        name=FAMILY,
        template="unpack.cu.j2",
        ops=("unpack",),
        # packed, scale, nested, offset, map, out; values, columns, scales, nests, blocks, code
        args=Args("P packed, scale, nested, offset, map, out; i values, columns, scales, nests, blocks; 16f code"),
        shape=lambda spec: LaunchShape(threads=256, shared_bytes=64),
        values=_values,
        check=_check,
        min_arch=70,
    ),
)
