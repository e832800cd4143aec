"""Compares the rewritten block with its original before it is accepted: numbers show what static rules cannot.

Both run on the same float64 copy of the block, on the example and on fresh random inputs at several sizes and under forced
routings. Outputs, gradients of every input and parameter, buffers, other values that the modules keep, and the random numbers
drawn have to agree. On the block itself, shapes and dtypes of the results have to agree. Inputs are small, so this costs a few
forward and backward passes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx
from torch import nn
from torch.utils import _pytree as pytree

from hexa_fx import operations as ops
from hexa_fx.capture import record_of
from hexa_fx.ir import RewrittenBlock
from hexa_fx.isolation.lookup import at
from hexa_fx.isolation.outcome import AskedGradients, Outcome, unlike
from hexa_fx.isolation.read_values import gradients_asked
from hexa_fx.isolation.size import float64_bytes
from hexa_fx.operations import operation
from hexa_fx.passes.detect.decisions import is_count, sizes_asked
from hexa_fx.passes.detect.explain import odd_expert
from hexa_fx.passes.detect.free import INSIDE
from hexa_fx.passes.detect.graph import ancestors, descendants, literals
from hexa_fx.passes.detect.match import MoEMatch
from hexa_fx.passes.detect.steps import FreeBody
from hexa_fx.passes.inputs.fresh_inputs import FreshInputs
from hexa_fx.passes.memory import float64_copy_or_none
from hexa_fx.passes.verify.cases import (
    SECOND,
    Subject,
    VerificationCase,
    VerifySettings,
    changes_itself,
    size,
    up_to_different,
)
from hexa_fx.passes.verify.comparison import Comparison, lost_precision
from hexa_fx.passes.verify.perturbed_runs import argument_names, perturbed_cases
from hexa_fx.runtime.forward import HexaForward
from hexa_fx.runtime.install import install, uninstall

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class VerificationResult:
    """Whether a rewritten block may replace its original, and the cases that say so.

    Args:
        ok: whether it may.
        cases: the comparisons, up to the first that differs.
        seconds: what they took.
        reason: why it may not.
        dtype: of the comparison.
        all_reached: whether some case came to every expert's weights, as far as they want gradients.
    """

    ok: bool
    cases: tuple[VerificationCase, ...] = ()
    seconds: float = 0.0
    reason: str = ""
    dtype: torch.dtype = torch.float64
    all_reached: bool = False


def verify_block(
    block: nn.Module,
    rewritten: RewrittenBlock,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    settings: VerifySettings | None = None,
) -> VerificationResult:
    """Compares ``rewritten`` with the forward of ``block`` in the block's present mode (train or eval).

    Args:
        block: the original; afterwards unchanged.
        rewritten: its rewritten forward.
        args, kwargs: an example call. Only kinds, sizes and ranges of its tensors are used.
        settings: see `VerifySettings`.
    """
    started = time.perf_counter()
    return _Verification(block, rewritten, (args, dict(kwargs or {})), settings or VerifySettings()).result(started)


class _Verification:
    def __init__(
        self, block: nn.Module, rewritten: RewrittenBlock, example: tuple[Any, Any], settings: VerifySettings
    ) -> None:
        self.block, self.rewritten, self.example, self.settings = block, rewritten, example, settings
        widths = {size for weight in _expert_weights(block, rewritten) for size in weight.shape[-2:]}
        self.inputs = FreshInputs(*example, rewritten.num_experts, widths)
        self.inputs.asked = self._asked()
        floating = (parameter.dtype for parameter in block.parameters() if parameter.is_floating_point())
        self.own = next(floating, torch.get_default_dtype())

    def result(self, started: float) -> VerificationResult:
        """Of all cases. ``started``: when, by `time.perf_counter`."""
        block, rewritten, settings = self.block, self.rewritten, self.settings
        cases: tuple[VerificationCase, ...] = ()
        for subject in self._subjects():
            dtype = subject.dtype
            with _installed(subject.module, _for_dtype(rewritten, dtype)) as forward:
                experts = _expert_weights(subject.module, rewritten)
                beside = _chosen_by_none(subject.module, rewritten)
                comparison = Comparison(subject, forward, self.inputs, settings, experts, beside)
                cases = comparison.cases()
                if not _reason(cases):
                    backward = float64_bytes(subject.module) <= settings.many_bytes
                    cases += up_to_different(perturbed_cases(comparison, backward))
            if any(case.outcome != "skipped" for case in cases) or changes_itself(cases):
                break
            log.info("%s is verified in its own precision: in %s %s", rewritten.path, dtype, _reason(cases))
        cases += () if _reason(cases) else (self._kinds(),)
        reason = _reason(cases) or _too_little(cases, self.inputs, settings)
        all_reached = not comparison.untried
        if not reason and not all_reached:
            reason = odd_expert(block)
        return VerificationResult(not reason, cases, time.perf_counter() - started, reason, dtype, all_reached)

    def _subjects(self) -> Iterator[Subject]:
        """What to compare on: a float64 copy, or the block itself if there can be none."""
        copied = self._copied()
        if copied is not None:
            yield Subject(copied, torch.float64, self.own)
        yield Subject(self.block, self.own, self.own)

    def _copied(self, as_it_is: bool = False) -> nn.Module | None:
        """The float64 copy, in which a parameter wants no gradient if the code asks whether it does, and it does not."""
        copied = float64_copy_or_none(self.block, self.settings.analysis_bytes, as_it_is)
        if copied is None:
            return None
        asked = (read for read in self.rewritten.reads if not read.is_global and read.steps[1:] == ("requires_grad",))
        for read in asked:
            parameter = copied.get_submodule(read.root)._parameters.get(read.steps[0])
            if parameter is not None and read.value is False:
                parameter.requires_grad_(False)
        return copied

    def _asked(self) -> AskedGradients:
        without = {guard.name for guard in self.rewritten.guards if guard.requires_grad is False}
        names = argument_names(self.block, *self.inputs.example(torch.float64))
        leaves = frozenset(number for number, name in enumerate(names) if name in without)
        asked = gradients_asked(self.rewritten.reads)
        return AskedGradients(None if asked is None else asked[0], leaves)

    def _kinds(self) -> VerificationCase:
        """Runs the block as it is, since a lost cast does not show where everything is float64."""
        name = "the example in its own precision"
        subject = Subject(self.block, self.own, self.own, as_it_is=True)
        with _installed(self.block, self.rewritten) as forward:
            found = Comparison(subject, forward, self.inputs, self.settings, ()).as_they_are(name, self.example)
        if isinstance(found, VerificationCase):
            return found
        detail = unlike(*found) or lost_precision(*found, self._exactly, self.block.parameters())
        return VerificationCase(name, "different" if detail else "equal", detail=detail)

    def _exactly(self) -> Outcome | None:
        """What the block gives of the example in float64, or None if there can be no copy of it in float64."""
        copied = self._copied(as_it_is=True)
        if copied is None:
            return None
        subject = Subject(copied, torch.float64, self.own)
        raised = pytree.tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, self.example)
        with _installed(copied, _for_dtype(self.rewritten, torch.float64)) as forward:
            outcome = Comparison(subject, forward, self.inputs, self.settings, ()).original_of(raised)
        return None if isinstance(outcome, Exception) else outcome


def _for_dtype(rewritten: RewrittenBlock, dtype: torch.dtype) -> RewrittenBlock:
    """The block for a comparison in ``dtype``.

    `InFloat64` raises recorded dtypes too, and autocast leaves float64 alone, so guards on them do not apply there.
    """
    exact = dtype != torch.float64
    guards = (replace(g, exact_dtype=g.exact_dtype and exact) for g in rewritten.guards)
    return replace(rewritten, guards=tuple(guards), autocast=rewritten.autocast if exact else None)


@contextmanager
def _installed(module: nn.Module, rewritten: RewrittenBlock) -> Iterator[HexaForward]:
    forward = install(module, rewritten)
    try:
        yield forward
    finally:
        uninstall(module)


_NOT_BY_THE_REWRITTEN = (
    "which the rewritten block would not; count where the block is called, or register a buffer and add to it"
)


_PASS_ON = "what one call is to know of the one before can be a buffer that is written in place"


def _reason(cases: tuple[VerificationCase, ...]) -> str:
    for case in cases:
        if case.outcome == "different":
            return f"{case.name}: {case.detail}"
    for case in cases:
        if case.name == SECOND and case.changed:
            return f"the code reads {case.changed}, which it sets itself in every call; {_PASS_ON}"
    if all(case.outcome == "skipped" for case in cases):
        if cases[0].changed:
            return f"the code changes {cases[0].changed} in every call, {_NOT_BY_THE_REWRITTEN}"
        return f"nothing could be compared; {cases[0].name}: {cases[0].detail}"
    return ""


def why_refused(result: VerificationResult, match: MoEMatch) -> str:
    """The sentence on a rewritten block that is not ``ok``: an expert that is unlike the others, or what differs."""
    captured = match.captured
    different = next((case for case in result.cases if case.outcome == "different"), None)
    if different is None:
        return result.reason
    said = odd_expert(captured.block) or _kept(different) or _limited(captured.graph) or _drawn(result, match)
    return f"{said} ({result.reason})" if said else f"the rewritten block differs from the original: {result.reason}"


def _limited(graph: torch.fx.Graph) -> str:
    """The sentence on code that compares an expert's number of tokens with a limit: one run need not show what it does beyond."""
    decided = (node for node in graph.nodes if node.op != "output" and record_of(node).decision)
    asked = (node.all_input_nodes[0] if operation(node) == "__bool__" else node for node in decided)
    limits = (node for node in asked if ops.orders(node) and {0.0, 1.0}.isdisjoint(literals([node])))
    counted = (node for node in limits if any(map(is_count, sizes_asked(node) or ancestors([node]))))
    at = next((record_of(node).location for node in counted), None)
    if at is None:
        return ""
    return (
        f"the code decides at {at} by how many tokens an expert gets, and one run shows what it does with them as it went there; "
        "done for all tokens at once, by a mask of those that are kept (torch.where), it can be rewritten"
    )


def _drawn(result: VerificationResult, match: MoEMatch) -> str:
    """The sentence on dropout that is equal on the example alone: the code's order of experts is another one elsewhere."""
    drops = isinstance(match.body, FreeBody) and bool(match.body.dropouts)
    return INSIDE if drops and result.cases[0].outcome == "equal" else ""


def _kept(different: VerificationCase) -> str:
    """The sentence on a plain value that the code keeps, if that is what differs."""
    kind, _, kept = different.detail.partition(": ")[0].partition(" ")
    if kind != "attribute":
        return ""
    name = kept.partition(" ")[0].strip(".")
    return (
        f"the code keeps {name}, which the rewritten block would leave otherwise; what single experts count is not kept, since "
        "they do not run one by one there, and what is counted of the router's choices is"
    )


def _too_little(cases: tuple[VerificationCase, ...], inputs: FreshInputs, settings: VerifySettings) -> str:
    """A sentence if only one token was compared: it looks the same however rows are laid out."""
    if inputs.sizes.tokens != 1:
        return ""
    larger = [size(batch, sequence) for batch, sequence in settings.sizes if batch * sequence > 1]
    if any(case.outcome == "equal" and case.name in larger for case in cases):
        return ""
    details = [case.detail for case in cases if case.name in larger]
    return f"the example has one token, and with more tokens nothing could be compared ({'; '.join(details[:1])})"


def _expert_weights(block: nn.Module, rewritten: RewrittenBlock) -> tuple[torch.Tensor, ...]:
    listed = (path for weight in rewritten.packed for part in weight.parts for path in part)
    found = [at(block, path) for path in listed]
    read = [at(block, str(node.target)) for node in rewritten.graph.nodes if node.op == "get_attr"]
    stacked = (value for value in read if isinstance(value, torch.Tensor) and value.dim() == 3)
    return *(value for value in found if isinstance(value, torch.Tensor)), *stacked


def _chosen_by_none(block: nn.Module, rewritten: RewrittenBlock) -> tuple[torch.Tensor, ...]:
    """The tensors that the graph reads by name and no routing follows from, as the matrices of an adapter on experts' rows."""
    read = rewritten.graph.find_nodes(op="get_attr")
    none = [node for node in read if not any(operation(user) in _ROUTED for user in descendants([node]))]
    found = (at(block, str(node.target)) for node in none)
    return tuple(value for value in found if isinstance(value, torch.Tensor))


_ROUTED = frozenset({"reindex", "moe_ffn"})
"""Operators that are given a routing."""
