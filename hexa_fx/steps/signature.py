"""What a recorded training step depends on beside the values in its tensors: a replay repeats it, so it has to be the same."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

Signature = dict[str, Any]
"""What a call depends on, by what to call it in a sentence."""


@dataclass(frozen=True)
class Call:
    """One call of a step.

    Args:
        tensors: those among its arguments.
        signature: everything else about the call.
    """

    leaves: tuple[Any, ...]
    spec: Any
    signature: Signature

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], model: nn.Module) -> Call:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        signature: Signature = {f"argument {place}": _kind(leaf) for place, leaf in enumerate(leaves)}
        signature["the arguments' structure"] = spec
        signature["autocast"] = tuple(
            (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cuda", "cpu")
        )
        signature["whether gradients are recorded"] = torch.is_grad_enabled()
        signature["which modules train"] = tuple(module.training for module in model.modules())
        held = list(model.parameters())
        signature["which parameters have a gradient"] = tuple(p.grad is not None for p in held)
        signature["where the parameters lie"] = tuple((_address(p), p.requires_grad) for p in held)
        return cls(tuple(leaves), spec, signature)

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def with_tensors(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's arguments with other tensors in the places of its own."""
        others = iter(tensors)
        leaves = [next(others) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device, leaf.stride(), leaf.requires_grad
    return leaf


def _address(parameter: Tensor) -> int:
    return getattr(parameter, "_local_tensor", parameter).data_ptr()


def difference(one: Signature, other: Signature) -> str:
    """The first thing that differs, as part of a sentence; empty if nothing does."""
    for label in dict.fromkeys([*other, *one]):
        if label not in one or label not in other:
            return "the number of arguments changed"
        if one[label] != other[label]:
            shown = label.startswith("argument") or label == "autocast"
            return f"{label} was {one[label]} and is {other[label]}" if shown else f"{label} changed"
    return ""


# --- what Python code reads and a graph does not -----------------------------------------------------------------------


@dataclass
class Optimizers:
    """The optimizers that stepped inside the recording, with the settings that it holds as numbers."""

    seen: list[tuple[Optimizer, list[dict[str, Any]]]] = field(default_factory=list)

    @contextmanager
    def noted(self) -> Iterator[None]:
        handle = register_optimizer_step_pre_hook(
            lambda optimizer, *_: self.seen.append((optimizer, _settings(optimizer)))
        )
        try:
            yield
        finally:
            handle.remove()

    def change(self) -> str:
        """What differs from the recording, as a sentence; empty if nothing does."""
        for optimizer, before in self.seen:
            for old, new in zip(before, _settings(optimizer)):
                for key in new:
                    if old.get(key) != new[key]:
                        name = type(optimizer).__name__
                        return (
                            f"{key} of {name} was {old.get(key)} and is {new[key]}: give it as a tensor on the device, or call "
                            "the optimizer outside of the step"
                        )
        return ""


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    def fixed(value: Any) -> Any:
        return ("tensor at", value.data_ptr()) if isinstance(value, Tensor) else value

    return [{key: fixed(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


class HostRandom:
    """The states of the generators that Python code draws from; numpy's too, where it is loaded."""

    def __init__(self) -> None:
        self._torch, self._python = torch.get_rng_state(), random.getstate()

    def drawn(self) -> bool:
        """Whether somebody has drawn since."""
        return not torch.equal(self._torch, torch.get_rng_state()) or self._python != random.getstate()

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
