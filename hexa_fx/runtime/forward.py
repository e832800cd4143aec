"""What an instance runs in place of its forward: the specialisation that a call is for, a new one, or the original."""

from __future__ import annotations

import copy
import logging
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.utils import _pytree as pytree

from hexa_fx.contexts import attributes_set, items_set
from hexa_fx.errors import PlanError
from hexa_fx.ir import NEVER_SMALL, RUNS_ALREADY, RewrittenBlock, RoutingSite
from hexa_fx.isolation.shadow import FORWARD, INSIDE_HOOK, InPlace
from hexa_fx.runtime.call_kinds import RefusedKind, call_kind, said_of_sizes, saving_is_counted
from hexa_fx.runtime.guards import (
    ArgumentNames,
    GuardMiss,
    OwnCodeOnly,
    say_in_trace,
    without_frames,
)
from hexa_fx.runtime.listed_experts import readers
from hexa_fx.runtime.paths import WeightReader
from hexa_fx.runtime.sampled_check import SampledCheck
from hexa_fx.runtime.specialisation import Specialisation
from hexa_fx.sources import peft
from hexa_fx.sources.adapters import Adapters


class Analyst(Protocol):
    """Analyses calls of a kind that a block was not rewritten for (`hexa_fx.specialise`)."""

    def specialise(
        self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any], miss: GuardMiss | None, tried: int
    ) -> str:
        """Adds a specialisation, or a kind that is refused, to ``forward``, of which the first ``tried`` do not take the call.

        Returns why there is none; empty if there is.
        """


_COMPILED = "_compiled_call_impl"
"""What a module calls in place of its hooks and its forward, if it has one."""


@contextmanager
def answered(block: nn.Module, called: Sequence[tuple[str, Any]]) -> Iterator[None]:
    """A context in which submodules of ``block`` give, once for each call of ``called``, what they gave there.

    They draw and count nothing again, and their hooks do not run again. It holds for this thread.
    """
    found: dict[nn.Module, deque[Any]] = {}
    for path, result in called:
        found.setdefault(block.get_submodule(path), deque()).append(result)
    thread = threading.get_ident()

    def answering(results: deque[Any], call: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*args: Any, **kwargs: Any) -> Any:
            if not results or threading.get_ident() != thread:
                return call(*args, **kwargs)
            given = results.popleft()
            return given if torch.is_grad_enabled() else pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, given)

        return answer

    with items_set(
        (vars(module), _COMPILED, answering(results, vars(module).get(_COMPILED) or module._call_impl))
        for module, results in found.items()
    ):
        yield


def slot_of(block: nn.Module) -> str:
    """Where the forward of a block lies: inside of accelerate's hook, if it has one."""
    own = vars(block)
    return INSIDE_HOOK if "_hf_hook" in own and INSIDE_HOOK in own else FORWARD


logger = logging.getLogger(__name__)

SMALL = "its own code is faster for inputs this small"
"""The reason of calls that run a block's own code by choice."""

_WARN_AFTER = 100
_MOST_MISTAKES = 3
"""After so many, code that raises in its calls means to, as hooks do that end a forward early."""
_REMEDY = "print(model.report) says what every block ran, and why"


class HexaForward(InPlace):
    """A module's rewritten forwards, with the signature of the original.

    A call runs the first specialisation whose conditions hold. A call of another kind is analysed, once, and then runs what was
    made of it, or else the original forward; each reason is logged once, and all calls are counted.

    Args:
        module: the user's module, referenced weakly (the module owns this object).
        blocks: what was made of it for several kinds of calls.
        original: the forward that the instance had of its own; None if it had the class's.
        analyst: analyses calls of other kinds; None if these run the original.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Sequence[RewrittenBlock] = (),
        original: Callable[..., Any] | None = None,
        path: str = "",
        analyst: Analyst | None = None,
    ) -> None:
        self.specialisations = tuple(Specialisation(module, block, original) for block in blocks)
        self.refused: tuple[RefusedKind, ...] = ()
        self.path, self.analyst = next((block.path for block in blocks), path), analyst
        # Paths of modules that may be the block if this one is refused, the innermost first.
        self.around: tuple[str, ...] = ()
        self.sites: dict[bool, RoutingSite | str] = {}
        self.adapters = Adapters()
        self.why = ""  # ... the original ran when it last did
        self.exhausted = ""  # why no more kinds of calls are analysed
        # Numbers that changed between calls: as they were, None where calls cannot ask for them.
        self.numbers: dict[str, float | None] = {}
        self.lost = ""  # why the original cannot run at all
        self.sampled: SampledCheck | None = None
        self.own_forward = original
        self._forget_calls()
        self._bind(module)

    def _forget_calls(self) -> None:
        self.restarted, self.called = list[Callable[[], None]](), list[Callable[[], None]]()
        self.ran, self.own = 0, Counter[str]()
        self.saved_own = False  # whether the original ran in a checkpoint, whose second run has to save as much
        self._warned, self._mistakes, self._tried = False, 0, False
        # Who was refused and waits for this module around it, which is tried next; and whether one around this is tried.
        self.inner: HexaForward | None = None
        self.waits = False
        self._latest = next(iter(self.specialisations), None)

    def _bind(self, module: nn.Module) -> None:
        peft.watch()
        self._module = weakref.ref(module)
        self.within: weakref.ref[nn.Module] | None = None  # the model, as far as it is known
        for made in self.specialisations:
            made.attributes.bind(module)
        for kind in self.refused:
            kind.attributes.bind(module)
        self.__name__ = "forward"
        self.__doc__ = type(module).forward.__doc__
        self.arguments = ArgumentNames.of(self.own_forward or type(module).forward, self.own_forward is None)

    def in_mode(self, training: bool) -> Specialisation | None:
        """The specialisation that ran last in train or eval mode, else the first one; None if there is none for the mode."""
        latest = self._latest
        if latest is not None and latest.holds_in(training):
            return latest
        return next((each for each in self.specialisations if each.holds_in(training)), None)

    @property
    def _name(self) -> str:
        return self.path or type(self.module).__name__

    def reads_under(self) -> set[str]:
        """Names of attributes of the module under which stacked weights are read."""
        return {name for name, held in vars(self.module).items() if isinstance(held, WeightReader)}

    def add(self, block: RewrittenBlock) -> None:
        """Adds a specialisation, which the next call of its kind runs. Raises `InputError` as `readers`."""
        module = self.module
        other = {weight.name: weight for weight in block.packed}
        for name in self.reads_under():
            reader: WeightReader = vars(module)[name]
            differs = reader.weight != other.get(name, reader.weight)
            if reader.reads_exchanged() or (differs and all(each.why_not_now(module) for each in self.specialisations)):
                self.specialisations = ()  # all were made of what is gone
                del module.__dict__[name]
        module.__dict__.update(readers(module, block))
        made = Specialisation(module, block, self.own_forward)
        made.look_anew(module)
        self.bind_added(made)
        self.specialisations, self._latest = (*self.specialisations, made), made

    def exchange(self, blocks: Sequence[RewrittenBlock], analyst: Analyst | None) -> None:
        """Takes what was made of the module anew for all that there is, and goes on counting."""
        for name in self.reads_under():
            del self.module.__dict__[name]
        self.specialisations, self.refused, self.exhausted, self.analyst = (), (), "", analyst
        for block in blocks:
            self.add(block)

    def bind_added(self, made: Specialisation) -> None:
        """Told of every specialisation that is added, on behalf of whoever binds them."""

    def refusal_of(self, args: tuple[Any, ...], kwargs: dict[str, Any], miss: GuardMiss | None) -> RefusedKind | None:
        """The kind of a call that is left to the original, counted; None if no such kind is known."""
        if not self.refused:
            return None
        kind = call_kind(bool(self.module.training), args, kwargs)
        return next((each for each in self.refused if each.holds(kind, args, kwargs, said_of_sizes(miss))), None)

    def refuse(self, kind: RefusedKind) -> None:
        """Leaves a kind of call to the original."""
        self.refused = (*(each for each in self.refused if not each.is_over), kind)

    def replica(self) -> nn.Module:
        made = super().replica()
        self._say("a replica of nn.DataParallel runs its own code; DistributedDataParallel runs the rewritten one")
        return made

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward that was there before. ``restarted`` are told, since the rewritten one may have run a part of it."""
        self._restart()
        return self.run_original(args, kwargs)

    def run_original(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the forward that was there before, of which nobody is told. Raises `PlanError` if that has lost its weights."""
        if self.lost:
            raise PlanError(
                f"{self._name!r} was called in a way it was not recorded for{self.why}. {self.lost}, so its original forward "
                "cannot run: call it as it was recorded (backward() or torch.autograd.grad, not torch.func), or build the model "
                "anew and call optimize_ on it as it will be, with inputs like these"
            )
        with self.adapters.in_place() if self.adapters else nullcontext():
            if self.own_forward is not None:
                return self.own_forward(*args, **kwargs)
            return type(self.module).forward(self.module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for told in self.called:
            told()
        if is_compiling():
            return self._in_trace(args, kwargs)
        latest, there, miss = self._latest, len(self.specialisations), None
        if latest is not None:
            if latest.prefers_own_code(self._module, args, kwargs):
                return self._own(SMALL, args, kwargs)
            expected = None if self.sampled is None else self.sampled.expected(self, args, kwargs)
            try:
                result = self.rewritten(*args, **kwargs)
                self.ran += 1
                if self.sampled is None or expected is None or not (why := self.sampled.differs(result, expected)):
                    return result
                self.specialisations, self._latest, self.exhausted = (), None, why  # from now on
            except GuardMiss as found:
                miss = without_frames(found)
        return self._analysed(args, kwargs, miss, there)

    def rewritten(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the rewritten forward that a call is for, without falling back. Calls of kinds that were seen go through here,
        so that who wraps it from outside can count them. Raises `GuardMiss` if there is none, or none for these inputs.
        """
        latest, made = self._latest, self.specialisations
        if latest is not None and len(made) > 1 and not saving_is_counted():  # else always in one order
            made = (latest, *(each for each in made if each is not latest))
        return self._first_of(made, args, kwargs)

    def _first_of(
        self,
        made: Sequence[Specialisation],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        miss: GuardMiss | None = None,
    ) -> Any:
        """Runs the first of some specialisations that takes a call. Raises `GuardMiss` if none does: why the last one for this mode
        does not. ``miss``: of one that was tried before; submodules that have been called by then give what they gave."""
        module = self.module
        training = bool(module.training)
        for each in made:
            try:
                if miss is None or not miss.called:
                    result = each.run(module, self.arguments, self.adapters, args, kwargs)
                else:
                    with answered(module, miss.called):
                        result = each.run(module, self.arguments, self.adapters, args, kwargs)
            except GuardMiss as found:
                if miss is not None and miss.called:
                    miss = without_frames(found) if len(found.called) > len(miss.called) else miss
                    continue
                if found.called or each.holds_in(training) or miss is None:
                    miss = without_frames(found)
                if not miss.called:
                    self._restart()
                continue
            self._latest = each
            return result
        raise miss or GuardMiss("nothing was made of the block yet")

    def _analysed(self, args: tuple[Any, ...], kwargs: dict[str, Any], miss: GuardMiss | None, tried: int) -> Any:
        """Runs what an analysis makes of a call that none of the first ``tried`` specialisations takes.

        What is refused in a call that the block's own code cannot run either says nothing of later ones: some arguments were wrong.
        """
        left = self.refused, self.exhausted
        known = self.refusal_of(args, kwargs, miss)
        if known is not None:
            reason = known.reason
        elif self.exhausted:
            reason = self.exhausted
        elif self.analyst is None or isinstance(miss, OwnCodeOnly):
            reason = str(miss or "it was not analysed")
        else:
            reason = self.analyst.specialise(self, args, kwargs, miss, tried)
        if reason:
            try:
                return self._own(reason, args, kwargs, miss)
            except Exception:
                if left != (self.refused, self.exhausted) and self._mistakes < _MOST_MISTAKES:
                    (self.refused, self.exhausted), self._mistakes = left, self._mistakes + 1
                raise
        first = min(tried, len(self.specialisations) - 1)  # `add` may have taken the others away
        added = self.specialisations[first:]
        try:
            called = miss is not None and miss.called
            if not called:
                self._restart()
            result = self._first_of(added, args, kwargs, miss if called else None)
        except GuardMiss as found:
            return self._own(found.args[0], args, kwargs, without_frames(found))
        self.ran += 1
        return result

    def _in_trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that a compiler traces: nothing is counted or analysed."""
        module = self.module
        reason = "it was not analysed before; call the model once, or give hexa_fx.optimize an example"
        reason = next((kind.reason for kind in self.refused), reason)
        for each in self.specialisations:
            try:
                return each.run(module, self.arguments, self.adapters, args, kwargs)
            except GuardMiss as miss:
                reason = miss.args[0]  # torch 2.11's tracer cannot make a text of an exception
        say_in_trace(self._name, reason)
        return self.original(*args, **kwargs)

    def _restart(self) -> None:
        for told in self.restarted:
            told()

    def _own(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any], miss: GuardMiss | None = None) -> Any:
        self.why = f": {reason}"
        self.saved_own |= reason != SMALL and saving_is_counted()
        if not self.lost:  # else no call ran
            self.own[reason] += 1
            if reason not in (SMALL, RUNS_ALREADY) and not self._tried:
                self._say(reason)
        if miss is None or not miss.called:
            return self.original(*args, **kwargs)
        with answered(self.module, miss.called):
            return self.run_original(args, kwargs)

    def _say(self, reason: str) -> None:
        """Logs each reason once, and that a block mostly runs its own code."""
        if self.own[reason] == 1 and not self.waits:
            latest, told = self._latest, self
            while told.inner is not None and not told.specialisations:  # nothing is left to be tried around the block
                inner, told.inner, told.waits = told.inner, None, True
                told, reason = inner, inner.why.removeprefix(": ")
            told.waits = False
            if latest is not None and latest.has_main_grad(self.module):
                reason += "; gradients of its weights go to grad meanwhile, not to main_grad"
            logger.warning("%s runs its original forward: %s", told._name, reason)
        missed = sum(self.own.values()) - self.own[SMALL]
        if missed >= _WARN_AFTER and missed > self.ran and not self._warned:
            self._warned = True
            logger.warning("%s ran its own code in %d of %d calls; %s", self._name, missed, missed + self.ran, _REMEDY)

    def takes_adapters(self) -> bool:
        """Whether all that was made runs an operator that takes weights and their adapters apart; before the first analysis, which
        sees weights without adapters so, that is not known to be otherwise.
        """
        unknown = self.analyst is not None and not (self.refused or self.exhausted)
        return (len(self.specialisations) > 0 or unknown) and all(e.takes_adapters() for e in self.specialisations)

    def never_small(self) -> None:
        """Has inputs of any size run the rewritten forwards."""
        for each in self.specialisations:
            each.small = NEVER_SMALL

    def on_trial(self) -> AbstractContextManager[None]:
        """A context in which calls are neither analysed nor counted, and nothing is said of them."""
        counted = {"ran": self.ran, "own": self.own.copy(), "saved_own": self.saved_own}
        return attributes_set(self, analyst=None, _tried=True, **counted)

    def _copied(self) -> dict[str, Any]:
        state = {key: value for key, value in self.__dict__.items() if key not in _OF_ONE}
        return {**state, "module": self.module}

    def __deepcopy__(self, memo: dict[int, Any]) -> HexaForward:
        memo[id(self)] = made = object.__new__(type(self))
        made.__setstate__(copy.deepcopy(self._copied(), memo))
        return made

    def __getstate__(self) -> dict[str, Any]:
        """For a pickle. What code read in this process says nothing of another, whose first call is analysed as it is there."""
        return {**self._copied(), "specialisations": (), "refused": (), "exhausted": ""}

    def __setstate__(self, state: dict[str, Any]) -> None:
        module = state.pop("module")
        self.__dict__.update(state)
        self._forget_calls()
        self._bind(module)


_OF_ONE = frozenset(
    "_module within arguments restarted called ran own saved_own inner waits _warned _mistakes _tried _latest __doc__ "
    "__name__".split()
)
