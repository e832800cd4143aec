"""``hexa::scaled_transpose``: a matrix transposed, cast and multiplied by a number in one pass.

PEFT stores the second factor of adapters on experts as (N, r, E). The products read it as (E, N, r) in the rows' dtype, and its
gradient goes back the other way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hexa_fx.errors import InputError
from hexa_fx.ops import checks, library
from hexa_fx.ops.rows import accumulate_dtype

library.define("scaled_transpose(Tensor x, ScalarType dtype, float scale) -> Tensor")


def scaled_transpose(x: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """``scale * x^T``, multiplied in float32 (float64 if either dtype is) and rounded once.

    Args:
        x: (R, C), contiguous.
        dtype: of the result, a floating one.
        scale: a factor.

    Returns:
        (C, R), contiguous.

    Raises:
        InputError: x is no contiguous matrix of floating-point numbers, or dtype is none of such numbers.
    """
    y: Tensor = torch.ops.hexa.scaled_transpose(x, dtype, scale)
    return y


def check(x: Tensor, dtype: torch.dtype, scale: float) -> None:
    """Checks the arguments of scaled_transpose."""
    checks.check_floating("scaled_transpose", ("x",), (x,))
    checks.check_matrix("scaled_transpose", "x", x)
    if not x.is_contiguous() or dtype not in checks.FLOATING:
        raise InputError(
            f"hexa::scaled_transpose: x has strides {tuple(x.stride())} and becomes {dtype}; expected contiguous rows, and one of "
            f"{checks.FLOATING}"
        )


def scaled_transpose_any(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Kernel for any device."""
    wide = torch.promote_types(accumulate_dtype(x.dtype), accumulate_dtype(dtype))
    factor = x if scale == 1 else x.to(wide) * scale
    return factor.t().to(dtype, memory_format=torch.contiguous_format).contiguous()


def _fake(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    return x.new_empty((x.shape[1], x.shape[0]), dtype=dtype)


library.register_fake("scaled_transpose", _fake, check)
library.register_kernel("scaled_transpose", "any", scaled_transpose_any)
