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

from hexa_fx.errors import InputError
from hexa_fx.ir import FfnSpec
from hexa_fx.ops import checks, library, reindex
from hexa_fx.ops.activations import inner_width
from hexa_fx.ops.esmm_act import check_first_projection
from hexa_fx.ops.operands import MoeFfn
from hexa_fx.ops.program import programs

_OPS = torch.ops.hexa
WEIGHTS = "Tensor w1, Tensor? b1, Tensor? w3, Tensor? b3, Tensor w2, Tensor? b2"
STATIC = "str activation, str glu, float[] params, str layout1, str layout2, bool recompute_h"
INPUTS = f"Tensor x, Tensor top_k_index, Tensor? top_k_weights, {WEIGHTS}, {STATIC}"
KEPT = "(Tensor y, Tensor h, Tensor v, Tensor inv, Tensor offs)"
"""The result, and what backward needs."""

library.define(f"moe_ffn({INPUTS}) -> Tensor")
library.define(f"moe_ffn_forward({INPUTS}) -> {KEPT}")
library.define(
    "moe_ffn_backward(Tensor dy, Tensor? x, Tensor? h, Tensor v, Tensor inv, Tensor offs, Tensor? top_k_weights, "
    f"{WEIGHTS}, SymInt top_k, {STATIC}, bool[] needs) -> Tensor[]"
)


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


def static_of(spec: FfnSpec) -> tuple[Any, ...]:
    """The operator's arguments behind its operands; raises `InputError` if that is no `FfnSpec`."""
    if not isinstance(spec, FfnSpec):
        raise InputError(f"spec is a {type(spec).__name__}; expected FfnSpec(activation, glu, ...)")
    return spec.activation, spec.glu, spec.params, spec.layout1, spec.layout2, spec.recompute_h


def _static(args: tuple[Any, ...]) -> tuple[Any, ...]:
    activation, glu, params, layout1, layout2, recompute_h = args
    return activation, glu, tuple(params), layout1, layout2, recompute_h


def check(*args: Any) -> None:
    """Checks shapes, dtypes and devices of the arguments."""
    o = MoeFfn(*args)
    names = ("x", "w1", "b1", "w3", "b3", "w2", "b2")
    checks.check_floating("moe_ffn", names, (o.x, o.w1, o.b1, o.w3, o.b3, o.w2, o.b2))
    check_shapes(o)


def check_shapes(o: MoeFfn) -> None:
    """Checks shapes, and the routing."""
    op = "moe_ffn"
    experts, model_size, n = checks.check_weight(op, "w1", o.w1, o.layout1)
    checks.check_rows(op, "x", o.x, model_size)
    check_first_projection(op, o, experts, n)
    experts2, k2, n2 = checks.check_weight(op, "w2", o.w2, o.layout2)
    inner = inner_width(n, o.glu)
    if experts2 != experts or k2 != inner:
        raise InputError(
            f"hexa::{op}: w2 is {checks.shape(o.w2)}, {experts2} experts of {k2} inputs in layout {o.layout2}; "
            f"w1 gives {experts} experts of intermediate size {inner}"
        )
    checks.check_bias(op, "b2", o.b2, experts, n2)
    checks.check_routing(op, o.x, o.top_k_index, o.top_k_weights)


def _given(tensors: tuple[Any, ...]) -> tuple[bool, ...]:
    return tuple(t is not None for t in tensors)


_NO_GRADS = (False,) * 8


def forward_on(device: str, training: bool, x: Tensor, top_k_index: Tensor, *rest: Any) -> Any:
    """The forward program of a device type: y, for training y, h, v, inv and offs. Arguments are not checked."""
    program = programs(_static(rest[7:]), (True, *_given(rest[:7])), _NO_GRADS, training, device)
    out = program.forward(x, top_k_index, *rest[:7])
    if training and rest[12]:
        y, v, inv, offs = out
        return y, x.new_empty((0, MoeFfn(x, top_k_index, *rest).width)), v, inv, offs
    return out


def backward_on(device: str, dy: Tensor, x: Tensor | None, h: Tensor | list[Tensor] | None, *rest: Any) -> list[Tensor]:
    """The backward program of a device type. If h is passed in a list, it is freed after its last use.

    Buffers to add gradients to may follow the operator's own arguments, one or None for each operand after x. These gradients are
    not among the results.
    """
    h = [h] if h is not None and not isinstance(h, list) else h
    weights, top_k, static, needs, buffers = rest[3:10], rest[10], rest[11:17], tuple(rest[17]), rest[18:]
    program = programs(_static(static), (True, *_given(weights)), needs, True, device, _given(buffers))
    out: tuple[Tensor, ...] = program.backward(dy, x, h, *rest[:3], *weights, top_k, *buffers)
    return list(out)


def inference(x: Tensor, top_k_index: Tensor, *rest: Any) -> Tensor:
    """Kernel for any device: the forward program for inference."""
    return forward_on(_device_of(x, rest[1:7]), False, x, top_k_index, *rest)  # type: ignore[no-any-return]


def training(x: Tensor, top_k_index: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Kernel for any device: the forward program for training."""
    return forward_on(_device_of(x, rest[1:7]), True, x, top_k_index, *rest)  # type: ignore[no-any-return]


def _moe_ffn_backward(dy: Tensor, x: Tensor | None, h: Tensor | list[Tensor] | None, *rest: Any) -> list[Tensor]:
    """Kernel for any device: the backward program."""
    return backward_on(_device_of(dy, rest[4:10]), dy, x, h, *rest)


def _device_of(x: Tensor, weights: Iterable[Tensor | None]) -> str:
    """Whose kernels run: plain torch's where a weight is a tensor of another class, which has no memory to point to."""
    plain = all(weight is None or type(weight) in _PLAIN for weight in weights)
    return x.device.type if plain else "any"


_PLAIN = frozenset({Tensor, torch.nn.Parameter})


def fake(*args: Any) -> Tensor:
    """An empty result."""
    o = MoeFfn(*args)
    return o.x.new_empty((o.x.shape[0], o.output_size))


def fake_forward(*args: Any) -> tuple[Tensor, ...]:
    """Empty results."""
    o = MoeFfn(*args)
    h = o.x.new_empty((0 if o.recompute_h else o.rows, o.width))
    return fake(*args), h, *reindex.fake(o.top_k_index, o.w1.shape[0])


def _fake_backward(dy: Tensor, x: Tensor | None, h: Tensor | None, *rest: Any) -> list[Tensor]:
    top_k_weights, w1, b1, w3, b3, w2, b2 = rest[3:10]
    layout1, needs = rest[14], rest[17]
    model_size = w1.shape[2] if layout1 == "nk" else w1.shape[1]
    like = (dy.new_empty((dy.shape[0], model_size)), top_k_weights, w1, b1, w3, b3, w2, b2)
    return [t.new_empty(t.shape) for t, need in zip(like, needs, strict=True) if need]


library.register_fake("moe_ffn", fake, check)
run = library.register_kernel("moe_ffn", "any", inference)
library.register_autocast("moe_ffn", cast=(0, 3, 4, 5, 6, 7, 8), or_float32=True)

library.register_fake("moe_ffn_forward", fake_forward, check)
run_forward = library.register_kernel("moe_ffn_forward", "any", training)

library.register_fake("moe_ffn_backward", _fake_backward)
run_backward = library.register_kernel("moe_ffn_backward", "any", _moe_ffn_backward)
library.refuse_double_backward("moe_ffn_backward")
