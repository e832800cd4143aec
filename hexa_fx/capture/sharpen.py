"""Recomputes the values of a 16-bit run without rounding, for experiments that ask which numbers are equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.fx
from torch.utils import _pytree as pytree

from hexa_fx.capture.records import record_of
from hexa_fx.isolation.outcome import largest, largest_of
from hexa_fx.isolation.random_state import random_state_kept
from hexa_fx.isolation.size import batches
from hexa_fx.isolation.upcast_weight import UpcastWeight
from hexa_fx.torch_private import _foreach_sub

_NEAR = 0.05
"""How far rounding to 16 bits may carry a value, relative to the tensor's scale. What lies further apart was decided otherwise."""

_TOGETHER = 1 << 20
"""Elements that are looked at together."""


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
    nodes: Sequence[torch.fx.Node],
    execute: Callable[[torch.fx.Node, dict[torch.fx.Node, Any]], Any],
    upcast: Callable[[torch.fx.Node], Any],
    written: Collection[int | None],
) -> dict[torch.fx.Node, Any]:
    """Every computed value, recomputed in float64 from the parameters and inputs.

    Values that come out differently keep what was recorded: choices that hinge on a rounding (top-k), and random numbers. Among
    floating-point ones they are looked for in many at a time, since each look waits for a device; if one is found, everything is
    computed anew and each value looked at before it is read.

    Args:
        nodes: of the recorded graph, in order.
        execute: one node's call in float64 on the values so far.
        upcast: its recorded value in float64.
        written: the memory that the run writes to.
    """
    run = partial(_Run, nodes, execute, upcast, frozenset(written))
    with torch.no_grad():
        for together in (True, False):
            with random_state_kept():
                found = run(together).values()
            if found is not None:
                break
    assert found is not None
    return found


class _Run:
    """One computation of all values; ``together``: differences are looked for in many at a time."""

    def __init__(
        self,
        nodes: Sequence[torch.fx.Node],
        execute: Callable[[torch.fx.Node, dict[torch.fx.Node, Any]], Any],
        upcast: Callable[[torch.fx.Node], Any],
        written: frozenset[int | None],
        together: bool,
    ) -> None:
        self._nodes, self._execute, self._upcast = nodes, execute, upcast
        self._written, self._together = written, together
        self._unseen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def values(self) -> dict[torch.fx.Node, Any] | None:
        """By node; None if one of those that were looked at together differs."""
        values: dict[torch.fx.Node, Any] = {}
        found: dict[torch.fx.Node, Any] = {}
        for node in self._nodes:
            if not node.op.startswith("call"):
                continue
            recorded, kept = self._upcast(node), record_of(node).storage not in self._written
            if kept and not _is_float(recorded):  # as it was recorded, whether it comes out so or not
                values[node] = found[node] = recorded
            else:
                values[node] = self._execute(node, values)
                found[node] = values[node] if kept else with_tensors(_copied, values[node])  # before later writes
                if not self._is_alike(found[node], recorded):
                    values[node] = with_tensors(_copied, recorded)
                    found[node] = values[node] if kept else with_tensors(_copied, recorded)
        return found if self._are_near(self._unseen) else None

    def _is_alike(self, value: Any, recorded: Any) -> bool:
        """Whether they are near each other, as far as that is looked at now."""
        if not (self._together and _can_wait(value, recorded)):
            return _alike(value, recorded)
        self._unseen.append((value, recorded))
        return True

    @staticmethod
    def _are_near(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> bool:
        for batch in batches(pairs, lambda pair: pair[0].numel(), _TOGETHER):
            values, recorded = map(list, zip(*batch))
            scales, distances = largest_of(recorded), largest_of(_foreach_sub(values, recorded))
            for pair, scale, distance in zip(batch, scales, distances):
                if not (distance <= _NEAR * scale if math.isfinite(scale) else _is_near(*pair)):
                    return False
        return True


def _can_wait(value: Any, recorded: Any) -> bool:
    """Whether both are tensors of floating-point numbers of one kind, and no weights."""
    if not isinstance(value, torch.Tensor) or not isinstance(recorded, torch.Tensor) or isinstance(value, UpcastWeight):
        return False
    same = value.shape == recorded.shape and value.dtype == recorded.dtype and value.device == recorded.device
    return same and value.is_floating_point() and not isinstance(recorded, UpcastWeight)


def _is_float(value: Any) -> bool:
    """Whether there are tensors of floating-point numbers in it, or it is an object that may hold any."""
    leaves = [value] if isinstance(value, torch.Tensor) else pytree.tree_leaves(value)
    return not all(
        isinstance(leaf, int | str | None) or (isinstance(leaf, torch.Tensor) and not leaf.is_floating_point())
        for leaf in leaves
    )


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
