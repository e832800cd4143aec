"""`hexa::moe_ffn` with an operator each for dX, dW and db of the first projection, in place of one `esfk` for all three.

It runs when the fused kernel is switched off (``HexaConfig.fused_kernel``), as the yardstick for what that saves. Everything else
is as in `hexa_fx.ops.moe_ffn_autograd`, except that no layer is planned as a whole and gradients are not added to ``main_grad``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hexa_fx.ops import library
from hexa_fx.ops.dispatch import in_compute_dtype
from hexa_fx.ops.main_grad import kept_operands
from hexa_fx.ops.program import programs
from hexa_fx.ops.table_layers import OPERANDS, PARAMETERS, MoeFfn, differentiable
from hexa_fx.torch_private import _AutoDispatchBelowAutograd, _disable_dynamo


@_disable_dynamo  # torch.compiler.disable would import all of dynamo now, a second of every process
def moe_ffn_without_esfk(*args: Any) -> Tensor:
    """Has the arguments and value of `hexa::moe_ffn`."""
    o = MoeFfn._make(args)
    cast = {name: in_compute_dtype(getattr(o, name)) for name in ("x", *PARAMETERS)}
    y: Tensor = _MoeFfnSeparateBackward.apply(*o._replace(**cast))
    return y


class _MoeFfnSeparateBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        with _AutoDispatchBelowAutograd():
            y, h, v, inv, offs = library.checked_kernel("moe_ffn_forward", "any")(*args)
        o, needs = MoeFfn._make(args), MoeFfn._make(ctx.needs_input_grad)
        operands = kept_operands(o, needs, ("top_k_weights", *PARAMETERS))
        ctx.save_for_backward(o.x, None if o.recompute_h else h, v, inv, offs, *operands)
        ctx.top_k, ctx.needs = o.top_k, tuple(differentiable(needs))
        ctx.static = (o.activation, o.glu, tuple(o.params), o.layout1, o.layout2, o.recompute_h)
        return y  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, h, v, inv, offs, *operands = ctx.saved_tensors
        given = (True, *(t is not None for t in operands))
        program = programs(ctx.static, given, ctx.needs, True, x.device.type, fused_backward=False)
        saved = None if h is None else [h]
        with _AutoDispatchBelowAutograd(), library.without_autocast():
            found = iter(program.backward(grads[0], x, saved, v, inv, offs, *operands, ctx.top_k))
        return MoeFfn.by_argument(**{name: next(found) for name, need in zip(OPERANDS, ctx.needs) if need})
