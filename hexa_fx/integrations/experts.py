"""``experts_implementation="hexa"``: replaces the experts' forward of transformers 5.

transformers keeps the experts of a block as stacked parameters and describes their layout by flags on the module (`has_gate`,
`has_bias`, `is_transposed`). What happens between the projections is a method, `_apply_gate`. Running that once on numbers shows
which of our activations it is. If it is none of them, it runs as it is, between two `hexa::esmm`.

T tokens, k experts per token, E experts, D model size, I intermediate size.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hexa_fx import ops
from hexa_fx.ir import FfnSpec, Glu, Layout
from hexa_fx.ops.activations import ACTIVATIONS, activation_forward
from hexa_fx.torch_private import DisableTorchFunction, _disable_current_modes

log = logging.getLogger(__name__)

_WEIGHTS = {"gate_up_proj", "gate_up_proj_bias", "up_proj", "up_proj_bias", "down_proj", "down_proj_bias"}
_PROBE_ROWS, _PROBE_WIDTH = 64, 4


@dataclass(frozen=True)
class Gate:
    """What an experts module computes between its projections, as one of our activations."""

    activation: str
    glu: Glu
    params: tuple[float, ...] = ()


def hexa_experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts of one block, by the contract of transformers' `ExpertsInterface`.

    Args:
        self: the experts module, with stacked weights as transformers' `use_experts_implementation` describes them.
        hidden_states: (T, D). top_k_index: (T, k) int in 0 .. E-1, or E for a slot that contributes nothing (expert
            parallelism). top_k_weights: (T, k).

    Returns:
        (T, D) in the dtype of hidden_states.
    """
    w1, b1, w2, b2 = weights_of(self)
    x = hidden_states.to(w1.dtype)
    gate = _gate_of(self)
    layout: Layout = "kn" if self.is_transposed else "nk"
    if gate is None:
        return _by_rows(self, x, top_k_index, top_k_weights, layout).to(hidden_states.dtype)
    spec = FfnSpec(gate.activation, gate.glu, layout, layout, gate.params)
    return ops.moe_ffn(x, top_k_index, top_k_weights, w1, b1, None, None, w2, b2, spec).to(hidden_states.dtype)


def weights_of(experts: Any) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """First weight and bias, second weight and bias, as the module stores them."""
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    w1, w2 = getattr(experts, name), experts.down_proj
    if not experts.has_bias:
        return w1, None, w2, None
    return w1, getattr(experts, f"{name}_bias"), w2, experts.down_proj_bias


def _by_rows(experts: Any, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, layout: Layout) -> Tensor:
    """Runs the module's own function of a row between the projections, and its own norm after them."""
    w1, b1, w2, b2 = weights_of(experts)
    top_k = top_k_index.shape[1]
    v, inv, offs = ops.reindex(top_k_index, w1.shape[0])
    h = ops.esmm(x, w1, b1, v, offs, top_k, layout)
    a = experts._apply_gate(h) if experts.has_gate else experts.act_fn(h)
    y = ops.esmm(a.to(w2.dtype), w2, b2, None, offs, 1, layout)
    if getattr(experts, "has_post_expert_norm", False):  # which older versions of transformers lack
        y = experts.post_expert_norm(y)
    return ops.combine(y, top_k_weights, inv, offs, top_k)


_KNOWN: weakref.WeakKeyDictionary[nn.Module, dict[bool, Gate | None]] = weakref.WeakKeyDictionary()
"""By module and training mode, since an activation may hold a dropout."""


def _gate_of(experts: Any) -> Gate | None:
    """The module's gate as one of ours, or None. Determined once per module; a compiler treats it as a constant."""
    found: Gate | None = _gate(id(experts), experts.training)
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _gate(number: int, training: bool) -> Gate | None:
    """Of the module with this id, which the caller holds: a compiler of torch 2.11 hands constants over, and no module."""
    experts = ctypes.cast(number, ctypes.py_object).value
    known = _KNOWN.setdefault(experts, {})
    if training not in known:
        gate = None if getattr(experts, "has_post_expert_norm", False) else identify_gate(experts)
        if gate is None:
            log.info("%s: what it computes around its products runs as it is written", type(experts).__name__)
        known[training] = gate
    return known[training]


def identify_gate(experts: Any) -> Gate | None:
    """Which activation `_apply_gate` (or `act_fn` of an ungated module) is; None if it is none of ours.

    Runs it on float64 numbers that reach past every clamp among the module's constants. If it might read a parameter, which
    training changes, it is none of ours.
    """
    if not {name for name, _ in (*experts.named_parameters(), *experts.named_buffers())} <= _WEIGHTS:
        return None
    function: Callable[[Tensor], Tensor] = experts._apply_gate if experts.has_gate else experts.act_fn
    constants = _constants(experts)
    # The caller may be tracing (torch.export, FakeTensorMode), but the experiment needs real numbers.
    with (
        _disable_current_modes(),
        DisableTorchFunction(),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        h = _probe(max([20.0, *(2 * c for c in constants if c < 1e6)]), experts.has_gate)
        try:
            observed = function(h.clone())
        except (RuntimeError, TypeError, ValueError):
            return None
        return next((g for g in _candidates(experts.has_gate, constants) if _is_it(g, h, observed)), None)


def _probe(reach: float, gated: bool) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    width = _PROBE_WIDTH * (2 if gated else 1)
    near = torch.randn(_PROBE_ROWS, width, generator=generator, dtype=torch.float64, device="cpu")
    far = (torch.rand(_PROBE_ROWS, width, generator=generator, dtype=torch.float64, device="cpu") - 0.5) * 2 * reach
    return torch.cat((2 * near, far))


def _constants(experts: Any) -> list[float]:
    """Positive numbers that the module keeps, such as alpha and limit of a clamped swiglu."""
    numbers = [float(v) for v in vars(experts).values() if isinstance(v, (int, float)) and not isinstance(v, bool)]
    return list(dict.fromkeys(number for number in numbers if number > 0))


def _candidates(gated: bool, constants: list[float]) -> Iterator[Gate]:
    ways: tuple[Glu, ...] = ("concat", "interleaved") if gated else ("none",)
    for glu in ways:
        for activation in ACTIVATIONS.values():
            if activation.pair and not gated:
                continue
            yield from (Gate(activation.name, glu, params) for params in activation.choices(constants))


def _is_it(gate: Gate, h: Tensor, observed: Tensor) -> bool:
    expected = activation_forward(h, gate.activation, gate.glu, gate.params)
    if observed.shape != expected.shape or observed.dtype != expected.dtype:
        return False
    return torch.allclose(observed, expected, rtol=1e-9, atol=1e-10)
