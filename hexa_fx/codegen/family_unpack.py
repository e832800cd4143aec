"""unpack, which gives the matrices of some experts of a packed weight, for products of many rows.

It reads formats, which import torch: processes that build other kernels do without.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hexa_fx.codegen.family import FLOATS, Args, Family, LaunchShape
from hexa_fx.codegen.spec import KernelSpec
from hexa_fx.formats import FORMATS
from hexa_fx.formats.blocks import Blocks
from hexa_fx.formats.four_bit import FourBit, Mxfp4, Nf4Double

UNPACK = "unpack"
VALUES_A_BLOCK = 256 * 4 * 8
"""Values that a block of threads unpacks."""


def _unpack_values(spec: KernelSpec) -> Mapping[str, object]:
    """What the format is to the template."""
    format = FORMATS[str(spec.option("format"))]
    if isinstance(format, FourBit):
        scale = "power" if isinstance(format, Mxfp4) else "nested" if isinstance(format, Nf4Double) else "block"
        return {"element": "code4", "high_first": format.high_first, "scale": scale, "rows": 1, "columns": format.block}
    assert isinstance(format, Blocks)
    element = "int8" if format.dtype == torch.int8 else "e4m3"
    rows, columns = format.block
    return {"element": element, "high_first": False, "scale": "tile", "rows": rows, "columns": columns or 0}


FAMILIES = (
    Family(
        name=UNPACK,
        ops=("unpack",),
        args=Args("P packed, scale, nested, offset, map, out; i values, columns, scales, nests, blocks; 16f code"),
        shape=lambda spec: LaunchShape(threads=256, shared_bytes=64),
        values=_unpack_values,
        takes={"dtype": FLOATS, "format": FORMATS},
        min_arch=70,
    ),
)
