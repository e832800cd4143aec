"""The activations an expert may have, each with its derivative, and how gate and up lie in the pre-activation.

An ungated expert computes ``a = act(h)``. A gated one has gate and up in h and computes ``a = act(gate) * up``, unless the
activation itself is a function of both (`swiglu_oai`, `swiglu_limited`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hexa_fx.errors import InputError

Params = Sequence[float]
aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """One activation function.

    Args:
        name: its name in a `FfnSpec`.
        forward: ``(h) -> a``; for a pair activation ``(gate, up, *params) -> a``.
        backward: ``(da, h) -> dh``; for a pair activation ``(da, gate, up, *params) -> (dgate, dup)``.
        params: default constants.
        pair: whether it is a function of gate and up together.
        limits: whether the constants are limits, which may be equal, or infinite.
    """

    name: str
    forward: Callable[..., Tensor]
    backward: Callable[..., Any]
    params: tuple[float, ...] = ()
    pair: bool = False
    limits: bool = False

    def choices(self, numbers: Sequence[float]) -> Iterator[tuple[float, ...]]:
        """Its own constants, and all that may be made of positive ``numbers``."""
        yield self.params
        count = len(self.params)
        found = product([*numbers, math.inf], repeat=count) if self.limits else permutations(numbers, count)
        yield from (choice for choice in found if choice and choice != self.params and set(choice) != {math.inf})


@dataclass(frozen=True)
class _Limits:
    """``(clamp(up) + shift) * g * sigmoid(alpha g)``, g = min(gate, limit of the gate)."""

    gate: float
    up: float
    alpha: float = 1.0
    shift: float = 0.0

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        g = gate.clamp(max=self.gate)
        return self._shifted(up) * (g * torch.sigmoid(g * self.alpha))

    def backward(self, da: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        g = gate.clamp(max=self.gate)
        s = (g * self.alpha).sigmoid_()
        swish = g.mul_(s)
        dswish = (1 - s).mul_(swish).mul_(self.alpha).add_(s)
        dgate = self._shifted(up).mul_(dswish).mul_(da).mul_(gate <= self.gate)
        dup = swish.mul_(da).mul_(up.abs() <= self.up)
        return dgate, dup

    def _shifted(self, up: Tensor) -> Tensor:
        u = up.clamp(-self.up, self.up)
        return u.add_(self.shift) if self.shift else u


def _oai(alpha: float, limit: float) -> _Limits:
    return _Limits(gate=limit, up=limit, alpha=alpha, shift=1.0)


def _quick_gelu_backward(da: Tensor, h: Tensor) -> Tensor:
    s = torch.sigmoid(1.702 * h)
    return da * (s + 1.702 * h * s * (1 - s))


ACTIVATIONS: dict[str, Activation] = {
    a.name: a
    for a in (
        Activation("none", torch.clone, lambda da, h: da.clone()),
        Activation("relu", torch.relu, lambda da, h: aten.threshold_backward.default(da, h, 0)),
        Activation("relu2", lambda h: torch.relu(h).square(), lambda da, h: da * (2 * torch.relu(h))),
        Activation("gelu", F.gelu, aten.gelu_backward.default),
        Activation(
            "gelu_tanh", partial(F.gelu, approximate="tanh"), partial(aten.gelu_backward.default, approximate="tanh")
        ),
        Activation("silu", F.silu, aten.silu_backward.default),
        Activation("quick_gelu", lambda h: h * torch.sigmoid(1.702 * h), _quick_gelu_backward),
        Activation("sigmoid", torch.sigmoid, lambda da, h: aten.sigmoid_backward.default(da, torch.sigmoid(h))),
        Activation("tanh", torch.tanh, lambda da, h: aten.tanh_backward.default(da, torch.tanh(h))),
        Activation(  # gpt-oss: alpha, limit
            "swiglu_oai",
            lambda gate, up, *p: _oai(*p).forward(gate, up),
            lambda da, gate, up, *p: _oai(*p).backward(da, gate, up),
            params=(1.702, 7.0),
            pair=True,
        ),
        Activation(  # DeepSeek-V4: the limits of gate and up, inf where there is none
            "swiglu_limited",
            lambda gate, up, *p: _Limits(*p).forward(gate, up),
            lambda da, gate, up, *p: _Limits(*p).backward(da, gate, up),
            params=(10.0, 10.0),
            pair=True,
            limits=True,
        ),
    )
}
"""Every activation by its name. `hexa::activate` and its kernels know these and no others."""


def check_activation(activation: str, glu: str, params: Params) -> None:
    """Raises `InputError` unless activation, glu and parameters fit together."""
    found = ACTIVATIONS.get(activation)
    if found is None:
        raise InputError(f"unknown activation {activation!r}; expected one of {', '.join(ACTIVATIONS)}")
    if glu not in ("none", "concat", "interleaved", "split"):
        raise InputError(f"unknown glu {glu!r}; expected none, concat, interleaved or split")
    if found.pair and glu == "none":
        raise InputError(f"activation {activation!r} is a function of gate and up, so glu cannot be 'none'")
    if params and len(params) != len(found.params):
        raise InputError(f"activation {activation!r} takes {len(found.params)} params, got {len(params)}")


def inner_width(columns: int, glu: str) -> int:
    """I, given the columns of W1: half of them if the weight holds both gate and up."""
    return columns // 2 if glu in ("concat", "interleaved") else columns


def gate_and_up(h: Tensor, glu: str) -> tuple[Tensor, Tensor]:
    """Views (n, I) of gate and up in a gated pre-activation (n, 2I)."""
    if glu == "interleaved":
        return h[:, ::2], h[:, 1::2]
    inner = h.shape[1] // 2
    return h.narrow(1, 0, inner), h.narrow(1, inner, inner)


def activation_forward(h: Tensor, activation: str, glu: str, params: Params) -> Tensor:
    """a (n, I) of a pre-activation h, in h's dtype, in torch operators that autograd can differentiate."""
    act = ACTIVATIONS[activation]
    if glu == "none":
        return act.forward(h)
    gate, up = gate_and_up(h, glu)
    if act.pair:
        return act.forward(gate, up, *(params or act.params))
    return act.forward(gate) * up


def weighted_backward(
    da: Tensor, h: Tensor, w: Tensor | None, activation: str, glu: str, params: Params
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Backward of the activation together with the routing weight's, in few passes over the data.

    Args:
        da: gradient of a before the routing weight is applied, as h but half as wide in dimension 1 under a gate.
        h: the pre-activation, channels in dimension 1.
        w: the routing weight, of size 1 in dimension 1; None for 1.

    Returns:
        ``act'(h) (w da)``, ``w act(h)`` and, with w, ``<da, act(h)>`` over dimension 1.
    """
    act = ACTIVATIONS[activation]
    if glu == "none":
        a = act.forward(h)
        weighted, dots = _weigh(da, a, w)
        return act.backward(weighted, h), a, dots
    gate, up = gate_and_up(h, glu)
    dh = torch.empty_like(h)
    dgate, dup = gate_and_up(dh, glu)
    if act.pair:
        constants = params or act.params
        a = act.forward(gate, up, *constants)
        weighted, dots = _weigh(da, a, w)
        for grad, value in zip((dgate, dup), act.backward(weighted, gate, up, *constants), strict=True):
            grad.copy_(value)
        return dh, a, dots
    acted = act.forward(gate)
    grad = da * acted
    if w is None:
        dots = None
        dup.copy_(grad)
        weighted = grad.copy_(up)
    else:
        torch.mul(grad, w, out=dup)
        dots = grad.mul_(up).sum(1)
        weighted = torch.mul(up, w, out=grad)
    a = acted.mul_(weighted)
    _backward_into(act, weighted.mul_(da), gate, dgate)
    return dh, a, dots


def _weigh(da: Tensor, a: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """``(w da, <da, a>)``; a is scaled in place."""
    if w is None:
        return da, None
    dots = (da * a).sum(1)
    a.mul_(w)
    return da * w, dots


_BACKWARD_INTO = {
    "relu": lambda da, h, out: aten.threshold_backward.grad_input(da, h, 0, grad_input=out),
    "gelu": lambda da, h, out: aten.gelu_backward.grad_input(da, h, grad_input=out),
    "silu": lambda da, h, out: aten.silu_backward.grad_input(da, h, grad_input=out),
}


def _backward_into(act: Activation, da: Tensor, h: Tensor, out: Tensor) -> None:
    into = _BACKWARD_INTO.get(act.name)
    if into is None:
        out.copy_(act.backward(da, h))
    else:
        into(da, h, out)
