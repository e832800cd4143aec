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
from hexa_fx.ops.moe_ffn import run_forward
from hexa_fx.ops.program import programs
from hexa_fx.torch_private import _AutoDispatchBelowAutograd, _disable_dynamo

_WEIGHTS = slice(2, 9)
"""Where the optional operands are among the arguments: top_k_weights, w1, b1, w3, b3, w2, b2."""


@_disable_dynamo  # torch.compiler.disable would import all of dynamo now, a second of every process
def moe_ffn_without_esfk(*args: Any) -> Tensor:
    """Has the arguments and value of `hexa::moe_ffn`."""
    x, top_k_index, top_k_weights, *weights = args[:9]
    y: Tensor = _MoeFfnSeparateBackward.apply(
        in_compute_dtype(x), top_k_index, top_k_weights, *map(in_compute_dtype, weights), *args[9:]
    )
    return y


class _MoeFfnSeparateBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        with _AutoDispatchBelowAutograd():
            y, h, v, inv, offs = run_forward(*args)
        activation, glu, params, layout1, layout2, recompute_h = args[9:]
        operands = kept_operands(args[:9], recompute_h, ctx.needs_input_grad)
        ctx.save_for_backward(args[0], None if recompute_h else h, v, inv, offs, *operands)
        ctx.top_k = args[1].shape[1]
        ctx.static = (activation, glu, tuple(params), layout1, layout2, recompute_h)
        return y  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, h, v, inv, offs, *operands = ctx.saved_tensors
        needs = (ctx.needs_input_grad[0], *ctx.needs_input_grad[_WEIGHTS])
        given = (True, *(t is not None for t in operands))
        program = programs(ctx.static, given, needs, True, x.device.type, fused_backward=False)
        saved = None if h is None else [h]
        with _AutoDispatchBelowAutograd(), library.without_autocast():
            found = iter(program.backward(grads[0], x, saved, v, inv, offs, *operands, ctx.top_k, *(None,) * 7))
        dx, *others = [next(found) if need else None for need in needs]
        return dx, None, *others, *(None,) * 6
