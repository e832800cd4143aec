"""A layer of experts: ``hexa::moe_ffn``, a whole MoE feed-forward in one node, which is the canonical form of the rewrite, and
``hexa::moe_ffn_sources``, the same on weights that are packed, have low-rank additions (LoRA), or both.

It is one autograd unit, so that it decides what is saved for backward: x, h (unless ``recompute_h``), the routing and the
weights. Below autograd there are three operators:

* ``moe_ffn`` itself, where no gradient is wanted and h is never kept;
* ``moe_ffn_forward``, which also returns what backward needs;
* ``moe_ffn_backward``.

All run the programs that the layers' compiler makes (`hexa_fx.ops.program`). `hexa_fx.ops.moe_ffn_autograd` is how autograd reaches
them. What ends in ``_fixed`` takes no way that depends on the number of tokens (the dense one, another tile), so that a token's
result has the same bits in any batch; gradients are sums over tokens, whose bits depend on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hexa_fx.ir import FfnSpec
from hexa_fx.ops import library
from hexa_fx.ops.fixed_order import in_fixed_order
from hexa_fx.ops.listed import Listed
from hexa_fx.ops.program import programs
from hexa_fx.ops.table_layers import PARAMETERS, MoeFfn, MoeFfnBackward, MoeFfnSources, MoeFfnSourcesBackward, static_of

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
        InputError: shapes, dtypes or devices do not fit together; a second derivative is asked for where W1 and W3 are frozen;
            with HEXA_FX_CHECKED=1 also for an expert id below 0 or above E.
    """
    y: Tensor = _OPS.moe_ffn.default(x, top_k_index, top_k_weights, w1, b1, w3, b3, w2, b2, *static_of(spec))
    return y


def _given(tensors: Iterable[Any]) -> tuple[bool, ...]:
    return tuple([t is not None for t in tensors])


Layer = MoeFfn | MoeFfnSources
Gradients = MoeFfnBackward | MoeFfnSourcesBackward
_SOURCES = MoeFfnSources.differentiable
_operands = {record: record.pick(*record.differentiable) for record in (MoeFfn, MoeFfnSources)}
_operands_of_backward = {
    record: record.pick("dy", *record.differentiable[1:]) for record in (MoeFfnBackward, MoeFfnSourcesBackward)
}


def forward_on(device: str, training: bool, o: Layer) -> Any:
    """The forward program of a device type: y, for training also what backward needs. Arguments are not checked."""
    of_sources = isinstance(o, MoeFfnSources)
    given = _given(_operands[MoeFfnSources if of_sources else MoeFfn](o))
    found = programs(o.static, given, device, () if training else None).forward(*o)
    if not training or not (of_sources or o.recompute_h):
        return found
    y, *kept = found
    left = iter(kept)
    h = o.hidden() if o.recompute_h else next(left)
    if not of_sources:
        return y, h, *left
    # An addition that is not there has a tensor of its own: results of a custom operator may not share one.
    u = [h.new_empty((0, 0)) if a is None else next(left) for a in (o.a1, o.a3, o.a2)]  # type: ignore[union-attr]
    return y, h, *u, *left


def backward_on(device: str, record: type[Gradients], args: Iterable[Any], fused: bool = True) -> list[Tensor]:
    """The backward program of a device type. If h is in a list, it is freed after its last use. Buffers may follow the operands."""
    o, buffers = record.split(tuple(args))
    h: Any = o.h if o.h is None or isinstance(o.h, list) else [o.h]
    given = _given(_operands_of_backward[record](o))
    program = programs(o.static, given, device, tuple(o.needs), _given(buffers), fused)
    return list(program.backward(*o._replace(h=h), *buffers))


_PLAIN = frozenset({Tensor, torch.nn.Parameter, Listed})
_weights = {
    record: record.pick(*PARAMETERS) for record in (MoeFfn, MoeFfnSources, MoeFfnBackward, MoeFfnSourcesBackward)
}


def _device_of(x: Tensor, weights: Iterable[Tensor | None]) -> str:
    """Whose kernels run: plain torch's where a weight is a tensor of another class, which has no memory to point to."""
    plain = all(weight is None or type(weight) in _PLAIN for weight in weights)
    return x.device.type if plain else "any"


def _register(name: str, record: type[Layer], gradients: type[Gradients]) -> None:
    """Registers the kernels for any device of a layer's operators."""
    weights, weights_of_backward = _weights[record], _weights[gradients]

    def inference(o: Layer) -> Any:
        return forward_on(_device_of(o.x, weights(o)), False, o)

    def training(o: Layer) -> Any:
        return forward_on(_device_of(o.x, weights(o)), True, o)

    def backward(*args: Any) -> list[Tensor]:
        dy, *_ = args
        return backward_on(_device_of(dy, weights_of_backward(args)), gradients, args)

    for end, run in (("", inference), ("_forward", training)):
        library.kernel(f"{name}{end}", "any")(run)
        library.kernel(f"{name}_fixed{end}", "any")(in_fixed_order(run))
    library.register_kernel(f"{name}_backward", "any", backward)


_register("moe_ffn", MoeFfn, MoeFfnBackward)
_register("moe_ffn_sources", MoeFfnSources, MoeFfnSourcesBackward)
