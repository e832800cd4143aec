"""What a recorded training step depends on beside the values in its tensors: a replay repeats it, so it has to be the same."""

from __future__ import annotations

import random
import sys
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


_Kept = tuple[dict[str, Any], str, Any]
"""A state, a name in it, and what was kept under it."""


@dataclass
class Optimizers:
    """The optimizers that stepped inside the recording, with settings that it holds as numbers, and with what is on the host."""

    seen: list[tuple[Optimizer, list[dict[str, Any]], list[_Kept]]] = field(default_factory=list)

    @contextmanager
    def noted(self) -> Iterator[None]:
        handle = register_optimizer_step_pre_hook(
            lambda optimizer, *_: self.seen.append((optimizer, _settings(optimizer), _kept_on_host(optimizer)))
        )
        try:
            yield
        finally:
            handle.remove()

    def change(self) -> str:
        """What differs from the recording, as a sentence; empty if nothing does."""
        for optimizer, before, _ in self.seen:
            for old, new in zip(before, _settings(optimizer)):
                for key in new:
                    if old.get(key) != new[key]:
                        name = type(optimizer).__name__
                        return (
                            f"{key} of {name} was {old.get(key)} and is {new[key]}: give it as a tensor on the device, or call "
                            "the optimizer outside of the step"
                        )
        return ""

    def counted(self) -> str:
        """What a step changed on the host, as a sentence; empty if nothing."""
        for optimizer, _, before in self.seen:
            for state, key, value in before:
                if not _same(state.get(key), value):
                    return (
                        f"{type(optimizer).__name__} changes {key!r} of its state on the host, which a replay would not: call it "
                        "outside of the step"
                    )
        return ""

    def put_back(self) -> None:
        """Makes what they keep on the host what it was before the recording."""
        for _, _, before in reversed(self.seen):
            for state, key, value in before:
                state[key] = value


def _kept_on_host(optimizer: Optimizer) -> list[_Kept]:
    """Numbers, and tensors that are not where their parameter is, with the state that they are in."""
    kept = ((p, state, key, value) for p, state in optimizer.state.items() for key, value in state.items())
    return [
        (state, key, value.clone() if isinstance(value, Tensor) else value)
        for p, state, key, value in kept
        if isinstance(value, int | float) or (isinstance(value, Tensor) and value.device != p.device)
    ]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    def fixed(value: Any) -> Any:
        return ("tensor at", value.data_ptr()) if isinstance(value, Tensor) else value

    return [{key: fixed(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


class HostState:
    """What a step changes on the host and a replay does not: generators that Python code draws from, and what optimizers count."""

    def __init__(self) -> None:
        self._torch, self._python, self._numpy = torch.get_rng_state(), random.getstate(), _of_numpy()
        self.optimizers = Optimizers()

    def change(self) -> str:
        """Why replays would not be steps, as a sentence; empty if they are."""
        drawn = not torch.equal(self._torch, torch.get_rng_state()) or self._python != random.getstate()
        if drawn or _spelled(self._numpy) != _spelled(_of_numpy()):
            return "the step draws random numbers on the host, which a replay would repeat: draw them on the device"
        return self.optimizers.counted() or self.optimizers.change()

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        if self._numpy:
            sys.modules["numpy"].random.set_state(self._numpy)
        self.optimizers.put_back()


def _of_numpy() -> tuple[Any, ...]:
    """The state of numpy's generator; nothing where it is not loaded."""
    return sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else ()


def _spelled(state: tuple[Any, ...]) -> list[Any]:
    return [part if isinstance(part, str | int | float) else part.tolist() for part in state]
