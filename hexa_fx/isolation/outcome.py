"""Everything observable that one call of a module's forward does, and how two calls differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hexa_fx import registry
from hexa_fx.errors import kind_and_line
from hexa_fx.isolation.lookup import held_in
from hexa_fx.isolation.module_state import ModuleState
from hexa_fx.isolation.size import InPieces, batches, is_out_of_memory
from hexa_fx.isolation.torch_state import SEED, autocast_off, random_state_kept, random_states
from hexa_fx.isolation.trial_modes import Bounded, WeightSlices
from hexa_fx.torch_private import DisableTorchFunction, _foreach_sub

SCALE_FLOOR = 1e-6
"""A tensor is compared relative to its own scale, but to no less than this part of the largest scale among its like:
gradients that are zero but for rounding (a router's, when weights are normalised over one expert) stay comparable."""

_PIECE, _TOGETHER = 1 << 17, 1 << 20
"""Elements of a tensor that are compared at a time, and of several."""


@dataclass(frozen=True)
class Outcome:
    """What a call did. ``values`` and ``gradients`` are named tensors; ``facts`` is everything that must be equal."""

    values: Mapping[str, torch.Tensor]
    gradients: Mapping[str, torch.Tensor | None]
    facts: Mapping[str, Any]
    backward_error: str = ""


@dataclass(frozen=True)
class AskedGradients:
    """What code finds that asks whether there are gradients.

    Args:
        on: whether gradients are on; None: where they are compared.
        without: the leaves of the inputs that want none.
    """

    on: bool | None = None
    without: frozenset[int] = frozenset()


ALL_WANTED = AskedGradients()


@dataclass(frozen=True)
class Difference:
    """How far two outcomes differ.

    Args:
        forward: largest difference of an output, buffer or input afterwards, relative to the tensor's scale.
        gradient: the same of the gradients.
        worst_value, worst_gradient: which tensors these are.
        reason: set if the outcomes differ in more than numbers.
    """

    forward: float = 0.0
    gradient: float = 0.0
    worst_value: str = ""
    worst_gradient: str = ""
    reason: str = ""


def observe(
    call: Callable[..., Any],
    state: ModuleState,
    inputs: tuple[Any, Any],
    gradients: bool = True,
    slices: WeightSlices | None = None,
    asked: AskedGradients = ALL_WANTED,
) -> Outcome:
    """Runs ``call(*args, **kwargs)`` and its backward from one random state and a given module state.

    Args:
        call: the forward to observe.
        state: restored before the call, read after it. Gradients of its module's parameters are taken; ``.grad`` is not touched.
        inputs: (args, kwargs); floating tensors among them get gradients, but for those that are to want none.
        slices: the active mode that makes leaves of parts of parameters, if there is one.

    It raises whatever ``call`` raises. An error of backward alone is recorded in the outcome.
    """
    leaves, spec = pytree.tree_flatten(inputs)
    fresh = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    floating = ((i, leaf) for i, leaf in enumerate(fresh) if _is_floating(leaf) and i not in asked.without)
    roots = {f"input {i}": leaf.requires_grad_() for i, leaf in floating}
    # Clones, so that a forward may write to its inputs as it may inside a model.
    given = [leaf.clone() if _is_floating(leaf) else leaf for leaf in fresh]
    args, kwargs = pytree.tree_unflatten(given, spec)
    state.restore()
    parameters = state.parameters
    # What is only read here does not go through the modes under which ``call`` runs: of many experts that takes long.
    with DisableTorchFunction():
        before = [parameter._version for parameter in parameters.values()]
    with random_state_kept(SEED), torch.set_grad_enabled(gradients if asked.on is None else asked.on):
        with Bounded():
            result = unfolded(call(*args, **kwargs))
        streams = random_states()
        values = {f"output {i}": leaf for i, leaf in enumerate(pytree.tree_leaves(result)) if _is_tensor(leaf)}
        values.update({f"input {i}": leaf for i, leaf in enumerate(given) if _is_tensor(leaf)})
        values = {name: tensor.detach().clone() for name, tensor in values.items()}
        kept = state.now()
        values.update(kept.tensors)
        facts = kept.facts
        results = [result, kept.fresh]
        taken: dict[str, torch.Tensor | None] = {}
        backward_error = ""
        if gradients:
            taken, backward_error = _gradients(results, {**roots, **parameters}, slices or WeightSlices(()))
    with DisableTorchFunction():
        after = [parameter._version for parameter in parameters.values()]
    facts["changes of parameters"] = [now - then for now, then in zip(after, before)]
    facts["structure of the outputs"] = str(pytree.tree_structure(result))
    facts["outputs that are no tensors"] = [leaf for leaf in pytree.tree_leaves(result) if not _is_tensor(leaf)]
    facts["random numbers drawn"] = [bytes(stream.tolist()) for stream in streams]
    return Outcome(values, taken, facts, backward_error)


def unfolded(result: Any) -> Any:
    """A result with dataclasses and mappings as their classes and all that they hold."""

    def opened(leaf: Any) -> Any:
        held = held_in(leaf)
        return leaf if held is None else (type(leaf), [(name, unfolded(value)) for name, value in held])

    return pytree.tree_map(opened, result, is_leaf=lambda value: held_in(value) is not None)


@autocast_off()
def difference(original: Outcome, other: Outcome) -> Difference:
    """Compares two outcomes. NaN equals NaN and nothing else; a gradient that is None counts as zero."""
    for name in sorted({*original.facts, *other.facts}):
        if not same_fact(original.facts.get(name), other.facts.get(name)):
            return Difference(reason=f"{name}: not what the original has")
    if set(original.values) != set(other.values):
        return Difference(reason=f"only one of the two has {', '.join(set(original.values) ^ set(other.values))}")
    if other.backward_error and not original.backward_error:
        return Difference(reason=f"backward raises {other.backward_error}")
    forward, value, reason = furthest(original.values, other.values)
    if reason:
        return Difference(reason=reason)
    if original.backward_error:
        return Difference(forward, worst_value=value)
    first, second = _filled(original.gradients, other.gradients), _filled(other.gradients, original.gradients)
    gradient, of, reason = furthest(first, second)
    if reason:
        return Difference(forward, reason=f"gradient of {reason}")
    return Difference(forward, gradient, value, of)


def same_fact(one: Any, two: Any) -> bool:
    """Whether plain values are equal; numbers, which the code may have got from a tensor, but for rounding."""
    if isinstance(one, float) and isinstance(two, float):
        return math.isclose(one, two, rel_tol=1e-5) or (math.isnan(one) and math.isnan(two))
    if type(one) in (list, tuple) and type(one) is type(two):
        return len(one) == len(two) and all(map(same_fact, one, two))
    return bool(one == two)


def unlike(original: Outcome, other: Outcome) -> str:
    """A sentence if a tensor has another shape or dtype in the other outcome; else empty."""
    both = ((name, one, other.values.get(name)) for name, one in original.values.items())
    return next((text for name, one, two in both if two is not None and (text := _unlike(name, one, two))), "")


def _unlike(name: str, one: torch.Tensor, two: torch.Tensor) -> str:
    if one.shape == two.shape and one.dtype == two.dtype:
        return ""
    return f"{name}: {two.dtype} {tuple(two.shape)}, not {one.dtype} {tuple(one.shape)}"


def _gradients(
    result: Any, leaves: Mapping[str, torch.Tensor], slices: WeightSlices
) -> tuple[dict[str, torch.Tensor | None], str]:
    with DisableTorchFunction():
        wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    outputs = [leaf for leaf in pytree.tree_leaves(result) if _is_tensor(leaf) and leaf.requires_grad]
    if not outputs or not wanted:
        return dict.fromkeys(wanted), ""
    generator = torch.Generator().manual_seed(0)
    cotangents = [
        torch.randn(leaf.shape, dtype=torch.float64, generator=generator, device="cpu").to(leaf.device, leaf.dtype)
        for leaf in outputs
    ]
    with DisableTorchFunction():
        large = registry.large_blocks() if any(isinstance(leaf, InPieces) for leaf in wanted.values()) else None
    try:
        with large.lazy_gradients(wanted.values()) if large else nullcontext():
            grads = torch.autograd.grad(outputs, [*wanted.values(), *slices.parts], cotangents, allow_unused=True)
    except (RuntimeError, NotImplementedError) as error:
        if is_out_of_memory(error):
            raise
        return dict.fromkeys(wanted), kind_and_line(error)
    taken = grads[: len(wanted)]
    with torch.no_grad(), DisableTorchFunction():
        found = dict(zip(wanted, large.compared(taken, [*wanted.values()]) if large else taken))
    return slices.whole(found, wanted, grads[len(wanted) :]), ""


def _filled(
    gradients: Mapping[str, torch.Tensor | None], others: Mapping[str, torch.Tensor | None]
) -> dict[str, torch.Tensor]:
    """The gradients that either of two outcomes has, with zeros where this one has none."""
    found = {}
    for name, gradient in gradients.items():
        other = others[name]
        if gradient is not None:
            found[name] = gradient
        elif other is not None:
            found[name] = torch.zeros_like(other)
    return found


def furthest(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> tuple[float, str, str]:
    """The largest relative difference, the name of its tensor, and a sentence if two tensors cannot be compared."""
    different = (text for name, one in first.items() if (text := _unlike(name, one, second[name])))
    if text := next(different, ""):
        return 0.0, "", text
    scales: dict[str, float] = {}
    distances: dict[str, float] = {}
    for names in batches(first, lambda name: first[name].numel(), _TOGETHER):
        ones, twos = ([wide(values[name]) for name in names] for values in (first, second))
        scales |= zip(names, largest_of(ones))
        distances |= zip(names, _distances(ones, twos))
    odd = {name for name, scale in scales.items() if not math.isfinite(scale)}
    scales |= {name: largest(_finite(wide(first[name]))) for name in odd}
    floor = SCALE_FLOOR * max(scales.values(), default=0.0)
    most, worst = 0.0, ""
    for name, distance in distances.items():
        if name in odd or not math.isfinite(distance):
            one, two = wide(first[name]), wide(second[name])
            if not torch.equal(_oddities(one), _oddities(two)):
                return 0.0, name, f"{name}: NaN or inf in other places"
            distance = largest(_finite(one) - _finite(two))
        scale = max(scales[name], floor)
        error = distance / scale if scale else distance
        if error > most:
            most, worst = error, name
    return most, worst, ""


def _distances(ones: Sequence[torch.Tensor], twos: Sequence[torch.Tensor]) -> list[float]:
    """The largest differences, NaN where there is one; in pieces, since large memory that is new is slow on a CPU."""
    found = [0.0] * len(ones)
    pieces = [(number, *piece) for number, pair in enumerate(zip(ones, twos)) for piece in zip(*map(_pieces, pair))]
    for batch in batches(pieces, lambda piece: piece[1].numel(), _TOGETHER):
        numbers, left, right = zip(*batch)
        for number, distance in zip(numbers, largest_of(_foreach_sub(left, right))):
            if not distance <= found[number]:  # so that NaN is the largest
                found[number] = distance
    return found


def _pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    return (tensor,) if tensor.numel() <= _PIECE else tensor.flatten().split(_PIECE)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """In float64; complex numbers as pairs."""
    return torch.view_as_real(tensor).double() if tensor.is_complex() else tensor.double()


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.nan_to_num(0.0, 0.0, 0.0)


def _oddities(tensor: torch.Tensor) -> torch.Tensor:
    """Zero where finite, and one code each for NaN, inf and -inf."""
    return torch.where(tensor.isfinite(), 0.0, tensor).nan_to_num(1.0, 2.0, 3.0)


@autocast_off()
def largest(tensor: torch.Tensor) -> float:
    """The largest magnitude of real numbers: 0 of none, NaN or infinite if one of them is."""
    if tensor.numel() <= _PIECE:
        return float(tensor.abs().max()) if tensor.numel() else 0.0
    return float(torch.stack(torch.aminmax(tensor)).abs().max())


@autocast_off()
def largest_of(tensors: Sequence[torch.Tensor]) -> list[float]:
    """`largest` of each, by one wait for a device."""
    found = [0.0] * len(tensors)
    alike: dict[Any, list[int]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.numel():
            alike.setdefault((tensor.device, tensor.dtype), []).append(number)
    for numbers in alike.values():
        ends = torch.stack([end for number in numbers for end in torch.aminmax(tensors[number])])
        for number, value in zip(numbers, ends.view(-1, 2).abs().amax(1).tolist()):
            found[number] = value
    return found


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
