"""Runs a block's original beside its rewritten forward in one call of N, and says so loudly if they differ.

What the conditions of a rewritten block do not hold (docs/contract.md) would show here, after at most N calls.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hexa_fx.errors import DiffersInUse
from hexa_fx.isolation.outcome import furthest
from hexa_fx.isolation.torch_state import autocast_uncached, random_state_kept
from hexa_fx.runtime import results
from hexa_fx.runtime.call_kinds import why_not_analysed

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""The largest difference, relative to the largest number of a result, by dtype; others have to be equal."""
_LEFT = "a check of one call in {} found that the rewritten block differs from the original: {}"


class Forward(Protocol):
    """What a `hexa_fx.runtime.forward.HexaForward` has."""

    path: str
    called: list[Callable[[], None]]
    specialisations: Any

    @property
    def module(self) -> nn.Module:
        """The user's module."""

    def run_original(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the forward that was there before."""


class SampledCheck:
    """Checks one call in ``every`` of a rewritten block, the first one among them. Where results differ, the block is left to its
    original from then on, with a warning; a ``strict`` check raises `DiffersInUse`."""

    def __init__(self, every: int, strict: bool = False) -> None:
        self.every, self.strict, self._calls = every, strict, 0

    def expected(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """What the original gives in this call; None if the call is not checked, or the original raises an error.

        It leaves nothing: not in buffers, attributes, arguments, random numbers or gradients.
        """
        self._calls += 1
        module = forward.module
        if (self._calls - 1) % self.every or forward.called or why_not_analysed():
            return None
        stored = [place for each in forward.specialisations for place in each.stored]
        state = results.state_of(module, stored, [name for each in forward.specialisations for name in each.changed])
        copied_args, copied_kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
        try:
            with torch.no_grad(), random_state_kept(), autocast_uncached():
                found = pytree.tree_leaves(forward.run_original(copied_args, copied_kwargs))
                return [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in found]
        except Exception as error:  # which the rewritten block need not raise
            logger.debug("%s raises in a check: %s", forward.path, error)
            return None
        finally:
            state.restore()

    def differs(self, result: Any, expected: list[Any]) -> str:
        """How a result differs from what the original gave, in words; empty if it does not. Strict checks raise `DiffersInUse`."""
        given = pytree.tree_leaves(result)
        reason = f"{len(given)} results, not {len(expected)}" if len(given) != len(expected) else ""
        reason = reason or next((said for pair in zip(given, expected) if (said := _difference(*pair))), "")
        if reason and self.strict:
            raise DiffersInUse(_LEFT.format(self.every, reason))
        return _LEFT.format(self.every, reason) if reason else ""


@torch.no_grad()
def _difference(one: Any, other: Any) -> str:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return "" if type(one) is type(other) and one == other else f"{one!r}, not {other!r}"
    off, _, said = furthest({"a result": other}, {"a result": one})
    return said or (f"off by {off:.1e} of its scale" if off > TOLERANCE.get(one.dtype, 0.0) else "")
