"""Formats of packed expert weights: what their tensors hold, how a matrix is packed and read. The reference of all kernels."""

from __future__ import annotations

from hexa_fx.errors import InputError
from hexa_fx.formats.blocks import FP8_BLOCK, INT8_ROWS
from hexa_fx.formats.format import Format
from hexa_fx.formats.four_bit import MXFP4, NF4, NF4_DOUBLE

FORMATS: dict[str, Format] = {f.name: f for f in (NF4, NF4_DOUBLE, MXFP4, FP8_BLOCK, INT8_ROWS)}
"""By name."""


def format_of(name: str) -> Format:
    """The format of a name.

    Raises:
        InputError: there is none.
    """
    if name not in FORMATS:
        raise InputError(f"there is no format {name!r} of packed weights; expected one of {', '.join(FORMATS)}")
    return FORMATS[name]
