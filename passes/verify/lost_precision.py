"""Whether one of two forwards rounds to fewer bits on the way than the other, which a comparison in float64 cannot see."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from hexa_fx.isolation.outcome import Outcome, difference
from hexa_fx.torch_private import _is_any_autocast_enabled

FEWER_BITS = "on the way the block rounds to fewer bits than its inputs have"
_CLOSE = 2e-5
"""Relative to a tensor's scale: what a cast to 16 bits loses is more, and what 32 bits lose is less, but where numbers cancel."""

_UNIT = 2.0**-24
_MORE = 32.0
"""How much further one of two that multiply in 32 bits may be from exact results, by the order in which it adds up."""


def lost_precision(
    original: Outcome, other: Outcome, exact: Callable[[], Outcome | None], parameters: Iterable[torch.Tensor]
) -> str:
    """A sentence if one of two forwards in 32 bits gives numbers as if it alone rounded to 16 on the way; else empty.

    Where numbers cancel, both are far from each other and from exact results, so these are asked for.

    Args:
        original, other: what the two gave on the same inputs, in their own precision.
        exact: gives the original's results in float64, or None if they cannot be had. Called if the two differ.
        parameters: of the block.
    """
    numbers = (*parameters, *original.values.values(), *other.values.values())
    coarse = any(number.is_floating_point() and number.itemsize < 4 for number in numbers)
    if coarse or _is_any_autocast_enabled() or torch.get_float32_matmul_precision() != "highest":
        return ""
    apart = _apart(original, other)
    wanted = exact() if apart[0] > _CLOSE else None
    if wanted is None:
        return ""
    wanted = replace(
        wanted, values={name: _like(value, original.values.get(name)) for name, value in wanted.values.items()}
    )
    near, far = sorted(_apart(wanted, one)[0] for one in (original, other))
    if far <= _MORE * max(near, _UNIT):
        return ""
    return f"{apart[1]} is off by {apart[0]:.1e} of its scale: {FEWER_BITS}"


def _apart(one: Outcome, two: Outcome) -> tuple[float, str]:
    """How far the values of two outcomes are apart, relative to their scale, and the one that is furthest."""
    found = difference(*(replace(each, facts={}, gradients={}) for each in (one, two)))
    return (0.0, "") if found.reason else (found.forward, found.worst_value)


def _like(value: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
    return value if other is None else value.to(other.dtype)
