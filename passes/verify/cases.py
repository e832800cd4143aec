"""What a verification compares, how it calls it, and what came of it, case by case."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from hexa_fx.isolation.module_tree import named_tensors
from hexa_fx.isolation.outcome import Outcome, largest_of
from hexa_fx.isolation.size import is_out_of_memory
from hexa_fx.isolation.torch_state import random_states
from hexa_fx.isolation.upcast_weight import UpcastWeight
from hexa_fx.runtime.guards import GuardMiss

SECOND = "a second call, which sees what the first one stored"
NO_ROUTER = "there is no router inside that could be overridden"


@dataclass(frozen=True)
class VerificationCase:
    """One comparison.

    Args:
        name: which inputs or routing.
        outcome: ``skipped`` if the original raises, or a guard keeps the rewritten block from running.
        forward_error, gradient_error: largest difference relative to the tensor's scale.
        detail: why it was skipped, or where the two differ.
        none_became_zero: parameters whose gradient is None in the original and zero in the rewritten block.
        raised: whether it was skipped because the original raises, or differs because the rewritten block does.
        changed: what a guard reads that the code itself has changed, if it was skipped for that.
    """

    name: str
    outcome: Literal["equal", "different", "skipped"]
    forward_error: float = 0.0
    gradient_error: float = 0.0
    detail: str = ""
    none_became_zero: tuple[str, ...] = ()
    raised: bool = False
    changed: str = ""


@dataclass(frozen=True)
class Subject:
    """What is compared: the block itself, or a copy of it in ``dtype`` of one in ``own``.

    As it is, casts that its code asks for are made.
    """

    module: nn.Module
    dtype: torch.dtype
    own: torch.dtype
    as_it_is: bool = False


def up_to_different(cases: Iterator[VerificationCase]) -> tuple[VerificationCase, ...]:
    """The cases up to the first that differs, which is reason enough, or until the code itself changed what it reads in some."""
    found: list[VerificationCase] = []
    for case in cases:
        found.append(case)
        if case.outcome == "different" or (len(found) == _ENOUGH and changes_itself(found)):
            break
    return tuple(found)


_ENOUGH = 3


def changes_itself(cases: Sequence[VerificationCase]) -> bool:
    """Whether nothing could be compared since every call of the original changed what the rewritten block would read."""
    return bool(cases) and all(case.outcome == "skipped" and case.changed for case in cases)


def size(batch: int, sequence: int) -> str:
    """The name of a case at that size."""
    return f"batch {batch}, sequence {sequence}"


def tried(run: Callable[[], Outcome]) -> Outcome | Exception:
    """What ``run`` gives, or the error that it raises. Where memory is full, the error goes on to the caller."""
    try:
        return run()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return error


class LateMiss(RuntimeError):
    """A condition left a call to the original after random numbers were drawn, so that the original would draw others."""


def missing_early(call: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``call``, and does not let it miss a guard once it has drawn random numbers of its own."""

    def run(*args: Any, **kwargs: Any) -> Any:
        before = random_states()
        try:
            return call(*args, **kwargs)
        except GuardMiss as miss:
            if miss.called or all(map(torch.equal, before, random_states())):
                raise
            raise LateMiss(f"{miss}, which it asks after it has drawn random numbers") from None

    return run


def repeated(call: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """A function that calls ``call`` repeatedly and returns the last result."""

    def run(*args: Any, **kwargs: Any) -> Any:
        for _ in range(calls - 1):
            call(*args, **kwargs)
        return call(*args, **kwargs)

    return run


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
