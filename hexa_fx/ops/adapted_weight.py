"""A weight with a low-rank addition, as an operand: operators that know it use the factors, everything else gets the sum."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)


@cache
def say_once(reason: str) -> None:
    """Logs why a weight and its adapter are added up in every call."""
    log.warning("adapters on experts are added to their weights in every call: %s", reason)


@dataclass(frozen=True, eq=False)
class AdaptedWeight:
    """``weight + scale * left @ right``, which is formed only where something asks for it that does not know this class.

    Args:
        weight: (E, P, Q), in either layout.
        left, right: (E, P, r) and (E, r, Q), in any floating dtype.
        scale: what their product is multiplied by.
    """

    weight: Tensor
    left: Tensor
    right: Tensor
    scale: float = 1.0

    def dense(self) -> Tensor:
        """The sum, in the weight's dtype."""
        say_once("the rewritten block does more with the weight than multiply by it")
        with torch.autocast(self.weight.device.type, enabled=False):
            left, right = (factor.to(self.weight.dtype) for factor in (self.left, self.right))
            return torch.baddbmm(self.weight, left, right, alpha=self.scale)

    def factors(self, layout: str) -> tuple[Tensor, Tensor]:
        """A (E, r, K) and C (E, N, r) of `hexa::moe_ffn_sources`."""
        if layout == "nk":
            return self.right, self.left
        return self.left.transpose(1, 2), self.right.transpose(1, 2)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*map(_formed, args), **{name: _formed(value) for name, value in (kwargs or {}).items()})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in type(self).__dataclass_fields__:  # of one that is being made
            raise AttributeError(name)
        return getattr(self.dense(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.dense()[index]


def _formed(value: Any) -> Any:
    if isinstance(value, AdaptedWeight):
        return value.dense()
    return type(value)(map(_formed, value)) if type(value) in (list, tuple) else value
