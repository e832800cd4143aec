"""Recomputes the values of a 16-bit run without rounding, for experiments that ask which numbers are equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.fx
from torch.utils import _pytree as pytree

from hexa_fx.capture.records import record_of
from hexa_fx.isolation.outcome import largest
from hexa_fx.isolation.random_state import random_state_kept
from hexa_fx.isolation.upcast_weight import UpcastWeight

_NEAR = 0.05
"""How far rounding to 16 bits may carry a value, relative to the tensor's scale. What lies further apart was decided otherwise."""


def is_coarse(nodes: Iterable[torch.fx.Node]) -> bool:
    """Whether a 16-bit floating-point tensor was computed. Those of 32 bits are exact enough."""
    return any(
        leaf.is_floating_point() and leaf.element_size() < 4
        for node in nodes
        if node.op.startswith("call")
        for leaf in pytree.tree_leaves(record_of(node).value)
        if isinstance(leaf, torch.Tensor)
    )


def sharpened(
    nodes: Iterable[torch.fx.Node],
    execute: Callable[[torch.fx.Node, dict[torch.fx.Node, Any]], Any],
    upcast: Callable[[torch.fx.Node], Any],
) -> dict[torch.fx.Node, Any]:
    """Every computed value, recomputed in float64 from the parameters and inputs.

    Values that come out differently keep what was recorded: choices that hinge on a rounding (top-k), and random numbers.

    Args:
        nodes: of the recorded graph, in order.
        execute: one node's call in float64 on the values so far.
        upcast: its recorded value in float64.
    """
    values: dict[torch.fx.Node, Any] = {}
    found: dict[torch.fx.Node, Any] = {}
    with torch.no_grad(), random_state_kept():
        for node in nodes:
            if not node.op.startswith("call"):
                continue
            recorded, values[node] = upcast(node), execute(node, values)
            if not _alike(values[node], recorded):
                values[node] = with_tensors(_copied, recorded)
            found[node] = with_tensors(_copied, values[node])  # before later writes
    return found


def with_tensors(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """A recorded value with ``change`` of its tensors in their place. Nearly every value is a tensor, at which pytree is slow."""
    return change(value) if isinstance(value, torch.Tensor) else pytree.tree_map_only(torch.Tensor, change, value)


def _copied(value: torch.Tensor) -> torch.Tensor:
    """A copy; an upcast weight is only read, and as large as the block."""
    return value if isinstance(value, UpcastWeight) else value.clone()


def _alike(value: Any, recorded: Any) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(recorded, torch.Tensor):
        return _is_near(value, recorded)
    ours, theirs = pytree.tree_leaves(value), pytree.tree_leaves(recorded)
    return len(ours) == len(theirs) and all(map(_is_near, ours, theirs))


def _is_near(value: Any, recorded: Any) -> bool:
    if isinstance(recorded, (int, float, str)):
        return bool(type(value) is type(recorded) and value == recorded)
    if not isinstance(value, torch.Tensor) or not isinstance(recorded, torch.Tensor):
        return type(value) is type(recorded)  # an object of the user's; its tensors are compared where they are read
    if value.shape != recorded.shape or value.dtype != recorded.dtype:
        return False
    if isinstance(value, UpcastWeight) and isinstance(recorded, UpcastWeight):
        return value.lies_with(recorded)
    if not value.is_floating_point():
        return torch.equal(value, recorded)
    scale = largest(recorded)
    if math.isfinite(scale):
        return largest(value - recorded) <= _NEAR * scale
    finite = recorded[recorded.isfinite()]
    scale = largest(finite)
    return torch.allclose(value, recorded, rtol=0.0, atol=_NEAR * scale, equal_nan=True)
