"""What the CUDA operators ask of their operands: addresses, sizes, alignment, and views that kernels can read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from hexa_fx.codegen.cutlass import DataType
from hexa_fx.codegen.family_gemm_sm80 import row_bucket
from hexa_fx.formats.format import ceil_div
from hexa_fx.ir import Layout
from hexa_fx.ops.activations import ACTIVATIONS
from hexa_fx.ops.fixed_order import is_fixed
from hexa_fx.ops.rows import flip

DTYPES = {
    torch.bfloat16: DataType.bf16,
    torch.float16: DataType.f16,
    torch.float32: DataType.f32,
    torch.float64: DataType.f64,
    torch.float8_e4m3fn: DataType.e4m3,
    torch.uint8: DataType.u8,
}


DECODE_BUCKET = 4
"""Up to 2^4 rows an expert a product only streams weights. The 16-row tiles of gemm_sm80 waste least there, but for projections
that the Hopper family computes in swapped tiles, which go by 16 rows, too.
"""


def has_few_rows(rows: int, offs: Tensor) -> bool:
    """Whether experts have so few rows on average; never in a fixed order, in which nothing goes by the number of rows."""
    return not is_fixed() and row_bucket(rows, offs.shape[0] - 1) <= DECODE_BUCKET


class Into(NamedTuple):
    """Buffers that a projection's gradients are added to, in the accumulators' type.

    Args:
        weight: (E, N, K) or (E, K, N), as `layout` says; its rows are contiguous.
        bias: (E, N), contiguous, or None where there is no bias.
    """

    weight: Tensor
    layout: Layout
    bias: Tensor | None


class Segment(NamedTuple):
    """A product of some of the experts, whose rows are a part of all.

    Args:
        out: (n, N), of all experts. Rows before those of the first expert are left alone. Without rows where h is not kept.
        rows: how many of them these experts have if all have the same.
        last: whether rows behind those of the last expert belong to no expert, and are zeroed; else they are left alone.
        act: of a product with an activation or its gradient, the second result.
        dots: of an activation's gradient, the third, in parts that have to be summed: zeros of float32, (parts, n).
    """

    out: Tensor
    rows: int
    last: bool
    act: Tensor | None = None
    dots: Tensor | None = None


def constants_of(activation: str, params: Sequence[float]) -> tuple[float, float]:
    """The two constants of an activation in a kernel's arguments; 0 where it has none."""
    alpha, limit = (*(tuple(params) or ACTIVATIONS[activation].params), 0.0, 0.0)[:2]
    return alpha, limit


def dense_rows(tensor: Tensor) -> Tensor:
    """The matrix with contiguous rows; copied only where one row stride cannot describe it."""
    return tensor if tensor.stride()[-1] == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def contiguous(tensor: Tensor | None) -> Tensor | None:
    """The same elements one behind the other, copied only where they are not; None stays None."""
    return None if tensor is None else tensor.contiguous()


def as_stored(weight: Tensor, layout: Layout) -> tuple[Tensor, Layout]:
    """A view of the weight with the contiguous dimension last, and the layout of that view. Never copies."""
    _, by_row, by_column = weight.stride()
    if by_column != 1 and by_row == 1:
        return weight.transpose(1, 2), flip(layout)
    return weight, layout


def aligned(*tensors: Tensor | None) -> bool:
    """Whether every row of every tensor starts at a multiple of 16 bytes."""
    steps = 0
    for t in tensors:
        if t is not None:
            size = t.element_size()
            steps |= t.data_ptr()
            for stride in t.stride()[:-1]:
                steps |= stride * size
    return not steps & 15


@cache
def division(by: int) -> tuple[int, int]:
    """A quotient as one multiplication, exact for 0 <= x < 2^31: the multiplier, and by how much to shift beyond 31 bits."""
    shift = (by - 1).bit_length()
    return ceil_div(1 << (31 + shift), by), shift


def divided_by(top_k: int) -> dict[str, int]:
    """The fields of an argument struct that divide slots by so many."""
    multiplier, shift = division(top_k)
    return {"div_mul": multiplier, "div_shift": shift}
