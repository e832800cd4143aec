"""``hexa::scaled_transpose``: a matrix transposed, cast and multiplied by a number in one pass.

PEFT stores the second factor of adapters on experts as (N, r, E). The products read it as (E, N, r) in the rows' dtype, and its
gradient goes back the other way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hexa_fx.ops import library
from hexa_fx.ops.rows import accumulate_dtype
from hexa_fx.ops.table import ScaledTranspose

scaled_transpose = library.wrapper("scaled_transpose", scale=1.0)


@library.kernel("scaled_transpose", "any")
def scaled_transpose_any(o: ScaledTranspose) -> Tensor:
    """Kernel for any device."""
    wide = torch.promote_types(accumulate_dtype(o.x.dtype), accumulate_dtype(o.dtype))
    factor = o.x if o.scale == 1 else o.x.to(wide) * o.scale
    return factor.t().to(o.dtype, memory_format=torch.contiguous_format).contiguous()
