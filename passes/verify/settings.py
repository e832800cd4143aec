"""How a block is verified: at which sizes, in how many tokens, and past which limits of its own code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.utils import _pytree as pytree

from hexa_fx import operations as ops
from hexa_fx.capture import CapturedBlock, record_of
from hexa_fx.capture.probes import OVERFLOW_TOKENS, decides_between_numbers, overflow_sizes
from hexa_fx.config import HexaConfig
from hexa_fx.isolation.size import FEW_TOKENS
from hexa_fx.passes.detect.graph import is_float, literals
from hexa_fx.passes.memory.bounded import room

_has_limit = ops.of(
    "clamp clamp_min clamp_max minimum maximum max min hardtanh relu6 hardsigmoid hardswish threshold softplus softshrink "
    "hardshrink celu lt le gt ge where nan_to_num"
)
"""Operations that treat numbers differently on the two sides of a constant."""

MAGNITUDES = (1e3, 1e-3)
"""Factors on tokens that every block is tried with."""
_FURTHEST = 1e8

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2}


def tolerance_of(dtype: torch.dtype) -> float:
    """Largest accepted difference relative to the tensor's scale, where the comparison is in this dtype."""
    return _TOLERANCE.get(dtype, 1e-2)


@dataclass(frozen=True)
class VerifySettings:
    """How a block is verified.

    Args:
        sizes: (batch, sequence) of the inputs beside the example's own size. Flat inputs get batch times sequence rows.
        many_bytes: if the float64 copy is larger than this, gradients, which take the time, are compared in two cases instead
            of four. Outputs are compared in all cases.
        overflow_sizes: how many tokens in a row are sent to the same experts: more than the block's capacity, if it has one.
        overflow_last: whether to send them to the last experts too.
        factors: on the tokens, beyond the constants that the block compares with; see `hexa_fx.passes.verify.perturbed_runs`.
        analysis_bytes: memory that the comparison may hold beside the model; see `HexaConfig`.
        few: tokens that a block whose weights are raised in pieces is tried on at a time, to reach all experts in turns.
        room: times the tokens of the example that it may be tried on, if that is more.
        given: (args, kwargs) that the user gave, where the block is verified by an example of other tokens or another scale.
    """

    sizes: tuple[tuple[int, int], ...] = ((2, 5), (1, 7), (6, 1), (1, 1), (0, 4))
    overflow_sizes: tuple[int, ...] = (160,)
    overflow_last: bool = False
    factors: tuple[float, ...] = ()
    many_bytes: int = 256 << 20
    analysis_bytes: int = 2 << 30
    few: int = FEW_TOKENS
    room: int = 1
    given: tuple[Any, Any] | None = None


def unlike(given: tuple[Any, Any] | None, example: tuple[Any, Any]) -> tuple[Any, Any] | None:
    """What is ``given`` if the ``example`` is another one; None also where not all of its numbers are finite."""
    one, two = pytree.tree_leaves(given), pytree.tree_leaves(example)
    tensors = [(a, b) for a, b in zip(one, two) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)]
    if given is None or not all(bool(tensor.isfinite().all()) for tensor, _ in tensors):
        return None
    return None if all(a.shape == b.shape and torch.equal(a, b) for a, b in tensors) else given


def settings_of(captured: CapturedBlock, config: HexaConfig, given: tuple[Any, Any] | None = None) -> VerifySettings:
    """The settings for a block, by its recorded run, and for what is ``given`` if that is no run on it."""
    in_pieces = captured.whole_bytes is not None
    return VerifySettings(
        overflow_sizes=overflow_sizes(captured.graph, config.probe_tokens if in_pieces else OVERFLOW_TOKENS),
        overflow_last=decides_between_numbers(captured.graph),
        few=config.probe_tokens,
        room=room(captured, config),
        factors=factors_past_limits(captured.graph),
        analysis_bytes=config.analysis_bytes,
        given=given,
    )


def factors_past_limits(graph: torch.fx.Graph) -> tuple[float, ...]:
    """Factors on a block's inputs at which values lie beyond the constants that the recorded code compares them with."""
    found = set()
    for node in graph.nodes:
        if not _has_limit(node):
            continue
        floats = [record_of(operand).value for operand in node.all_input_nodes if is_float(operand)]
        largest = max((float(value.abs().nan_to_num(0, 0, 0).max()) for value in floats if value.numel()), default=0.0)
        found |= {abs(limit) / largest for limit in literals([node]) if largest and limit}
    far = {min(8 * ratio, _FURTHEST) for ratio in found if 8 * ratio > MAGNITUDES[0]}
    near = {max(ratio / 8, 1 / _FURTHEST) for ratio in found if ratio / 8 < MAGNITUDES[1]}
    return tuple(sorted([*sorted(far)[-1:], *sorted(near)[:1]]))
