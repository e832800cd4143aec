"""Everything that an expert may compute between its projections: every known activation, with every layout of its inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.fx

from hexa_fx.ops.activations import ACTIVATIONS
from hexa_fx.passes.detect.graph import literals
from hexa_fx.passes.detect.projections import feature_size
from hexa_fx.passes.detect.rows import Instance

_TOLERANCE = 1e-7


@dataclass(frozen=True)
class Hypothesis:
    activation: str
    params: tuple[float, ...]
    pairing: str


def hypotheses(instance: Instance, segment: Sequence[torch.fx.Node]) -> Iterator[Hypothesis]:
    """Every activation, with every layout of gate and up in the result of the first projection."""
    width = feature_size(instance.second.data)
    if len(instance.first) == 2:
        # of another width, one of them is no half of a gated pair: FiLM's scale and shift, a gate per row
        pairings = ["separate"] if all(feature_size(first.node) == width for first in instance.first) else []
    elif len(instance.first) > 2:
        pairings = []
    elif feature_size(instance.first[0].node) == width:
        pairings = ["none"]
    elif feature_size(instance.first[0].node) == 2 * width:
        pairings = ["concat", "interleaved", "concat_up_first", "interleaved_up_first"]
    else:
        pairings = []
    for pairing in pairings:
        for activation in ACTIVATIONS.values():
            if activation.pair and pairing == "none":
                continue
            for params in activation.choices([number for number in literals(segment) if number > 0]):
                yield Hypothesis(activation.name, params, pairing)


def activate(hypothesis: Hypothesis, inputs: list[torch.Tensor]) -> torch.Tensor:
    activation = ACTIVATIONS[hypothesis.activation]
    if hypothesis.pairing == "none":
        value = activation.forward(inputs[0], hypothesis.params)
        return value if isinstance(value, torch.Tensor) else value[0]
    gate, up = inputs if hypothesis.pairing == "separate" else _halves(inputs[0], hypothesis.pairing)
    if activation.pair:
        return activation.forward(gate, up, hypothesis.params)
    return activation.forward(gate, hypothesis.params) * up


def _halves(hidden: torch.Tensor, pairing: str) -> tuple[torch.Tensor, torch.Tensor]:
    interleaved = pairing.startswith("interleaved")
    half = hidden.shape[1] // 2
    first, second = (hidden[:, ::2], hidden[:, 1::2]) if interleaved else (hidden[:, :half], hidden[:, half:])
    return (second, first) if pairing.endswith("up_first") else (first, second)


def row_factor(observed: torch.Tensor, expected: torch.Tensor) -> torch.Tensor | None:
    """m (R,) with ``observed == m[:, None] * expected``, or None."""
    if observed.shape[0] == 0:
        return observed.new_zeros(0)
    column = expected.abs().argmax(1, keepdim=True)
    factor = observed.gather(1, column) / expected.gather(1, column)
    scale = observed.abs().amax(1, keepdim=True).clamp(min=1e-6)
    if not bool(((observed - factor * expected).abs() <= _TOLERANCE * scale).all()):
        return None
    factor = factor[:, 0]
    return torch.where((factor - 1).abs() < 1e-9, torch.ones_like(factor), factor)
