"""Matrices of packed weights on CUDA, a group of experts at a time.

A group's matrices go into a buffer of at most 256 MiB, which the next group uses again. Its offsets are a part of all, so that a
grouped product runs on the group's rows and nothing is read back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from hexa_fx.codegen.family_unpack import FAMILY, VALUES_A_BLOCK
from hexa_fx.codegen.spec import KernelSpec
from hexa_fx.cuda.calls import product
from hexa_fx.cuda.fallback import Unsupported
from hexa_fx.cuda.operands import DTYPES
from hexa_fx.cuda.planning import launch, planning_of
from hexa_fx.formats import format_of
from hexa_fx.formats.blocks import Blocks
from hexa_fx.formats.format import Format, ceil_div
from hexa_fx.formats.four_bit import FourBit, Nf4Double
from hexa_fx.ops.table import Esmm
from hexa_fx.ops.table_variants import EsmmActBackwardPacked, EsmmActPacked, EsmmPacked

MOST_BYTES = 256 << 20
"""Of unpacked matrices at a time; one expert's if that is more."""

_CHUNK = 8


class ExpertGroup(NamedTuple):
    """Some experts of a packed weight.

    Args:
        product: the dense one of these experts.
        experts: which.
        rows: how many they have if all experts have the same.
        last: whether the last expert is one of them.
    """

    product: Esmm
    experts: slice
    rows: int
    last: bool

    def of(self, o: EsmmActPacked | EsmmActBackwardPacked, **more: Any) -> Any:
        """The dense record of these experts, of an operator that does more with the product."""
        return (
            o._replace(c=None if o.c is None else o.c[self.experts])
            .dense(self.product.weight)
            ._replace(offs=self.product.offs, **more)
        )


def parts(o: EsmmPacked) -> Iterator[ExpertGroup]:
    """A packed product as dense ones of some experts each. The next one's matrices take the place of those before it.

    Raises:
        Unsupported: the unpacking kernel does not take the weight.
    """
    format, (experts, rows, columns) = format_of(o.format), format_of(o.format).shape_of(o.packed)
    reason = _unsupported(format, o.packed, rows, columns)
    if reason:
        raise Unsupported(reason)
    scales = [scale.contiguous() for scale in o.scales]
    groups = list(_groups(experts, rows * columns * o.x.element_size()))
    buffer = o.x.new_empty((groups[0][1], rows, columns))
    for first, end in groups:
        matrices = buffer[: end - first]
        unpack(format, o.packed[first:end], [scale[first:end] for scale in scales], matrices)
        bias = None if o.bias is None else o.bias[first:end]
        product = o.to(Esmm, weight=matrices, bias=bias, offs=o.offs[first : end + 1])
        yield ExpertGroup(product, slice(first, end), ceil_div(o.rows * (end - first), experts), end == experts)


def _unsupported(format: Format, packed: Tensor, rows: int, columns: int) -> str:
    """Why the unpacking kernel does not take a weight; empty if it does."""
    if not packed.is_contiguous() or packed.data_ptr() % _CHUNK:
        return "the packed weight does not lie contiguously at a multiple of 8 bytes"
    if columns % _CHUNK if isinstance(format, Blocks) else rows * columns % _CHUNK:
        return f"rows of {columns} values; eight at a time are unpacked"
    return ""


def _groups(experts: int, expert_bytes: int) -> Iterator[tuple[int, int]]:
    """First expert and end of groups of as even a size as fits; the first is the largest."""
    count = ceil_div(experts * expert_bytes, MOST_BYTES)
    step = max(1, min(ceil_div(experts, max(count, 1)), MOST_BYTES // max(expert_bytes, 1)))
    return ((first, min(first + step, experts)) for first in range(0, experts, step))


def unpack(format: Format, packed: Tensor, scales: Sequence[Tensor], out: Tensor) -> None:
    """Writes the matrices of a packed weight to ``out`` (E, R, C), contiguous, in one launch; bits as the reference reads them.

    Args:
        packed, scales: contiguous but for the experts' dimension, which follows from the shapes.
    """
    scale, nested, offset, map = scales if isinstance(format, Nf4Double) else (scales[0], None, None, None)
    _unpack(Unpacking(packed, scale, nested, offset, map, format), into=out)


class Unpacking(NamedTuple):
    """A packed weight: its codes, what scales them, and the format."""

    packed: Tensor
    scale: Tensor
    nested: Tensor | None
    offset: Tensor | None
    map: Tensor | None
    format: Format


@product
def _unpack(o: Unpacking, into: Tensor) -> None:
    experts, rows, columns = into.shape
    values = rows * columns
    blocks = ceil_div(values, VALUES_A_BLOCK)
    code = o.format.values if isinstance(o.format, FourBit) else (0.0,) * 16
    nests = 0 if o.nested is None else o.nested.shape[1]
    spec = KernelSpec(FAMILY, "unpack", planning_of(into).card.arch, dtype=DTYPES[into.dtype])
    spec = spec.with_options(format=o.format.name)
    pointers = {"packed": o.packed, "scale": o.scale, "nested": o.nested, "offset": o.offset, "map": o.map, "out": into}
    sizes = {"values": values, "columns": columns, "scales": o.scale[0].numel(), "nests": nests, "blocks": blocks}
    launch(into, spec, (experts * blocks, 1, 1), **pointers, **sizes, code=code)
