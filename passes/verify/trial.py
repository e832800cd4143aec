"""A call and a module that are changed for one comparison, and put back after it.

Every `Change` does one thing to a call or to the module, and says what. Several of them make a `Perturbation`, which is one
comparison; `hexa_fx.passes.verify.perturbed_runs` makes it, and takes it apart if the two forwards differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hexa_fx.isolation.module_state import ModuleState
from hexa_fx.isolation.upcast_weight import stored


@dataclass
class Trial:
    """A call in the making: a module and what it is called with. `undo` puts the module back.

    Args:
        module: the module that is changed in place.
        leaves: the arguments without their structure, changed in place.
        names: of the leaves, for sentences.
        generator: of random numbers.
        experts: the weights of the experts.
        state: what the module keeps besides its parameters, once a forward has run.
        modes: submodules that were put into the other mode.
    """

    module: nn.Module
    leaves: list[Any]
    names: list[str]
    generator: torch.Generator
    experts: tuple[torch.Tensor, ...] = ()
    state: ModuleState | None = None
    modes: list[nn.Module] = field(default_factory=list)
    before: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def write(self, tensor: torch.Tensor, new: torch.Tensor) -> None:
        """Puts other numbers into (part of) a parameter or buffer until `undo`."""
        tensor = stored(tensor)
        self.before.append((tensor, tensor.detach().clone()))
        tensor.detach().copy_(new)

    @torch.no_grad()
    def undo(self) -> None:
        if self.state is not None:
            self.state.restore()
        while self.modes:
            module = self.modes.pop()
            module.training = not module.training
        while self.before:
            tensor, value = self.before.pop()
            tensor.detach().copy_(value)


@dataclass(frozen=True)
class Change:
    """One change of a trial, and how a sentence names it."""

    name: str
    make: Callable[[Trial], None]


@dataclass(frozen=True)
class Perturbation:
    """Changes that are tried together.

    Args:
        changes: in order.
        size: (batch, sequence) of the call; None: the example's shapes.
        finite: whether all of the original counts, be it an error, NaN or infinity; else only its finite results do.
        gradients: whether gradients are compared too.
        by_token: whether it counts only where the original still gives every other token what it gave before.
    """

    changes: tuple[Change, ...]
    size: tuple[int, int] | None = None
    finite: bool = True
    gradients: bool = False
    by_token: bool = False

    @property
    def name(self) -> str:
        return ", ".join(change.name for change in self.changes)
