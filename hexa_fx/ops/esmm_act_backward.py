"""``hexa::esmm_act_backward``: the gradient of the second projection with that of the activation folded into its epilogue."""

from __future__ import annotations

from torch import Tensor

from hexa_fx.ops import library
from hexa_fx.ops.table import EsmmActBackward

esmm_act_backward = library.wrapper("esmm_act_backward", params=())


@library.kernel("esmm_act_backward", "cpu", "any")
def _composed(o: EsmmActBackward) -> tuple[Tensor, Tensor, Tensor]:
    """Kernel of every device: the two operators it stands for."""
    device = o.dy.device.type
    da = library.kernel_for("esmm", device)(o.dy, o.weight, None, o.v, o.offs, o.top_k, o.layout)
    out: tuple[Tensor, Tensor, Tensor] = library.kernel_for("activate_backward", device)(
        da, o.h, o.top_k_weights, o.v, o.offs, o.activation, o.glu, o.params
    )
    return out
