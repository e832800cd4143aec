"""``hexa::moe_ffn``: a whole MoE feed-forward in one node, the canonical form of the rewrite.

It is one autograd unit, so that it decides what is saved for backward: x, h (unless ``recompute_h``), the routing and the
weights. Below autograd there are three operators:

* ``moe_ffn`` itself, where no gradient is wanted and h is never kept;
* ``moe_ffn_forward``, which also returns what backward needs;
* ``moe_ffn_backward``.

All three run the programs that the operator's compiler makes (`hexa_fx.ops.program`). `hexa_fx.ops.moe_ffn_autograd` is how
autograd reaches them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hexa_fx.ir import FfnSpec
from hexa_fx.ops import library
from hexa_fx.ops.program import programs
from hexa_fx.ops.table_layers import (
    OPERANDS,
    PARAMETERS,
    MoeFfn,
    MoeFfnBackward,
    differentiable,
    parameters,
    static_of,
    tensors,
)

_OPS = torch.ops.hexa


def moe_ffn(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor | None,
    w1: Tensor,
    b1: Tensor | None,
    w3: Tensor | None,
    b3: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    spec: FfnSpec,
) -> Tensor:
    """``y[t] = sum over s of top_k_weights[t, s] * FFN_{e(t, s)}(x[t])`` (paper, section 3).

    Args:
        x: (T, D).
        top_k_index: (T, k) integer in 0 .. E-1; any other number, such as E or -1, is a slot that contributes nothing. A token
            may name an expert twice.
        top_k_weights: (T, k) in any floating dtype, or None, which means 1.
        w1: first projection, (E, N, D) for ``spec.layout1 == "nk"``, (E, D, N) for ``kn``; N = I, or 2I for glu
            ``concat`` and ``interleaved``.
        b1: (E, N) or None.
        w3, b3: the up projection of glu ``split``, shaped as w1 and b1.
        w2: second projection, (E, D, I) or (E, I, D) as ``spec.layout2`` says.
        b2: (E, D) or None.
        spec: activation, glu, layouts, and whether to recompute h in backward.

    Returns:
        (T, D) in x's dtype (under autocast: in the autocast dtype, as torch.nn.functional.linear).

    Mixed precision: if a weight or bias has an attribute ``main_grad``, a float32 tensor of its shape, its gradient is added to
    that before it is rounded to 16 bits, and ``.grad`` gets none. Not under a compiler. See docs/training.md.

    Saved for backward: x (not if W1 and W3 are frozen), h (not with ``recompute_h``), the routing and the weights.

    Raises:
        InputError: shapes, dtypes or devices do not fit together; a second derivative is asked for; with HEXA_FX_CHECKED=1
            also for an expert id below 0 or above E.
    """
    y: Tensor = _OPS.moe_ffn.default(x, top_k_index, top_k_weights, w1, b1, w3, b3, w2, b2, *static_of(spec))
    return y


_backward_operands = MoeFfnBackward.pick("dy", "x", "h", "v", "inv", "offs", "top_k_weights", *PARAMETERS, "top_k")
_backward_parameters = MoeFfnBackward.pick(*PARAMETERS)
_NO_GRADS = (False,) * len(OPERANDS)


def _static(o: MoeFfn | MoeFfnBackward) -> tuple[Any, ...]:
    return o.activation, o.glu, tuple(o.params), o.layout1, o.layout2, o.recompute_h


def _given(tensors: Iterable[Any]) -> tuple[bool, ...]:
    return tuple([t is not None for t in tensors])


def forward_on(device: str, training: bool, o: MoeFfn) -> Any:
    """The forward program of a device type: y, for training y, h, v, inv and offs. Arguments are not checked."""
    program = programs(_static(o), _given(differentiable(o)), _NO_GRADS, training, device)
    out = program.forward(*tensors(o))
    if training and o.recompute_h:
        y, v, inv, offs = out
        return y, o.hidden(), v, inv, offs
    return out


def backward_on(device: str, *args: Any) -> list[Tensor]:
    """The backward program of a device type, of `MoeFfnBackward`. If h is in a list, it is freed after its last use."""
    o, buffers = MoeFfnBackward.split(args)
    h: Any = o.h if o.h is None or isinstance(o.h, list) else [o.h]
    given = _given((o.dy, o.top_k_weights, *_backward_parameters(o)))
    program = programs(_static(o), given, tuple(o.needs), True, device, _given(buffers))
    out: tuple[Tensor, ...] = program.backward(*_backward_operands(o._replace(h=h)), *buffers)
    return list(out)


def _device_of(x: Tensor, weights: Iterable[Tensor | None]) -> str:
    """Whose kernels run: plain torch's where a weight is a tensor of another class, which has no memory to point to."""
    plain = all(weight is None or type(weight) in _PLAIN for weight in weights)
    return x.device.type if plain else "any"


_PLAIN = frozenset({Tensor, torch.nn.Parameter})


@library.kernel("moe_ffn", "any")
def inference(o: MoeFfn) -> Tensor:
    """Kernel for any device: the forward program for inference."""
    return forward_on(_device_of(o.x, parameters(o)), False, o)  # type: ignore[no-any-return]


@library.kernel("moe_ffn_forward", "any")
def training(o: MoeFfn) -> tuple[Tensor, ...]:
    """Kernel for any device: the forward program for training."""
    return forward_on(_device_of(o.x, parameters(o)), True, o)  # type: ignore[no-any-return]


def _backward(*args: Any) -> list[Tensor]:
    """Kernel for any device: the backward program."""
    o, _ = MoeFfnBackward.split(args)
    return backward_on(_device_of(o.dy, _backward_parameters(o)), *args)


library.register_kernel("moe_ffn_backward", "any", _backward)
