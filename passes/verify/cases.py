"""What a verification compares, how it calls it, and what came of it, case by case: at which sizes, in how many tokens, past which
limits of a block's own code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.fx
from torch import nn
from torch.utils import _pytree as pytree

from hexa_fx import operations as ops
from hexa_fx.capture import CapturedBlock, record_of
from hexa_fx.capture.probes import OVERFLOW_TOKENS, decides_between_numbers, overflow_sizes
from hexa_fx.config import HexaConfig
from hexa_fx.isolation.module_tree import named_tensors
from hexa_fx.isolation.outcome import Outcome, largest_of, wide
from hexa_fx.isolation.size import FEW_TOKENS, InPieces, is_out_of_memory
from hexa_fx.passes.detect.graph import is_float, literals
from hexa_fx.passes.memory import room

_has_limit = ops.of(
    "clamp clamp_min clamp_max minimum maximum max min hardtanh relu6 hardsigmoid hardswish threshold softplus softshrink "
    "hardshrink celu lt le gt ge where nan_to_num"
)
"""Operations that treat numbers differently on the two sides of a constant."""

MAGNITUDES = (1e3, 1e-3)
"""Factors on tokens that every block is tried with."""
_FURTHEST = 1e8

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2}


def tolerance_of(dtype: torch.dtype) -> float:
    """Largest accepted difference relative to the tensor's scale, where the comparison is in this dtype."""
    return _TOLERANCE.get(dtype, 1e-2)


@dataclass(frozen=True)
class VerifySettings:
    """How a block is verified.

    Args:
        sizes: (batch, sequence) of the inputs beside the example's own size. Flat inputs get batch times sequence rows.
        many_bytes: if the float64 copy is larger than this, gradients, which take the time, are compared in two cases instead
            of four. Outputs are compared in all cases.
        overflow_sizes: how many tokens in a row are sent to the same experts: more than the block's capacity, if it has one.
        overflow_last: whether to send them to the last experts too.
        factors: on the tokens, beyond the constants that the block compares with; see `hexa_fx.passes.verify.perturbed_runs`.
        analysis_bytes: memory that the comparison may hold beside the model; see `HexaConfig`.
        few: tokens that a block whose weights are raised in pieces is tried on at a time, to reach all experts in turns.
        room: times the tokens of the example that it may be tried on, if that is more.
        given: (args, kwargs) that the user gave, where the block is verified by an example of other tokens or another scale.
    """

    sizes: tuple[tuple[int, int], ...] = ((2, 5), (1, 7), (6, 1), (1, 1), (0, 4))
    overflow_sizes: tuple[int, ...] = (160,)
    overflow_last: bool = False
    factors: tuple[float, ...] = ()
    many_bytes: int = 256 << 20
    analysis_bytes: int = 2 << 30
    few: int = FEW_TOKENS
    room: int = 1
    given: tuple[Any, Any] | None = None


def unlike(given: tuple[Any, Any] | None, example: tuple[Any, Any]) -> tuple[Any, Any] | None:
    """What is ``given`` if the ``example`` is another one; None also where not all of its numbers are finite."""
    one, two = pytree.tree_leaves(given), pytree.tree_leaves(example)
    tensors = [(a, b) for a, b in zip(one, two) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)]
    if given is None or not all(bool(tensor.isfinite().all()) for tensor, _ in tensors):
        return None
    return None if all(a.shape == b.shape and torch.equal(a, b) for a, b in tensors) else given


def settings_of(captured: CapturedBlock, config: HexaConfig, given: tuple[Any, Any] | None = None) -> VerifySettings:
    """The settings for a block, by its recorded run, and for what is ``given`` if that is no run on it."""
    in_pieces = captured.whole_bytes is not None
    return VerifySettings(
        overflow_sizes=overflow_sizes(captured.graph, config.probe_tokens if in_pieces else OVERFLOW_TOKENS),
        overflow_last=decides_between_numbers(captured.graph),
        few=config.probe_tokens,
        room=room(captured, config),
        factors=factors_past_limits(captured.graph),
        analysis_bytes=config.analysis_bytes,
        given=given,
    )


def factors_past_limits(graph: torch.fx.Graph) -> tuple[float, ...]:
    """Factors on a block's inputs at which values lie beyond the constants that the recorded code compares them with."""
    found = set()
    for node in graph.nodes:
        if not _has_limit(node):
            continue
        floats = [record_of(operand).value for operand in node.all_input_nodes if is_float(operand)]
        largest = max((float(value.abs().nan_to_num(0, 0, 0).max()) for value in floats if value.numel()), default=0.0)
        found |= {abs(limit) / largest for limit in literals([node]) if largest and limit}
    far = {min(8 * ratio, _FURTHEST) for ratio in found if 8 * ratio > MAGNITUDES[0]}
    near = {max(ratio / 8, 1 / _FURTHEST) for ratio in found if ratio / 8 < MAGNITUDES[1]}
    return tuple(sorted([*sorted(far)[-1:], *sorted(near)[:1]]))


SECOND = "a second call, which sees what the first one stored"
NO_ROUTER = "there is no router inside that could be overridden"


@dataclass(frozen=True)
class VerificationCase:
    """One comparison.

    Args:
        name: which inputs or routing.
        outcome: ``skipped`` if the original raises, or a guard keeps the rewritten block from running.
        forward_error, gradient_error: largest difference relative to the tensor's scale.
        detail: why it was skipped, or where the two differ.
        raised: whether it was skipped because the original raises, or differs because the rewritten block does.
        changed: what a guard reads that the code itself has changed, if it was skipped for that.
    """

    name: str
    outcome: Literal["equal", "different", "skipped"]
    forward_error: float = 0.0
    gradient_error: float = 0.0
    detail: str = ""
    raised: bool = False
    changed: str = ""


@dataclass(frozen=True)
class Subject:
    """What is compared: the block itself, or a copy of it in ``dtype`` of one in ``own``.

    As it is, casts that its code asks for are made.
    """

    module: nn.Module
    dtype: torch.dtype
    own: torch.dtype
    as_it_is: bool = False


@dataclass(frozen=True)
class ByRows:
    """How two outcomes are compared whose rows have magnitudes of their own: each by its own scale.

    Args:
        finite: whether all of the original counts, be it an error, NaN or infinity; else only its finite results do.
        poisoned: (T,) tokens that were given as NaN, whose own rows say nothing.
    """

    finite: bool = True
    poisoned: torch.Tensor | None = None

    def compared(self, original: Outcome, other: Outcome) -> tuple[Outcome, Outcome]:
        """The values of both in units of the original's rows, with zeros for what does not count."""
        ones, twos = dict(original.values), dict(other.values)
        for name in ones.keys() & twos.keys():
            ones[name], twos[name] = self._in_units(ones[name], twos[name])
        return Outcome(ones, {}, original.facts), Outcome(twos, {}, other.facts)

    def _in_units(self, one: torch.Tensor, two: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if (one.shape, one.dtype) != (two.shape, two.dtype) or not one.numel():
            return one, two
        one, two = (torch.atleast_1d(wide(value)) for value in (one, two))
        usual = one.isfinite()
        if self.poisoned is not None and one.shape[:-1].numel() == len(self.poisoned):
            usual &= ~self.poisoned.reshape(*one.shape[:-1], 1)
        counts = usual | two.isfinite() if self.finite else usual
        one, two = one.where(counts, 0.0), two.where(counts, 0.0)
        scale = one.abs().nan_to_num(0.0, 0.0, 0.0).amax(-1, keepdim=True).clamp(min=_TINY)
        return one / scale, two / scale


_TINY = 1e-150
"""A row of the original that is zero is to be zero."""


def up_to_different(cases: Iterator[VerificationCase]) -> tuple[VerificationCase, ...]:
    """The cases up to the first that differs, which is reason enough, or until the code itself changed what it reads in some."""
    found: list[VerificationCase] = []
    for case in cases:
        found.append(case)
        if case.outcome == "different" or (len(found) == _ENOUGH and changes_itself(found)):
            break
    return tuple(found)


_ENOUGH = 3


def changes_itself(cases: Sequence[VerificationCase]) -> bool:
    """Whether nothing could be compared since every call of the original changed what the rewritten block would read."""
    return bool(cases) and all(case.outcome == "skipped" and case.changed for case in cases)


def differs_on_nothing(cases: Sequence[VerificationCase]) -> bool:
    """Whether what differs first, having been equal on the example, is that there are no tokens at all."""
    different = next((case.name for case in cases if case.outcome == "different"), "")
    return cases[:1] != () and cases[0].outcome == "equal" and different.startswith(NOTHING)


NOTHING = "batch 0,"


def size(batch: int, sequence: int) -> str:
    """The name of a case at that size."""
    return f"batch {batch}, sequence {sequence}"


def tried(run: Callable[[], Outcome]) -> Outcome | Exception:
    """What ``run`` gives, or the error that it raises. Where memory is full, the error goes on to the caller."""
    try:
        return run()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return error


class UntriedExperts:
    """The experts' weights that no gradient of the original came to so far.

    Weights without gradients of their own are left out: frozen ones, and those of large blocks, which have products instead.
    """

    def __init__(self, module: nn.Module, weights: Sequence[torch.Tensor]) -> None:
        names = {id(parameter): name for name, parameter in named_tensors(module, "_parameters").items()}
        known = [w for w in weights if id(w) in names and w.requires_grad and not isinstance(w, InPieces)]
        self._listed = {names[id(w)] for w in known if w.dim() <= 2}
        self._left = {names[id(w)]: torch.ones(len(w), dtype=torch.bool, device="cpu") for w in known if w.dim() > 2}

    def see(self, gradients: Mapping[str, torch.Tensor | None]) -> None:
        """Leaves out what has a gradient that is not zero."""
        listed = {name: gradient for name in self._listed if (gradient := gradients.get(name)) is not None}
        sizes = largest_of([gradient.detach() for gradient in listed.values()])
        self._listed -= {name for name, size in zip(listed, sizes) if size}  # NaN is not zero
        for name, left in self._left.items():
            gradient = gradients.get(name)
            if gradient is not None and bool(left.any()):
                left &= (gradient.reshape(len(left), -1) == 0).all(1).cpu()

    def __bool__(self) -> bool:
        return bool(self._listed) or any(bool(left.any()) for left in self._left.values())
