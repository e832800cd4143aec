"""`hexa::moe_ffn` with an operator each for dX, dW and db of the first projection, in place of one `esfk` for all three.

It runs when the fused kernel is switched off (``HexaConfig.fused_kernel``), as the yardstick for what that saves. Its backward
is not planned as a whole.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hexa_fx.ops import library
from hexa_fx.ops.moe_ffn import backward_on
from hexa_fx.ops.moe_ffn_autograd import LAYERS, LayerFunction
from hexa_fx.ops.table_layers import PARAMETERS, MoeFfn, MoeFfnBackward
from hexa_fx.passes.options.dispatch import in_compute_dtype
from hexa_fx.torch_private import _disable_dynamo


@_disable_dynamo  # torch.compiler.disable would import all of dynamo now, a second of every process
def moe_ffn_without_esfk(*args: Any) -> Tensor:
    """Has the arguments and value of `hexa::moe_ffn`."""
    o = MoeFfn._make(args)
    cast = {name: in_compute_dtype(getattr(o, name)) for name in ("x", *PARAMETERS)}
    y: Tensor = LayerFunction.apply(LAYERS["moe_ffn"]._replace(backward=_backward), True, *o._replace(**cast))
    return y


def _backward(*args: Any) -> list[Tensor]:
    dy, *_ = args
    with library.without_autocast():
        return backward_on(dy.device.type, MoeFfnBackward, args, fused=False)
