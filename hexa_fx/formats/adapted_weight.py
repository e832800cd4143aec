"""A weight with a low-rank addition, as an operand."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from hexa_fx.formats.formed import Formed

log = logging.getLogger(__name__)


@cache
def say_once(reason: str) -> None:
    """Logs why a weight and its adapter are added up in every call."""
    log.warning("adapters on experts are added to their weights in every call: %s", reason)


@dataclass(frozen=True, eq=False)
class AdaptedWeight(Formed):
    """``weight + scale * left @ right``, which is formed only where something asks for it that does not know this class.

    Args:
        weight: (E, P, Q), in either layout.
        left, right: (E, P, r) and (E, r, Q), in any floating dtype.
        scale: what their product is multiplied by.
        row_scale: (E, P) of numbers that the rows of ``weight`` are multiplied by before; None: ones.
    """

    weight: Tensor
    left: Tensor
    right: Tensor
    scale: float = 1.0
    row_scale: Tensor | None = None

    def dense(self) -> Tensor:
        """The sum, in the weight's dtype."""
        say_once("the rewritten block does more with the weight than multiply by it")
        with torch.autocast(self.weight.device.type, enabled=False):
            left, right = (factor.to(self.weight.dtype) for factor in (self.left, self.right))
            scaled = (
                self.weight if self.row_scale is None else self.weight * self.row_scale.to(self.weight.dtype)[..., None]
            )
            return torch.baddbmm(scaled, left, right, alpha=self.scale)

    def factors(self, layout: str) -> tuple[Tensor, Tensor]:
        """A (E, r, K) and C (E, N, r) of `hexa::moe_ffn_sources`."""
        if layout == "nk":
            return self.right, self.left
        return self.left.transpose(1, 2), self.right.transpose(1, 2)
