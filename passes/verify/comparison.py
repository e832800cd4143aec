"""The cases of a verification: original and rewritten block on the same inputs, routings, cotangents and random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hexa_fx.errors import InputError, kind_and_line
from hexa_fx.isolation.outcome import Difference, Outcome, difference, observe
from hexa_fx.isolation.purity import raised_by_user
from hexa_fx.isolation.size import InPieces, float64_bytes
from hexa_fx.isolation.trial_modes import InFloat64, WeightSlices, no_device_asserts, sliced
from hexa_fx.passes.inputs.fresh_inputs import FreshInputs
from hexa_fx.passes.inputs.routing_override import (
    ROUTINGS,
    ChoiceSpy,
    ForcedRouting,
    LogitsOverride,
    RoutingOverride,
    in_turns,
    rows_for_all,
    under_other_numbers,
)
from hexa_fx.passes.verify.cases import (
    NO_ROUTER,
    SECOND,
    ByRows,
    Subject,
    UntriedExperts,
    VerificationCase,
    VerifySettings,
    size,
    tolerance_of,
    tried,
    up_to_different,
)
from hexa_fx.runtime import results
from hexa_fx.runtime.forward import HexaForward
from hexa_fx.runtime.guards import LEFT, GuardMiss, ReadMiss, RoutingMiss
from hexa_fx.torch_private import _is_any_autocast_enabled

FEWER_BITS = "on the way the block rounds to fewer bits than its inputs have"
_CASTS = "the code casts between the dtypes of its tensors in a way that is not followed"
_CLOSE = 2e-5
"""Relative to a tensor's scale: what a cast to 16 bits loses is more, and what 32 bits lose is less, but where numbers cancel."""

_UNIT = 2.0**-24
_MORE = 32.0
"""How much further one of two that multiply in 32 bits may be from exact results, by the order in which it adds up."""


def lost_precision(
    original: Outcome, other: Outcome, exact: Callable[[], Outcome | None], parameters: Iterable[torch.Tensor]
) -> str:
    """A sentence if one of two forwards in 32 bits gives numbers as if it alone rounded to 16 on the way; else empty.

    Where numbers cancel, both are far from each other and from exact results, so these are asked for.

    Args:
        original, other: what the two gave on the same inputs, in their own precision.
        exact: gives the original's results in float64, or None if they cannot be had. Called if the two differ.
        parameters: of the block.
    """
    numbers = (*parameters, *original.values.values(), *other.values.values())
    coarse = any(number.is_floating_point() and number.itemsize < 4 for number in numbers)
    if coarse or _is_any_autocast_enabled() or torch.get_float32_matmul_precision() != "highest":
        return ""
    apart = _apart(original, other)
    wanted = exact() if apart[0] > _CLOSE else None
    if wanted is None:
        return ""
    dtypes = {name: value.dtype for name, value in original.values.items()}
    wanted = replace(wanted, values={name: v.to(dtypes.get(name, v.dtype)) for name, v in wanted.values.items()})
    near, far = sorted(_apart(wanted, one)[0] for one in (original, other))
    if far <= _MORE * max(near, _UNIT):
        return ""
    return f"{apart[1]} is off by {apart[0]:.1e} of its scale: {FEWER_BITS}"


def _apart(one: Outcome, two: Outcome) -> tuple[float, str]:
    """How far the values of two outcomes are apart, relative to their scale, and the one that is furthest."""
    found = difference(*(replace(each, facts={}, gradients={}) for each in (one, two)))
    return (0.0, "") if found.reason else (found.forward, found.worst_value)


@dataclass(frozen=True)
class Call:
    """How both are called in one case.

    Args:
        inputs: (args, kwargs).
        override: a mode that forces what the router chooses.
        gradients: whether backward runs too.
        times: how often they are called on the same inputs.
        rows: how results are compared where the inputs hold unusual numbers.
    """

    inputs: tuple[Any, Any]
    override: TorchFunctionMode | None = None
    gradients: bool = True
    times: int = 1
    rows: ByRows | None = None


class Comparison:
    """Runs both forwards of a subject case by case, and puts its state back."""

    def __init__(
        self,
        subject: Subject,
        forward: HexaForward,
        inputs: FreshInputs,
        settings: VerifySettings,
        experts: tuple[torch.Tensor, ...],
        beside: tuple[torch.Tensor, ...] = (),
    ) -> None:
        """``beside``: other weights that nothing is chosen by, though they may be as wide as there are experts."""
        self.subject, self.forward, self.inputs, self.settings = subject, forward, inputs, settings
        self._no_router = *experts, *beside
        self.experts, self.untried = experts, UntriedExperts(subject.module, experts)
        (made,) = forward.specialisations
        self.state = results.state_of(subject.module, made.stored, made.changed)
        self.tolerance = tolerance_of(subject.dtype)
        self._chooses = False

    def cases(self) -> tuple[VerificationCase, ...]:
        """Up to the first that differs: it is reason enough."""
        try:
            return up_to_different(self._each())
        finally:
            self.state.restore()

    def as_they_are(self, name: str, example: tuple[Any, Any]) -> tuple[Outcome, Outcome] | VerificationCase:
        """What both give of (args, kwargs), without gradients; or the finished case if that cannot be compared."""
        try:
            return self._outcomes(name, Call(example, gradients=False))
        finally:
            self.state.restore()

    def original_of(self, inputs: tuple[Any, Any]) -> Outcome | Exception:
        """What the original gives of (args, kwargs), or the error that it raises. Its state is the caller's to restore."""
        return tried(lambda: self._original(Call(inputs, gradients=False)))

    def _each(self) -> Iterator[VerificationCase]:
        spy = ChoiceSpy(self.inputs.num_experts)
        large = float64_bytes(self.subject.module) > self.settings.many_bytes
        yield self.case("the example", Call(self.inputs.example(self.subject.dtype), spy))
        self._chooses = spy.chooses
        if self.settings.given is not None:
            given = pytree.tree_map_only(torch.Tensor, self._cast, self.settings.given)
            yield self.case("the example as it was given", Call(given))
        if self.forward.specialisations[0].stored:
            example = self.inputs.example(self.subject.dtype)
            yield self.case(SECOND, Call(example, times=2))
        yield from self._at_other_sizes(large)
        for routing in ROUTINGS[:-1]:
            backward = routing is ROUTINGS[0] and not large
            yield self._forced(routing.name, routing, spy.top_k, self.inputs.like_example, backward)
        if self.inputs.num_experts is not None and spy.has_more_numbers:
            routing = under_other_numbers(self.inputs.num_experts)
            yield self._forced(routing.name, routing, spy.top_k, self.inputs.like_example, gradients=False)
        top_k = self.inputs.given_top_k or spy.top_k
        yield from self._all_reached(top_k)
        yield from self._reached_otherwise(top_k)
        for tokens, routing in product(self.settings.overflow_sizes, ROUTINGS[: 1 + self.settings.overflow_last]):
            name = f"{tokens} {routing.name.removeprefix('all ')}"
            yield self._forced(name, routing, spy.top_k, partial(self.inputs.at, 1, tokens), gradients=False)

    def _cast(self, given: torch.Tensor) -> torch.Tensor:
        return given.detach().to(self.subject.dtype if given.is_floating_point() else given.dtype, copy=True)

    def _at_other_sizes(self, large: bool) -> Iterator[VerificationCase]:
        """At the sizes of the settings; where the original takes no other sequences or batches, each on its own, and sequences
        twice as long: the example's may be as long as windows that its code cuts.
        """
        dtype, alone = self.subject.dtype, dict[tuple[int | None, int | None], None]()
        for number, (batch, sequence) in enumerate(self.settings.sizes):
            make = partial(self.inputs.at, batch, sequence, dtype)
            case = self._made(size(batch, sequence), make, gradients=number == 0 and not large)
            others = [(batch, None), (None, sequence)]
            if self.inputs.sizes.sequence > 1:
                others.append((None, 2 * self.inputs.sizes.sequence))
            alone |= dict.fromkeys(others) if case.raised else {}
            yield case
        for batch_or_none, sequence_or_none in alone:
            name = f"batch {batch_or_none}" if sequence_or_none is None else f"sequence {sequence_or_none}"
            make = partial(self.inputs.at, batch_or_none, sequence_or_none, dtype)
            yield self._made(f"{name} alone", make, gradients=False)

    def _made(
        self,
        name: str,
        make: Callable[[], tuple[Any, Any]],
        override: TorchFunctionMode | None = None,
        gradients: bool = True,
    ) -> VerificationCase:
        """A case on fresh inputs; on the example's but for tokens and routing, if others do not keep the example's conditions."""
        case = self.case(name, Call(make(), override, gradients))
        if case.outcome != "skipped" or case.changed or not case.detail.startswith(LEFT):
            return case
        with self.inputs.kept():
            return self.case(name, Call(make(), override, gradients))

    def _all_reached(self, top_k: int) -> Iterator[VerificationCase]:
        """Enough tokens for every expert but the first, so that one unlike the others shows; few at a time in large blocks."""
        experts, rows = self.inputs.num_experts, self.inputs.sizes.tokens
        needed = 0 if experts is None else rows_for_all(experts, top_k)
        if experts is not None and needed > rows:
            room = max(self.settings.few, self.settings.room * rows)
            rows = min(needed, room) if self._in_pieces() else needed
            cases = []
            for routing in in_turns(experts, top_k, rows):
                make = partial(self.inputs.at, 1, rows)
                cases.append(self._forced(routing.name, routing, top_k, make, gradients=True))
                if cases[-1].outcome == "skipped":
                    break
            else:
                yield from cases
                return
            case = self.case(f"{2 * needed} tokens", Call(self.inputs.at(1, 2 * needed, self.subject.dtype)))
            if case.outcome != "skipped":
                yield case
                return
        routing = ROUTINGS[-1]
        yield self._forced(routing.name, routing, top_k, self.inputs.like_example, gradients=True)

    def _reached_otherwise(self, top_k: int) -> Iterator[VerificationCase]:
        """More tokens in sequences of their own, and choices in place of the router's, as long as there are experts without any.

        Code that adds to logits, or scales them, keeps the router from choosing what its logits say.
        """
        experts, routing = self.inputs.num_experts, ROUTINGS[-1]
        if experts is None or self.inputs.given_routing or self._in_pieces():
            return
        inputs = self.inputs.at(rows_for_all(experts, top_k), 1, self.subject.dtype)
        overrides = (LogitsOverride(routing, experts, top_k, self._no_router), RoutingOverride(routing, experts))
        for override in overrides:
            if self.untried:
                yield self.case(f"{routing.name}, by {override.forces}", Call(inputs, override))

    def _in_pieces(self) -> bool:
        return any(isinstance(weight, InPieces) for weight in self.experts)

    def _forced(
        self, name: str, routing: ForcedRouting, top_k: int, make: Callable[..., tuple[Any, Any]], gradients: bool
    ) -> VerificationCase:
        """Forces a routing: through the inputs if they seem to contain it, and in the router inside the block if there is one."""
        given = self.inputs.given_routing
        inputs = partial(make, self.subject.dtype, routing=routing if given else None)
        if given and not self._chooses:
            return self._made(name, inputs, gradients=gradients)
        overrides: list[LogitsOverride | RoutingOverride] = [RoutingOverride(routing, self.inputs.num_experts)]
        if self.inputs.num_experts is not None:
            overrides.insert(0, LogitsOverride(routing, self.inputs.num_experts, top_k, self._no_router))
        for override in overrides:
            case = self._made(name, inputs, override, gradients)
            if override.forced:
                return case
        return case if given else VerificationCase(name, "skipped", detail=NO_ROUTER)

    def case(self, name: str, call: Call) -> VerificationCase:
        """Compares what both do in a call."""
        outcomes, rows = self._outcomes(name, call), call.rows
        if isinstance(outcomes, VerificationCase):
            return outcomes
        original, other = outcomes
        self.untried.see(original.gradients)
        found = difference(original, other)
        if rows is not None:
            of_rows = difference(*rows.compared(original, other))
            found = replace(of_rows, gradient=found.gradient, worst_gradient=found.worst_gradient)
        if self._agree(found):
            return VerificationCase(name, "equal", found.forward, found.gradient)
        again = difference(original, self._original(call))
        detail = self._describe(found)
        if not self._agree(again):
            detail = f"the original does not repeat itself on equal inputs and random numbers ({self._describe(again)})"
        return VerificationCase(name, "different", found.forward, found.gradient, detail)

    def _outcomes(self, name: str, call: Call) -> tuple[Outcome, Outcome] | VerificationCase:
        """Outcomes of the original and the rewritten block, or the finished case if one of them raises.

        Where the original raises, say on no tokens at all, the rewritten block may do without what fails there.
        """
        original, rows = tried(lambda: self._original(call)), call.rows
        raises = f"the original raises {kind_and_line(original)}" if isinstance(original, Exception) else ""
        if isinstance(original, Exception) and (rows is None or not rows.finite or raised_by_user(original)):
            return VerificationCase(name, "skipped", detail=raises, raised=True)
        other = tried(lambda: self._run(self.forward.rewritten, call))
        # Of a `RoutingMiss` nothing has changed in the router here.
        if isinstance(other, GuardMiss) and not isinstance(other, RoutingMiss):
            changed = repr(other.read) if isinstance(other, ReadMiss) else ""
            return VerificationCase(name, "skipped", detail=f"{LEFT}{other}", changed=changed)
        if isinstance(original, Exception) and isinstance(other, Exception):
            return VerificationCase(name, "skipped", detail=raises, raised=True)
        if isinstance(original, Exception):
            return VerificationCase(name, "different", detail=f"only {raises}")
        if isinstance(other, Exception):
            mixed = self.subject.as_it_is and isinstance(other, InputError)  # dtypes, where the code casts its tokens
            detail = _CASTS if mixed else f"the rewritten block raises {kind_and_line(other)}"
            return VerificationCase(name, "different", detail=detail, raised=True)
        return original, other

    def _original(self, call: Call) -> Outcome:
        """Outcome of the original, with sliced weights; should a gradient go astray there, the two outcomes would differ."""
        with sliced(self.experts, call.gradients) as slices:
            return self._run(self.forward.original, call, slices)

    def _run(self, forward: Callable[..., Any], call: Call, slices: WeightSlices | None = None) -> Outcome:
        with ExitStack() as modes:
            if call.rows is not None or self._may_leave_range(call):
                modes.enter_context(no_device_asserts(self.subject.module))
            if self.subject.dtype == torch.float64 and not self.subject.as_it_is:
                modes.enter_context(InFloat64(self.subject.own))
            if call.override is not None:
                modes.enter_context(call.override)

            def repeatedly(*args: Any, **kwargs: Any) -> Any:
                for _ in range(call.times - 1):
                    forward(*args, **kwargs)
                return forward(*args, **kwargs)

            return observe(repeatedly, self.state, call.inputs, call.gradients, slices, self.inputs.asked)

    def _may_leave_range(self, call: Call) -> bool:
        """Whether the block may index out of range: by choices that are no router's, and at sizes that it was not made for."""
        forced = self.inputs.given_routing or isinstance(call.override, RoutingOverride)
        return forced or not self.inputs.sized_like_example(call.inputs)

    def _agree(self, found: Difference) -> bool:
        return not found.reason and max(found.forward, found.gradient) <= self.tolerance

    def _describe(self, found: Difference) -> str:
        if found.reason:
            return found.reason
        if found.forward > self.tolerance:
            return f"{found.worst_value} is off by {found.forward:.1e} of its scale"
        return f"gradient of {found.worst_gradient} is off by {found.gradient:.1e} of its scale"
