"""Original against rewritten block, before the rewrite is accepted: what static rules cannot see, numbers do.

Both run on the same float64 copy of the block, on the example, on fresh random inputs at several sizes and under forced
routings. Outputs, gradients of every input and parameter, buffers, other values that the modules keep, and the random
numbers drawn have to agree. Inputs are small, so the cost is that of a few forward and backward passes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.fx
from torch import nn
from torch.overrides import TorchFunctionMode

from hexa_fx.ir import RewrittenBlock
from hexa_fx.passes.float64_copy import float64_bytes, float64_copy_or_none
from hexa_fx.passes.fresh_inputs import FreshInputs
from hexa_fx.passes.routing_override import ROUTINGS, ChoiceSpy, LogitsOverride, Routing, RoutingOverride
from hexa_fx.runtime.guards import GuardMiss
from hexa_fx.runtime.install import HexaForward, install, uninstall
from hexa_fx.runtime.outcome import Difference, ModuleState, Outcome, difference, observe
from hexa_fx.runtime.precision import InFloat64

log = logging.getLogger(__name__)

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class VerifySettings:
    """How a block is verified.

    Args:
        sizes: (batch, sequence) of the inputs beside the example's own size. Flat inputs get batch times sequence rows.
        many_bytes: a block whose float64 copy is larger has its gradients compared in two cases instead of four; they are what
            takes long. Every block's outputs are compared in all cases.
        brief: compare on the example only, for a mode in which the block does the same as in one that was verified.
        crowd: so many tokens in a row are sent to the same experts, more than the block's capacity if it has one.
        seed: of inputs, cotangents and the random numbers that the block draws.
        max_copy_bytes: a block whose float64 copy would be larger is compared in place, in its own dtype.
        tolerance: largest difference relative to the tensor's scale, by dtype of the comparison.
    """

    sizes: tuple[tuple[int, int], ...] = ((2, 5), (3, 7), (1, 1), (0, 4))
    crowd: int = 160
    brief: bool = False
    seed: int = 0
    many_bytes: int = 256 << 20
    max_copy_bytes: int = 4 << 30
    tolerance: Mapping[torch.dtype, float] = field(default_factory=lambda: dict(_TOLERANCE))


@dataclass(frozen=True)
class VerificationCase:
    """One comparison.

    Args:
        name: which inputs or routing. outcome: skipped if the original raises or a guard keeps the rewritten from it.
        forward_error, gradient_error: largest difference relative to the tensor's scale. detail: why, or where.
        none_became_zero: parameters whose gradient is None in the original and zero in the rewritten block.
    """

    name: str
    outcome: Literal["equal", "different", "skipped"]
    forward_error: float = 0.0
    gradient_error: float = 0.0
    detail: str = ""
    none_became_zero: tuple[str, ...] = ()


@dataclass(frozen=True)
class VerificationResult:
    """Whether a rewritten block may replace its original, and the cases that say so."""

    ok: bool
    cases: tuple[VerificationCase, ...] = ()
    seconds: float = 0.0
    reason: str = ""
    dtype: torch.dtype = torch.float64


def verify(
    block: nn.Module,
    rewritten: RewrittenBlock,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    settings: VerifySettings | None = None,
) -> VerificationResult:
    """Compares ``rewritten`` with the forward of ``block`` in the block's present mode (train or eval).

    Args:
        block: the original; unchanged afterwards, but that per-expert weights may lie side by side.
        rewritten: its rewritten forward.
        args, kwargs: an example call. Only kinds, sizes and ranges of its tensors are used.
        settings: see `VerifySettings`.
    """
    started = time.perf_counter()
    settings = settings or VerifySettings()
    inputs = FreshInputs(args, dict(kwargs or {}), _num_experts(block, rewritten), settings.seed)
    cases: tuple[VerificationCase, ...] = ()
    dtype = torch.float64
    for subject in _subjects(block, settings):
        dtype = subject.dtype
        with _installed(subject.module, _for_dtype(rewritten, dtype)) as forward:
            experts = _expert_weights(subject.module, rewritten)
            cases = _Comparison(subject, forward, inputs, settings, experts).cases()
        if any(case.outcome != "skipped" for case in cases):
            break
        log.info("%s is verified in its own precision: in %s %s", rewritten.path, dtype, _reason(cases))
    reason = _reason(cases) or _too_little(cases, inputs, settings)
    return VerificationResult(not reason, cases, time.perf_counter() - started, reason, dtype)


def _for_dtype(rewritten: RewrittenBlock, dtype: torch.dtype) -> RewrittenBlock:
    """`InFloat64` raises recorded dtype literals too, so a guard on the recorded dtype does not apply there."""
    if dtype != torch.float64:
        return rewritten
    return replace(rewritten, guards=tuple(replace(guard, exact_dtype=False) for guard in rewritten.guards))


@dataclass(frozen=True)
class _Subject:
    module: nn.Module
    dtype: torch.dtype


def _subjects(block: nn.Module, settings: VerifySettings) -> Iterator[_Subject]:
    """What to compare on: a float64 copy, or the block itself if there can be none."""
    if float64_bytes(block) <= settings.max_copy_bytes:
        copied = float64_copy_or_none(block)
        if copied is not None:
            yield _Subject(copied, torch.float64)
    floating = (parameter.dtype for parameter in block.parameters() if parameter.is_floating_point())
    yield _Subject(block, next(floating, torch.get_default_dtype()))


@contextmanager
def _installed(module: nn.Module, rewritten: RewrittenBlock) -> Iterator[HexaForward]:
    forward = install(module, *((rewritten, None) if module.training else (None, rewritten)))
    try:
        yield forward
    finally:
        uninstall(module)


class _Comparison:
    def __init__(
        self,
        subject: _Subject,
        forward: HexaForward,
        inputs: FreshInputs,
        settings: VerifySettings,
        experts: tuple[torch.Tensor, ...],
    ) -> None:
        self.subject, self.forward, self.inputs, self.settings = subject, forward, inputs, settings
        self.experts = experts
        self.state = ModuleState(subject.module)
        self.tolerance = settings.tolerance.get(subject.dtype, _TOLERANCE[torch.float16])

    def cases(self) -> tuple[VerificationCase, ...]:
        try:
            return tuple(self._each())
        finally:
            self.state.restore()

    def _each(self) -> Iterator[VerificationCase]:
        spy = ChoiceSpy(self.inputs.num_experts)
        large = float64_bytes(self.subject.module) > self.settings.many_bytes
        yield self._case("the example", self.inputs.example(self.subject.dtype), spy)
        if self.forward.stored[bool(self.subject.module.training)]:
            example = self.inputs.example(self.subject.dtype)
            yield self._case("a second call, which sees what the first one stored", example, calls=2)
        if self.settings.brief:
            return
        for number, (batch, sequence) in enumerate(self.settings.sizes):
            given = self.inputs.at(batch, sequence, self.subject.dtype)
            yield self._case(_size(batch, sequence), given, gradients=number == 0 and not large)
        for routing in ROUTINGS:
            backward = routing is ROUTINGS[-1] or (routing is ROUTINGS[0] and not large)
            yield self._forced(routing.name, routing, spy.top_k, self.inputs.like_example, backward)
        many = partial(self.inputs.at, 1, self.settings.crowd)
        name = f"{self.settings.crowd} tokens to the first experts"
        yield self._forced(name, ROUTINGS[0], spy.top_k, many, gradients=False)

    def _forced(
        self, name: str, routing: Routing, top_k: int, make: Callable[..., tuple[Any, Any]], gradients: bool
    ) -> VerificationCase:
        """Through the inputs where the block is given its routing, else in the router inside."""
        if self.inputs.given_routing:
            return self._case(name, make(self.subject.dtype, routing=routing), gradients=gradients)
        inputs = make(self.subject.dtype)
        overrides: list[LogitsOverride | RoutingOverride] = [RoutingOverride(routing, self.inputs.num_experts)]
        if self.inputs.num_experts is not None:
            overrides.insert(0, LogitsOverride(routing, self.inputs.num_experts, top_k, self.experts))
        for override in overrides:
            case = self._case(name, inputs, override, gradients)
            if override.forced:
                return case
        return VerificationCase(name, "skipped", detail="there is no router inside that could be overridden")

    def _case(
        self,
        name: str,
        inputs: tuple[Any, Any],
        override: TorchFunctionMode | None = None,
        gradients: bool = True,
        calls: int = 1,
    ) -> VerificationCase:
        reference = _repeated(self.forward.original, calls)
        try:
            original = self._run(reference, inputs, override, gradients)
        except Exception as error:
            return VerificationCase(name, "skipped", detail=f"the original raises {_first_line(error)}")
        try:
            other = self._run(_repeated(self.forward.rewritten, calls), inputs, override, gradients)
        except GuardMiss as miss:
            return VerificationCase(name, "skipped", detail=f"left to the original: {miss}")
        except Exception as error:
            return VerificationCase(name, "different", detail=f"the rewritten block raises {_first_line(error)}")
        found = difference(original, other)
        if self._agree(found):
            return VerificationCase(name, "equal", found.forward, found.gradient, "", found.none_became_zero)
        again = difference(original, self._run(reference, inputs, override, gradients))
        detail = self._describe(found)
        if not self._agree(again):
            detail = f"the original does not repeat itself on equal inputs and random numbers ({self._describe(again)})"
        return VerificationCase(name, "different", found.forward, found.gradient, detail)

    def _run(
        self, call: Callable[..., Any], inputs: tuple[Any, Any], override: TorchFunctionMode | None, gradients: bool
    ) -> Outcome:
        with ExitStack() as modes:
            if self.subject.dtype == torch.float64:
                modes.enter_context(InFloat64())
            if override is not None:
                modes.enter_context(override)
            return observe(call, self.subject.module, self.state, inputs, self.settings.seed, gradients)

    def _agree(self, found: Difference) -> bool:
        return not found.reason and max(found.forward, found.gradient) <= self.tolerance

    def _describe(self, found: Difference) -> str:
        if found.reason:
            return found.reason
        if found.forward > self.tolerance:
            return f"{found.worst_value} is off by {found.forward:.1e} of its scale"
        return f"gradient of {found.worst_gradient} is off by {found.gradient:.1e} of its scale"


def _repeated(call: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """A function that calls ``call`` so many times and gives the last result."""

    def run(*args: Any, **kwargs: Any) -> Any:
        for _ in range(calls - 1):
            call(*args, **kwargs)
        return call(*args, **kwargs)

    return run


def _reason(cases: tuple[VerificationCase, ...]) -> str:
    for case in cases:
        if case.outcome == "different":
            return f"{case.name}: {case.detail}"
    if all(case.outcome == "skipped" for case in cases):
        return f"nothing could be compared; {cases[0].name}: {cases[0].detail}"
    return ""


def _too_little(cases: tuple[VerificationCase, ...], inputs: FreshInputs, settings: VerifySettings) -> str:
    """One token looks the same however rows are laid out, so others must have been compared beside it."""
    if not inputs.one_token or settings.brief:
        return ""
    larger = [_size(batch, sequence) for batch, sequence in settings.sizes if batch * sequence > 1]
    if any(case.outcome == "equal" and case.name in larger for case in cases):
        return ""
    details = [case.detail for case in cases if case.name in larger]
    return f"the example has one token, and with more tokens nothing could be compared ({'; '.join(details[:1])})"


def _size(batch: int, sequence: int) -> str:
    return f"batch {batch}, sequence {sequence}"


def _num_experts(block: nn.Module, rewritten: RewrittenBlock) -> int | None:
    """As the rewrite says, else the length of the packed lists, or of the stacked weights that the graph reads."""
    if rewritten.num_experts is not None:
        return rewritten.num_experts
    if rewritten.packed:
        return len(rewritten.packed[0].parts[0])
    lengths = [weight.shape[0] for weight in _stacked_weights(block, rewritten)]
    return max(set(lengths), key=lengths.count) if lengths else None


def _expert_weights(block: nn.Module, rewritten: RewrittenBlock) -> tuple[torch.Tensor, ...]:
    listed = (path for weight in rewritten.packed for part in weight.parts for path in part)
    found = [_value_at(block, path) for path in listed]
    return *(value for value in found if isinstance(value, torch.Tensor)), *_stacked_weights(block, rewritten)


def _stacked_weights(block: nn.Module, rewritten: RewrittenBlock) -> list[torch.Tensor]:
    """The tensors of three dimensions that the graph reads."""
    read = [_value_at(block, str(node.target)) for node in rewritten.graph.nodes if node.op == "get_attr"]
    return [value for value in read if isinstance(value, torch.Tensor) and value.dim() == 3]


def _value_at(block: nn.Module, path: str) -> Any:
    value: Any = block
    for key in path.split("."):
        value = getattr(value, key, None)
    return value


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
