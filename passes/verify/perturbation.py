"""What an example holds fixed and a later call may not: the changes under which a rewritten block is tried.

`hexa_fx.passes.verify.trial` says what a change is; `hexa_fx.passes.verify.perturbed_runs` makes them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.fx
from torch import nn
from torch.utils import _pytree as pytree

from hexa_fx.capture import record_of
from hexa_fx.passes.detect.graph import is_float, literals, operation
from hexa_fx.passes.inputs.fresh_inputs import FreshInputs
from hexa_fx.passes.verify.trial import Change, Perturbation, Trial
from hexa_fx.torch_private import _debug_has_internal_overlap

_LIMITS = frozenset(
    "clamp clamp_ clamp_min clamp_min_ clamp_max clamp_max_ clip clip_ minimum maximum max min hardtanh hardtanh_ relu6 "
    "hardsigmoid hardswish threshold threshold_ softplus softshrink hardshrink celu lt le gt ge __lt__ __le__ __gt__ __ge__ "
    "where nan_to_num".split()
)
"""Operations that treat numbers differently on the two sides of a constant."""

_MAGNITUDES = (1e3, 1e-3)
_FURTHEST = 1e8
_MASKED = -1e4
"""Floats below it, of an argument without large positive ones, mark what is masked."""


def perturbations(
    inputs: FreshInputs, module: nn.Module, factors: Sequence[float], watched: Collection[str] = ()
) -> Iterator[Perturbation]:
    """What is tried of a block.

    Args:
        inputs: the example call and fresh ones like it.
        module: the block.
        factors: on the tokens, from `factors_past_limits`.
        watched: paths of submodules in whose other mode a guard leaves the call to the original.
    """
    modes = tuple(_other_modes(module, watched))
    if modes:
        yield Perturbation(modes)
    fixed = (*_arguments(inputs, module), *_kept(module))
    if fixed:
        yield Perturbation(fixed, gradients=True)
    empty = tuple(_empty_masks(inputs, module))
    if empty:
        yield Perturbation(empty, finite=False)
    no_expert = tuple(_ids_of_no_expert(inputs, module))
    if no_expert:
        yield Perturbation(no_expert, finite=False, by_token=True)
    if inputs.tokens_at() is not None:
        yield Perturbation((_other_magnitudes(inputs, (*_MAGNITUDES, *factors)),), gradients=True)
        yield Perturbation((_with_nan(inputs),), finite=False)
    yield Perturbation((Change("NaN in an expert's weight", _nan_in_an_expert),), finite=False)


def argument_names(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """A name for every leaf of a call."""
    try:
        parameters = list(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        parameters = []
    named = {**dict(zip(parameters, args)), **kwargs} if len(parameters) >= len(args) else {}
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path((args, kwargs))[0]]
    flat = [name for name, value in named.items() for _ in pytree.tree_leaves(value)]
    return flat if len(flat) == len(paths) else paths


# -- arguments ---------------------------------------------------------------------------------------------------------


def _arguments(inputs: FreshInputs, module: nn.Module) -> Iterator[Change]:
    """Masks and integers whose numbers are all equal in the example; others are drawn at random in every case."""
    args, kwargs = inputs.example(torch.float64)
    leaves, names = pytree.tree_leaves((args, kwargs)), argument_names(module, args, kwargs)
    for number, (leaf, kind) in enumerate(zip(leaves, inputs.kinds)):
        if not isinstance(leaf, torch.Tensor) or not leaf.numel():
            continue
        leaf = leaf.detach()
        name, masked = names[number], leaf.is_floating_point() and float(leaf.min()) < _MASKED
        if kind == "bool" and _one_number(leaf):
            yield Change(f"the mask {name!r} drawn at random", _drawn(number, (0, 2)))
        elif kind in ("integer", "ids") and _one_number(leaf):
            low, high = min(0, int(leaf.min())), max(1, int(leaf.max()))
            yield Change(f"the integers {name!r} drawn at random", _drawn(number, (low, high + 1)))
        elif kind == "unsigned" and number != inputs.tokens_at() and leaf.numel() > 1 and bool((leaf == 1).all()):
            yield Change(f"the mask {name!r} drawn at random", _drawn(number, (0, 2)))
        elif masked and float(leaf.max()) < -_MASKED:
            yield Change(f"the mask {name!r} drawn at random", _masking(number, float(leaf.min())))


def _empty_masks(inputs: FreshInputs, module: nn.Module) -> Iterator[Change]:
    """Masks that let nothing through, which random ones hardly are."""
    args, kwargs = inputs.example(torch.float64)
    names = argument_names(module, args, kwargs)
    for number, (leaf, kind) in enumerate(zip(pytree.tree_leaves((args, kwargs)), inputs.kinds)):
        if kind in ("bool", "integer", "unsigned") and number != inputs.tokens_at() and _is_zeros_and_ones(leaf):
            yield Change(f"no ones in the mask {names[number]!r}", _drawn(number, (0, 1)))


def _is_zeros_and_ones(leaf: torch.Tensor) -> bool:
    return bool(((leaf == 0) | (leaf == 1)).all())


def _ids_of_no_expert(inputs: FreshInputs, module: nn.Module) -> Iterator[Change]:
    """Given ids of -1, as padding may have."""
    names = argument_names(module, *inputs.example(torch.float64))
    for number, kind in enumerate(inputs.kinds):
        if kind == "ids":
            yield Change(f"-1 among the ids {names[number]!r}", _without_expert(number))


def _without_expert(number: int) -> Callable[[Trial], None]:
    def make(trial: Trial) -> None:
        leaf = trial.leaves[number]
        chosen = torch.rand(leaf.shape, generator=trial.generator, device="cpu") < 0.25
        trial.leaves[number] = leaf.masked_fill(chosen.to(leaf.device), -1)

    return make


def _drawn(number: int, bounds: tuple[int, int]) -> Callable[[Trial], None]:
    def make(trial: Trial) -> None:
        leaf = trial.leaves[number]
        trial.leaves[number] = torch.randint(*bounds, leaf.shape, generator=trial.generator, device="cpu").to(leaf)

    return make


def _masking(number: int, low: float) -> Callable[[Trial], None]:
    def make(trial: Trial) -> None:
        leaf = trial.leaves[number]
        chosen = torch.rand(leaf.shape, generator=trial.generator, device="cpu") < 0.5
        trial.leaves[number] = torch.where(chosen, low, 0.0).to(leaf)

    return make


def _one_number(leaf: torch.Tensor) -> bool:
    return bool((leaf == leaf.flatten()[0]).all())


# -- what modules keep -------------------------------------------------------------------------------------------------


def _kept(module: nn.Module) -> Iterator[Change]:
    """Buffers, tensors in attributes, and parameters of one number, moved away from 0, from 1 and from each other.

    What masks something out, such as an expert by -1e9 on its logit, no longer does.
    """
    parameters = [(name, p) for name, p in module.named_parameters() if p.numel() == 1]
    for name, tensor in [*parameters, *module.named_buffers(), *_in_attributes(module)]:
        if tensor.numel() and not tensor.is_complex():
            yield Change(f"other numbers in {name!r}", _moved(tensor))


def _in_attributes(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, child in module.named_modules():
        for name, value in child.__dict__.items():
            if isinstance(value, torch.Tensor) and not _debug_has_internal_overlap(value):
                yield f"{path}.{name}".lstrip("."), value


def _other_modes(module: nn.Module, watched: Collection[str]) -> Iterator[Change]:
    """Submodules that ask for their mode and that no guard watches, each put into the other one apart from the block."""
    for path, child in module.named_modules():
        if path and path not in watched and _asks_for_mode(type(child)):  # type: ignore[arg-type]
            yield Change(f"{path!r} in the other mode", partial(_flip, child))


def _flip(module: nn.Module, trial: Trial) -> None:
    module.training = not module.training
    trial.modes.append(module)


@cache
def _asks_for_mode(kind: type) -> bool:
    members = (member for base in kind.__mro__ if base is not nn.Module for member in vars(base).values())
    codes = (getattr(getattr(member, "__func__", member), "__code__", None) for member in members)
    return any("training" in code.co_names for code in codes if code is not None)


def _moved(tensor: torch.Tensor) -> Callable[[Trial], None]:
    def make(trial: Trial) -> None:
        random = torch.rand(tensor.shape, dtype=torch.float64, generator=trial.generator, device="cpu").to(
            tensor.device
        )
        if tensor.is_floating_point():
            moved, masked = tensor * (0.5 + random) + random / 4, tensor < _MASKED
            trial.write(tensor, moved if bool(masked.all()) else torch.where(masked, random, moved))
        elif tensor.dtype == torch.bool:
            trial.write(tensor, random < 0.5 if _one_number(tensor) else ~tensor)
        elif _one_number(tensor):
            trial.write(tensor, tensor + (1 + 99 * random).to(tensor.dtype))  # a counter, past warm-up
        else:  # places or ids: those that it holds, in another order
            order = random.flatten().argsort()
            trial.write(tensor, tensor.flatten()[order].reshape(tensor.shape))

    return make


# -- magnitudes --------------------------------------------------------------------------------------------------------


def factors_past_limits(graph: torch.fx.Graph) -> tuple[float, ...]:
    """Factors on a block's inputs at which values lie beyond the constants that the recorded code compares them with."""
    found = set()
    for node in graph.nodes:
        if node.op == "output" or operation(node) not in _LIMITS:
            continue
        floats = [record_of(operand).value for operand in node.all_input_nodes if is_float(operand)]
        largest = max((float(value.abs().nan_to_num(0, 0, 0).max()) for value in floats if value.numel()), default=0.0)
        found |= {abs(limit) / largest for limit in literals([node]) if largest and limit}
    far = {min(8 * ratio, _FURTHEST) for ratio in found if 8 * ratio > _MAGNITUDES[0]}
    near = {max(ratio / 8, 1 / _FURTHEST) for ratio in found if ratio / 8 < _MAGNITUDES[1]}
    return tuple(sorted([*sorted(far)[-1:], *sorted(near)[:1]]))


def _other_magnitudes(inputs: FreshInputs, factors: tuple[float, ...]) -> Change:
    """Rows times each of the factors in turn, and rows left as they are."""
    place = inputs.tokens_at()
    assert place is not None

    def make(trial: Trial) -> None:
        leaf = trial.leaves[place]
        rows = leaf.shape[:-1].numel()
        each = torch.tensor([1.0, *factors], dtype=torch.float64, device="cpu")[
            torch.arange(rows, device="cpu") % (len(factors) + 1)
        ]
        trial.leaves[place] = (leaf.double() * each.reshape(*leaf.shape[:-1], 1).to(leaf.device)).to(leaf.dtype)

    return Change("tokens of other magnitudes", make)


def _with_nan(inputs: FreshInputs) -> Change:
    """One token of NaN, and one with an infinite element."""
    place = inputs.tokens_at()
    assert place is not None

    def make(trial: Trial) -> None:
        leaf = trial.leaves[place].clone()
        rows = leaf.reshape(-1, leaf.shape[-1])
        rows[len(rows) // 2] = torch.nan
        rows[len(rows) // 3, 0] = torch.inf
        trial.leaves[place] = rows.reshape(leaf.shape)

    return Change("NaN and infinity in a token", make)


def _nan_in_an_expert(trial: Trial) -> None:
    """One element, of the last expert's last weight."""
    floating = [weight for weight in trial.experts if weight.is_floating_point() and weight.numel()]
    if floating:
        element = floating[-1].detach()[(-1,) * floating[-1].dim()]
        trial.write(element, torch.full_like(element, torch.nan))
