"""Compares original and rewritten block under changes of what an example holds fixed and a later call may not.

Those that keep all numbers finite go backward too. Where an operation of the original fails, one of the rewritten block has to too.
With NaN among the inputs only finite results of the original count: one-hot dispatch spreads a NaN to every token, and code that
counts where NaN is may fail.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.fx
from torch import nn
from torch.utils import _pytree as pytree

from hexa_fx.passes.inputs.fresh_inputs import FreshInputs
from hexa_fx.passes.verify.cases import MAGNITUDES, ByRows, VerificationCase
from hexa_fx.passes.verify.comparison import Call, Comparison

_MASKED = -1e4
"""Floats below it, of an argument without large positive ones, mark what is masked."""


@dataclass(frozen=True)
class Perturbation:
    """One change of a call.

    Args:
        name: how a sentence names it.
        at: which leaf of the arguments changes.
        change: gives the leaf's other value, drawn with a generator.
        finite: whether all of the original counts, be it an error, NaN or infinity, and its gradients; else only its finite
            results do.
    """

    name: str
    at: int
    change: Callable[[torch.Tensor, torch.Generator], torch.Tensor]
    finite: bool = True


def perturbations(inputs: FreshInputs, module: nn.Module, factors: Sequence[float]) -> Iterator[Perturbation]:
    """What is tried of a block, whose forward names its arguments. ``factors``: on the tokens, from `factors_past_limits`."""
    yield from _masks(inputs, module)
    place = inputs.tokens_at()
    if place is not None:
        yield Perturbation("tokens of other magnitudes", place, partial(_times, (*MAGNITUDES, *factors)))
        yield Perturbation("NaN and infinity in a token", place, _with_nan, finite=False)


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


# -- masks -------------------------------------------------------------------------------------------------------------


def _masks(inputs: FreshInputs, module: nn.Module) -> Iterator[Perturbation]:
    """Masks and integers whose numbers are all equal in the example (others are drawn at random in every case), and masks without
    any ones, which random ones hardly are.
    """
    args, kwargs = inputs.example(torch.float64)
    names = argument_names(module, args, kwargs)
    for number, (leaf, kind) in enumerate(zip(pytree.tree_leaves((args, kwargs)), inputs.kinds)):
        if not isinstance(leaf, torch.Tensor) or not leaf.numel() or leaf.is_complex() or number == inputs.tokens_at():
            continue
        mask, integers = f"the mask {names[number]!r} drawn at random", kind in ("integer", "ids")
        leaf = leaf.detach()
        least, most = float(leaf.min()), float(leaf.max())
        if least == most and (kind == "bool" or (kind == "unsigned" and least == 1 and leaf.numel() > 1)):
            yield Perturbation(mask, number, partial(_drawn, 0, 2))
        elif least == most and integers:
            bounds = min(0, int(least)), max(1, int(most)) + 1
            name = f"the integers {names[number]!r} drawn at random"
            yield Perturbation(name, number, partial(_drawn, *bounds))
        elif leaf.is_floating_point() and least < _MASKED and most < -_MASKED:
            yield Perturbation(mask, number, partial(_masking, least))
        if kind in ("bool", "integer", "unsigned") and bool(((leaf == 0) | (leaf == 1)).all()):
            yield Perturbation(f"no ones in the mask {names[number]!r}", number, partial(_drawn, 0, 1), finite=False)


def _drawn(low: int, high: int, leaf: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(low, high, leaf.shape, generator=generator, device="cpu").to(leaf)


def _masking(low: float, leaf: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.where(torch.rand(leaf.shape, generator=generator, device="cpu") < 0.5, low, 0.0).to(leaf)


# -- magnitudes --------------------------------------------------------------------------------------------------------


def _times(factors: tuple[float, ...], leaf: torch.Tensor, _: torch.Generator) -> torch.Tensor:
    """Rows times each of the factors in turn, and rows left as they are."""
    rows = torch.arange(leaf.shape[:-1].numel(), device="cpu")
    each = torch.tensor([1.0, *factors], dtype=torch.float64, device="cpu")[rows % (len(factors) + 1)]
    return (leaf.double() * each.reshape(*leaf.shape[:-1], 1).to(leaf.device)).to(leaf.dtype)


def _with_nan(leaf: torch.Tensor, _: torch.Generator) -> torch.Tensor:
    """One token of NaN, and one with an infinite element."""
    rows = leaf.clone().reshape(-1, leaf.shape[-1])
    rows[len(rows) // 2] = torch.nan
    rows[len(rows) // 3, 0] = torch.inf
    return rows.reshape(leaf.shape)


def perturbed_cases(comparison: Comparison, gradients: bool) -> Iterator[VerificationCase]:
    """One for every perturbation. ``gradients``: whether they are compared at all."""
    inputs, subject = comparison.inputs, comparison.subject
    for how in perturbations(inputs, subject.module, comparison.settings.factors):
        leaves, spec = pytree.tree_flatten(inputs.like_example(subject.dtype))
        with torch.no_grad():
            leaves[how.at] = changed = how.change(leaves[how.at], torch.Generator().manual_seed(1))
        poisoned = ~changed.isfinite().flatten(0, -2).all(-1) if how.at == inputs.tokens_at() else None
        given = pytree.tree_unflatten(leaves, spec)
        try:
            call = Call(given, gradients=gradients and how.finite, rows=ByRows(how.finite, poisoned))
            yield comparison.case(how.name, call)
        finally:
            comparison.state.restore()
