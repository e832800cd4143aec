"""Row products with a second one in the same accumulator: ``x @ W^T + u @ C^T``, plain, before an activation, before its gradient.

They are `hexa_fx.ops.esmm`, `hexa_fx.ops.esmm_act` and `hexa_fx.ops.esmm_act_backward` with more operands at the end. Of
`hexa::moe_ffn_sources`, which has the gradients: a low-rank addition to a weight is such a product with ``u = x A^T``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hexa_fx.ops import library
from hexa_fx.ops.table import ActivateBackward, Esmm, EsmmActBackwardLowRank, EsmmActLowRank, EsmmLowRank

_OPS = torch.ops.hexa


@library.kernel("esmm_low_rank", "any")
def esmm_composed(o: EsmmLowRank) -> Tensor:
    """Kernel for any device: two products."""
    y: Tensor = _OPS.esmm(*o.to(Esmm))
    return y.add_(_OPS.esmm(o.u, o.c, None, None, o.offs, 1, o.layout))


@library.kernel("esmm_act_low_rank", "any")
def esmm_act_composed(o: EsmmActLowRank) -> tuple[Tensor, Tensor]:
    """Kernel for any device: the products, then the activation."""
    h = esmm_composed(o.to(EsmmLowRank, weight=o.w1, bias=o.b1))
    if o.w3 is not None:
        h = torch.cat((h, esmm_composed(o.to(EsmmLowRank, weight=o.w3, bias=o.b3, c=o.c3))), dim=1)
    a = _OPS.activate(h, o.activation, o.glu, o.params)
    return (h if o.keep_h else h.new_empty((0, o.width))), a


@library.kernel("esmm_act_backward_low_rank", "any")
def esmm_act_backward_composed(o: EsmmActBackwardLowRank) -> tuple[Tensor, Tensor, Tensor]:
    """Kernel for any device: the products, then the activation's gradient."""
    da = esmm_composed(o.to(EsmmLowRank, x=o.dy))
    out: tuple[Tensor, Tensor, Tensor] = _OPS.activate_backward(*o.to(ActivateBackward, da=da))
    return out
