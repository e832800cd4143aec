"""Compares original and rewritten block under perturbations, of which those that keep all numbers finite go backward too.

Where an operation of the original fails, one of the rewritten block has to too. With NaN among the inputs or weights only finite
results of the original count: one-hot dispatch spreads a NaN to every token, and code that counts where NaN is may fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from hexa_fx.errors import kind_and_line
from hexa_fx.isolation.device_asserts import no_device_asserts
from hexa_fx.isolation.module_state import ModuleState
from hexa_fx.isolation.outcome import Outcome, difference, observe, same_fact, unlike, wide
from hexa_fx.isolation.precision import InFloat64
from hexa_fx.isolation.users_code import raised_by_user
from hexa_fx.isolation.weight_slices import sliced
from hexa_fx.isolation.written_tensors import tensors_restored
from hexa_fx.passes.inputs.fresh_inputs import FreshInputs
from hexa_fx.passes.verify.cases import Subject, VerificationCase
from hexa_fx.passes.verify.perturbation import argument_names, perturbations
from hexa_fx.passes.verify.trial import Change, Perturbation, Trial
from hexa_fx.passes.verify.tried_calls import missing_early, tried
from hexa_fx.runtime import results
from hexa_fx.runtime.forward import HexaForward
from hexa_fx.runtime.guards import LEFT, GuardMiss

_TINY, _NOTHING = 1e-300, 1e100
_CHAOTIC = 100.0


@dataclass(frozen=True)
class PerturbedRuns:
    """Both forwards of a subject under perturbations.

    Args:
        subject: what is compared.
        forward: the rewritten forward that is installed on it.
        inputs: the example call and fresh ones like it.
        experts: the weights of the experts.
        tolerance: largest difference relative to a row's scale.
        gradients: whether they are compared at all.
        factors: see `hexa_fx.passes.verify.perturbation.perturbations`.
        state: of the subject's module, of which only the values are saved anew where nothing else changed.
    """

    subject: Subject
    forward: HexaForward
    inputs: FreshInputs
    experts: tuple[torch.Tensor, ...]
    tolerance: float
    gradients: bool = True
    factors: tuple[float, ...] = ()
    state: ModuleState | None = None

    def cases(self) -> Iterator[VerificationCase]:
        """One for every perturbation. Of one with several changes, the sentence names the change that makes a difference."""
        module = self.subject.module
        reads = self.forward.specialisations[0].attributes.reads
        watched = {read.root for read in reads if not read.is_global and read.steps == ("training",)}
        for perturbation in perturbations(self.inputs, module, self.factors, watched):
            case = self._case(perturbation, perturbation.changes)
            if case.outcome == "equal" or len(perturbation.changes) == 1:
                yield case
                continue
            alone = [self._case(perturbation, (change,)) for change in perturbation.changes]
            different = [single for single in alone if single.outcome == "different"]
            yield different[0] if different else case

    def _case(self, perturbation: Perturbation, changes: tuple[Change, ...]) -> VerificationCase:
        name = Perturbation(changes).name
        trial, spec = self._trial(perturbation)
        before = [*trial.leaves]
        try:
            with torch.no_grad():
                for change in changes:
                    change.make(trial)
            if perturbation.by_token and not self._leaves_others(before, trial, spec):
                return VerificationCase(name, "skipped", detail="the original makes nothing of it")
            return self._compared(name, trial, spec, perturbation)
        finally:
            trial.undo()

    def _leaves_others(self, before: list[Any], trial: Trial, spec: pytree.TreeSpec) -> bool:
        """Whether the original gives tokens whose ids were not changed what it gave them before."""
        leaves, original = trial.leaves, self.forward.original
        one, two = (self._outcome(original, trial, given, spec, gradients=False) for given in (before, leaves))
        if isinstance(one, Exception) or isinstance(two, Exception) or unlike(one, two):
            return False
        old, new = next((old, new) for old, new in zip(before, leaves) if old is not new)
        kept = (old == new).all(-1).flatten() if old.dim() > 1 else old == new
        tokens = kept.numel()
        first, second = one.values.get("output 0"), two.values.get("output 0")
        if first is None or second is None or not first.dim() or first.shape[:-1].numel() != tokens:
            return False
        first, second = (value.reshape(tokens, -1)[kept] for value in (first, second))
        return bool(torch.allclose(first.double(), second.double(), rtol=1e-6))

    def _trial(self, perturbation: Perturbation) -> tuple[Trial, pytree.TreeSpec]:
        dtype, size = self.subject.dtype, perturbation.size
        args, kwargs = self.inputs.like_example(dtype) if size is None else self.inputs.at(*size, dtype)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        generator = torch.Generator().manual_seed(1)
        names = argument_names(self.subject.module, args, kwargs)
        return Trial(self.subject.module, leaves, names, generator, self.experts), spec

    def _compared(self, name: str, trial: Trial, spec: pytree.TreeSpec, how: Perturbation) -> VerificationCase:
        gradients = how.gradients and self.gradients
        original = self._outcome(self.forward.original, trial, trial.leaves, spec, gradients)
        other = self._outcome(missing_early(self.forward.rewritten), trial, trial.leaves, spec, gradients)
        if isinstance(other, GuardMiss):
            return VerificationCase(name, "skipped", detail=f"{LEFT}{other}")
        if isinstance(original, Exception) or isinstance(other, Exception):
            return _errors(name, original, other, how.finite)
        reason, error = apart(original, other, how.finite)
        if reason or error > self.tolerance:
            if not reason and self._moves(original, trial, spec, how) * _CHAOTIC >= error:
                return VerificationCase(name, "skipped", detail="rounding alone moves the original as far")
            return VerificationCase(name, "different", error, detail=reason or _how_far(error))
        found = difference(original, other)
        if found.gradient > self.tolerance and self._moves(original, trial, spec, how) * _CHAOTIC < found.gradient:
            detail = f"gradient of {found.worst_gradient} is off by {found.gradient:.1e} of its scale"
            return VerificationCase(name, "different", error, found.gradient, detail)
        return VerificationCase(name, "equal", error, found.gradient)

    def _outcome(
        self, call: Callable[..., Any], trial: Trial, leaves: list[Any], spec: pytree.TreeSpec, gradients: bool
    ) -> Outcome | Exception:
        module, made = trial.module, self.forward.specialisations[0]
        if trial.state is None:
            known = self.state if self.state is not None and self.state.retaken() else None
            trial.state = known or results.state_of(module, made.stored, made.changed)
        state = trial.state

        def run() -> Outcome:
            with ExitStack() as modes:
                modes.enter_context(no_device_asserts(module))
                if trial.modes:  # in which code may write to parameters
                    modes.enter_context(tensors_restored(module))
                if self.subject.dtype == torch.float64:
                    modes.enter_context(InFloat64(self.subject.own))
                is_original = call == self.forward.original
                slices = modes.enter_context(sliced(self.experts, gradients and is_original))
                args, kwargs = pytree.tree_unflatten(leaves, spec)
                return observe(call, module, state, (args, kwargs), gradients, slices, self.inputs.asked)

        return tried(run)

    def _moves(self, original: Outcome, trial: Trial, spec: pytree.TreeSpec, how: Perturbation) -> float:
        """How far the original's results move when the inputs do by a few roundings."""
        moved = [_nudged(leaf) for leaf in trial.leaves]
        again = self._outcome(self.forward.original, trial, moved, spec, how.gradients and self.gradients)
        if isinstance(again, Exception):
            return float("inf")
        return max(apart(original, again, how.finite)[1], difference(original, again).gradient)


Rows: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


def apart(original: Outcome, other: Outcome, finite: bool = True, rows: Rows = torch.max) -> tuple[str, float]:
    """A sentence if two outcomes differ in more than numbers, and the largest difference relative to a row's scale.

    Args:
        finite: whether NaN and infinite values have to lie in the same places; else only where the original is finite.
        rows: of the differences of a tensor's rows, the one that counts.
    """
    for fact in sorted({*original.facts, *other.facts}):
        one, two = original.facts.get(fact), other.facts.get(fact)
        if not same_fact(one, two) and str(one) != str(two):
            return f"{fact}: not what the original has", 0.0
    if set(original.values) != set(other.values):
        return f"only one of the two has {', '.join(set(original.values) ^ set(other.values))}", 0.0
    kind = unlike(original, other)
    if kind:
        return kind, 0.0
    furthest = 0.0
    for name, one in original.values.items():
        one, two = wide(one), wide(other.values[name])
        usual = one.isfinite()
        if bool((usual & ~two.isfinite()).any()):
            return f"{name} is NaN or infinite where the original is finite", 0.0
        if finite and bool((~usual & two.isfinite()).any()):
            return f"{name} is finite where the original is not", 0.0
        furthest = max(furthest, _of_rows(rows, one.where(usual, 0.0), two.where(usual, 0.0)))
    return "", furthest


def _how_far(error: float) -> str:
    return (
        f"a row is off by {error:.1e} of its scale"
        if error < _NOTHING
        else "a row is not zero, as it is in the original"
    )


def _errors(name: str, original: Outcome | Exception, other: Outcome | Exception, finite: bool) -> VerificationCase:
    if isinstance(original, Exception) and (isinstance(other, Exception) or not finite or raised_by_user(original)):
        return VerificationCase(name, "skipped", detail=f"the original raises {kind_and_line(original)}")
    which, error = ("the original", original) if isinstance(original, Exception) else ("the rewritten block", other)
    assert isinstance(error, Exception)
    return VerificationCase(name, "different", detail=f"only {which} raises {kind_and_line(error)}")


def _of_rows(rows: Rows, one: torch.Tensor, two: torch.Tensor) -> float:
    """Rows have magnitudes of their own here, so each is compared with its own scale."""
    if not one.numel():
        return 0.0
    if not one.dim():
        one, two = one[None], two[None]
    scale = one.abs().amax(-1).clamp(min=_TINY)
    return float(rows((one - two).abs().amax(-1) / scale))


def _nudged(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
        return leaf
    return leaf * (1 + 4 * torch.finfo(leaf.dtype).eps)
