"""Which experts the cases of a verification have reached, so that one unlike the others cannot hide among those without tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from hexa_fx.isolation.module_tree import named_tensors
from hexa_fx.isolation.outcome import largest_of
from hexa_fx.isolation.upcast_weight import UpcastWeight


class UntriedExperts:
    """The experts' weights that no gradient of the original came to so far.

    Weights without gradients of their own are left out: frozen ones, and those of large blocks, which have products instead.

    Args:
        module: the block.
        weights: of its experts, listed or stacked.
    """

    def __init__(self, module: nn.Module, weights: Sequence[torch.Tensor]) -> None:
        names = {id(parameter): name for name, parameter in named_tensors(module, "_parameters").items()}
        known = [w for w in weights if id(w) in names and w.requires_grad and not isinstance(w, UpcastWeight)]
        self._listed = {names[id(w)] for w in known if w.dim() <= 2}
        self._left = {names[id(w)]: torch.ones(len(w), dtype=torch.bool, device="cpu") for w in known if w.dim() > 2}

    def see(self, gradients: Mapping[str, torch.Tensor | None]) -> None:
        """Leaves out what has a gradient that is not zero."""
        listed = {name: gradient for name in self._listed if (gradient := gradients.get(name)) is not None}
        sizes = largest_of([gradient.detach() for gradient in listed.values()])
        self._listed -= {name for name, size in zip(listed, sizes) if size}  # NaN is not zero
        for name, left in self._left.items():
            gradient = gradients.get(name)
            if gradient is not None and bool(left.any()):
                left &= (gradient.reshape(len(left), -1) == 0).all(1).cpu()

    def __bool__(self) -> bool:
        return bool(self._listed) or any(bool(left.any()) for left in self._left.values())
