"""Everything that one call of a module's forward does that somebody could observe, and how two calls differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

SCALE_FLOOR = 1e-6
"""A tensor is compared relative to its own scale, but to no less than this part of the largest scale among its like:
gradients that are zero but for rounding (a router's, when weights are normalised over one expert) stay comparable."""

_PLAIN = (torch.Tensor, int, float, str)


@dataclass(frozen=True)
class Outcome:
    """What a call did. ``values`` and ``gradients`` are named tensors, ``facts`` everything that must be equal."""

    values: Mapping[str, torch.Tensor]
    gradients: Mapping[str, torch.Tensor | None]
    facts: Mapping[str, Any]
    backward_error: str = ""


@dataclass(frozen=True)
class Difference:
    """How far two outcomes lie apart, relative to each tensor's scale. ``reason`` is set if they cannot be compared."""

    forward: float = 0.0
    gradient: float = 0.0
    worst: str = ""
    reason: str = ""
    none_became_zero: tuple[str, ...] = field(default=(), compare=False)


class ModuleState:
    """Buffers and plain attributes of a module tree, to start every call from the same state.

    Parameters are left alone: a forward that changes them shows in `read`.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._buffers = [(child, dict(child._buffers)) for child in module.modules()]
        self._saved = [
            {name: None if buffer is None else buffer.detach().clone() for name, buffer in buffers.items()}
            for _, buffers in self._buffers
        ]
        self._attributes = [(child, _plain_attributes(child)) for child in module.modules()]
        self._training = [(child, child.training) for child in module.modules()]

    def restore(self) -> None:
        """Puts the saved values back, into the same buffer objects."""
        for (child, buffers), saved in zip(self._buffers, self._saved):
            child._buffers.update(buffers)
            for name, buffer in buffers.items():
                value = saved[name]
                if buffer is not None and value is not None:
                    buffer.detach().copy_(value)
        for child, attributes in self._attributes:
            for name in set(_plain_attributes(child)) - set(attributes):
                del child.__dict__[name]
            child.__dict__.update({name: _copy(value) for name, value in attributes.items()})

    def restore_mode(self) -> None:
        for child, training in self._training:
            child.training = training

    def read(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Tensors and other plain values that the module tree holds now, by dotted name."""
        tensors = {f"buffer {name}": buffer.detach().clone() for name, buffer in self._module.named_buffers()}
        facts: dict[str, Any] = {}
        for path, child in self._module.named_modules():
            for name, value in _plain_attributes(child).items():
                key = f"attribute {path}.{name}"
                if isinstance(value, torch.Tensor):
                    tensors[key] = value.detach().clone()
                else:
                    facts[key] = value
        facts["parameter versions"] = [parameter._version for parameter in self._module.parameters()]
        return tensors, facts


def observe(
    call: Callable[..., Any], module: nn.Module, state: ModuleState, inputs: tuple[Any, Any], seed: int
) -> Outcome:
    """Runs ``call(*args, **kwargs)`` and its backward from a given random state and module state.

    Args:
        call: the forward to observe.
        module: whose parameters' gradients are taken; ``.grad`` is not touched.
        state: restored before the call, read after it.
        inputs: (args, kwargs); floating tensors among them get gradients.
        seed: of the random numbers.

    Raises:
        whatever ``call`` raises. An error of backward alone is recorded in the outcome.
    """
    leaves, spec = pytree.tree_flatten(inputs)
    fresh = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    roots = {f"input {i}": leaf.requires_grad_() for i, leaf in enumerate(fresh) if _differentiable(leaf)}
    # Clones, so that a forward may write to its inputs as it may inside a model.
    given = [leaf.clone() if _differentiable(leaf) else leaf for leaf in fresh]
    args, kwargs = pytree.tree_unflatten(given, spec)
    versions = [parameter._version for parameter in module.parameters()]
    devices = sorted({leaf.device.index or 0 for leaf in module.parameters() if leaf.is_cuda})
    state.restore()
    with torch.random.fork_rng(devices), torch.enable_grad():
        torch.manual_seed(seed)
        result = call(*args, **kwargs)
        streams = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]
        gradients, backward_error = _gradients(result, module, roots, seed)
    outputs, structure = pytree.tree_flatten(result)
    values = {f"output {i}": leaf.detach() for i, leaf in enumerate(outputs) if isinstance(leaf, torch.Tensor)}
    values.update({f"input {i}": x.detach() for i, x in enumerate(given) if isinstance(x, torch.Tensor)})
    tensors, facts = state.read()
    facts["parameter versions"] = [now - then for now, then in zip(facts["parameter versions"], versions)]
    facts["structure of the outputs"] = str(structure)
    facts["plain outputs"] = [leaf for leaf in outputs if not isinstance(leaf, torch.Tensor)]
    facts["random numbers drawn"] = tuple(stream.numpy().tobytes() for stream in streams)
    return Outcome({**values, **tensors}, gradients, facts, backward_error)


def difference(original: Outcome, other: Outcome) -> Difference:
    """Compares two outcomes; NaN equals NaN and nothing else, None gradients count as zero."""
    for name in sorted({*original.facts, *other.facts}):
        if original.facts.get(name) != other.facts.get(name):
            return Difference(reason=f"{name} differ from the original's")
    if set(original.values) != set(other.values):
        return Difference(reason=f"only one of the two has {sorted(set(original.values) ^ set(other.values))}")
    if other.backward_error and not original.backward_error:
        return Difference(reason=f"backward raises {other.backward_error}")
    forward, worst_value, reason = _furthest(original.values, other.values)
    if reason:
        return Difference(reason=reason)
    if original.backward_error:
        return Difference(forward, 0.0, worst_value)
    both = {name for name in original.gradients if (original.gradients[name], other.gradients[name]) != (None, None)}
    first, second = (_or_zero(outcome.gradients, both, like=one) for outcome, one in _each_with_other(original, other))
    gradient, worst_gradient, reason = _furthest(first, second)
    if reason:
        return Difference(forward, reason=f"gradient of {reason}")
    zeroed = tuple(name for name in sorted(both) if original.gradients[name] is None)
    worst = worst_value if forward >= gradient else f"gradient of {worst_gradient}"
    return Difference(forward, gradient, worst, none_became_zero=zeroed)


def _gradients(
    result: Any, module: nn.Module, roots: Mapping[str, torch.Tensor], seed: int
) -> tuple[dict[str, torch.Tensor | None], str]:
    wanted = {**roots, **{name: p for name, p in module.named_parameters() if p.requires_grad}}
    outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not outputs or not wanted:
        return dict.fromkeys(wanted), ""
    generator = torch.Generator().manual_seed(seed)
    cotangents = [
        torch.randn(leaf.shape, dtype=torch.float64, generator=generator).to(leaf.device, leaf.dtype)
        for leaf in outputs
    ]
    try:
        grads = torch.autograd.grad(outputs, list(wanted.values()), cotangents, allow_unused=True)
    except RuntimeError as error:
        return dict.fromkeys(wanted), f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return dict(zip(wanted, grads)), ""


def _furthest(
    first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]
) -> tuple[float, str, str]:
    """The largest relative difference, whose it is, and a sentence if two tensors cannot be compared."""
    largest = max((_scale(tensor) for tensor in first.values()), default=0.0)
    furthest, worst = 0.0, ""
    for name, one in first.items():
        two = second[name]
        if one.shape != two.shape or one.dtype != two.dtype:
            return 0.0, name, f"{name} is {two.dtype} {tuple(two.shape)}, not {one.dtype} {tuple(one.shape)}"
        if not torch.equal(torch.where(one.isfinite(), 0, one).nan_to_num(7, 8, 9), _odd(two)):
            return 0.0, name, f"{name} has NaN or inf in other places"
        scale = max(_scale(one), SCALE_FLOOR * largest)
        distance = _scale(torch.where(one.isfinite(), one, 0) - torch.where(two.isfinite(), two, 0))
        error = distance if scale == 0 else distance / scale
        if error > furthest:
            furthest, worst = error, name
    return furthest, worst, ""


def _odd(tensor: torch.Tensor) -> torch.Tensor:
    """Zero where finite, a code each for NaN, inf and -inf elsewhere."""
    return torch.where(tensor.isfinite(), 0, tensor).nan_to_num(7, 8, 9)


def _scale(tensor: torch.Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _each_with_other(one: Outcome, two: Outcome) -> Iterable[tuple[Outcome, Outcome]]:
    return (one, two), (two, one)


def _or_zero(
    gradients: Mapping[str, torch.Tensor | None], names: Iterable[str], like: Outcome
) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name in sorted(names):
        gradient, other = gradients[name], like.gradients[name]
        found[name] = torch.zeros_like(other) if gradient is None and other is not None else gradient  # type: ignore
    return found


def _differentiable(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Tensors, numbers and texts that the module keeps beside its buffers, such as a last auxiliary loss."""
    return {
        name: value
        for name, value in module.__dict__.items()
        if isinstance(value, _PLAIN) and name not in ("training", "call_super_init", "dump_patches")
    }


def _copy(value: Any) -> Any:
    return value


def named_sequence(values: Sequence[Any], what: str) -> dict[str, Any]:
    return {f"{what} {number}": value for number, value in enumerate(values)}
