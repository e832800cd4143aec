"""Second derivatives of `hexa::moe_ffn`, which penalties on gradients, forces and products with a Hessian ask for.

Gradients that are to be derived again (``create_graph=True``) come from the operator ``hexa::moe_ffn_backward``. To derive it, the
layer is computed once more, by operators that are derived as often as it takes, and derived twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hexa_fx.errors import InputError
from hexa_fx.ops import library
from hexa_fx.ops.activations import activation_forward
from hexa_fx.ops.rows import accumulate_dtype
from hexa_fx.ops.table_layers import OPERANDS, MoeFfnBackward
from hexa_fx.torch_private import without_autocast

_OPS = torch.ops.hexa
_GIVEN = ("dy", *OPERANDS)
_SAVED = (*_GIVEN, "v", "inv", "offs")
_tensors = MoeFfnBackward.pick(*_SAVED)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    o = MoeFfnBackward._make(inputs)
    ctx.save_for_backward(*_tensors(o))
    ctx.static = o._replace(h=None, **dict.fromkeys(_SAVED))


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Gradients of dy, x, routing weights and parameters, from those of the layer's gradients. h follows from x."""
    o = ctx.static._replace(**dict(zip(_SAVED, ctx.saved_tensors, strict=True)))
    if o.x is None:
        raise InputError(
            "hexa::moe_ffn: x is not kept where the weights that it is multiplied by are frozen, and a second derivative needs it; "
            "let them require gradients, or run the original module (hexa_fx.undo_)"
        )
    again = torch.is_grad_enabled()
    with torch.enable_grad(), without_autocast():
        given = {name: each.view_as(each) for name in _GIVEN if (each := getattr(o, name)) is not None}
        needed = [given[name] for name, need in zip(OPERANDS, o.needs, strict=True) if need]
        first = torch.autograd.grad(_layer(o._replace(**given)), needed, given["dy"], create_graph=True)
        asked = [
            (value, grad) for value, grad in zip(first, grads, strict=True) if grad is not None and value.requires_grad
        ]
        leaves = {name: each for name, each in given.items() if each.requires_grad}
        values, upstream = zip(*asked) if asked else ((), ())
        found = torch.autograd.grad(values, [*leaves.values()], upstream, create_graph=again, allow_unused=True)
    params: list[float] | None = None if o.params else []  # torch takes an empty list for one of tensors
    return MoeFfnBackward.by_argument(**dict(zip(leaves, found)), params=params)


def _layer(o: MoeFfnBackward) -> Tensor:
    """y of a layer, from its operands and its routing."""
    rows = o.v, o.offs, o.top_k, o.layout1
    h = _OPS.esmm(o.x, o.w1, o.b1, *rows)
    if o.w3 is not None:
        h = torch.cat((h, _OPS.esmm(o.x, o.w3, o.b3, *rows)), 1)
    a = activation_forward(h.to(accumulate_dtype(h.dtype)), o.activation, o.glu, o.params).to(h.dtype)
    y = _OPS.esmm(a, o.w2, o.b2, None, o.offs, 1, o.layout2)
    return _OPS.combine(y, o.top_k_weights, o.inv, o.offs, o.top_k)  # type: ignore[no-any-return]


library.register_autograd("moe_ffn_backward", _backward, _keep)
