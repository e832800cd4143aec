"""Analyses a call of a kind that a block was not rewritten for, in the middle of the user's forward, without disturbing it."""

from __future__ import annotations

import contextvars
import functools
import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from hexa_fx.analysis import analyse_level
from hexa_fx.capture.copies import copied
from hexa_fx.capture.host import compiled_as_python
from hexa_fx.capture.observe import Observation
from hexa_fx.capture.probes import probe_inputs
from hexa_fx.config import HexaConfig
from hexa_fx.describe import describe
from hexa_fx.errors import CaptureError, InputError, PlanError, RankError
from hexa_fx.inspection.block_report import BlockReport
from hexa_fx.inspection.inspector import Inspector
from hexa_fx.ir import RewrittenBlock
from hexa_fx.isolation.contents import Sandbox
from hexa_fx.isolation.lookup import number_at
from hexa_fx.isolation.module_tree import with_ancestors
from hexa_fx.isolation.read_values import alike, gradients_asked
from hexa_fx.isolation.shadow import FORWARD, PUT_ON, InPlace, put_apart, shadow_of
from hexa_fx.isolation.torch_state import autocast_uncached, random_state_kept
from hexa_fx.isolation.written_tensors import gradients_kept
from hexa_fx.passes.block_analysis import BlockAnalysis, StructureCache, moved_to
from hexa_fx.passes.kernel_requests import kernels_requested
from hexa_fx.passes.memory import NO_MEMORY
from hexa_fx.passes.preconditions import why_partitioned
from hexa_fx.runtime.call_kinds import RefusedKind, said_of_sizes, why_not_analysed
from hexa_fx.runtime.forward import HexaForward
from hexa_fx.runtime.guards import GuardMiss, ReadMiss
from hexa_fx.runtime.install import install, is_installed
from hexa_fx.runtime.specialisation import Specialisation
from hexa_fx.sources.garbage import collected_after

log = logging.getLogger(__name__)

_analysing = threading.RLock()
"""One analysis at a time: it exchanges functions of Python and torch for ones that note what runs."""

_AGAIN = 10
"""Calls after which a block is analysed again that memory was too short for; ten times as many the next time."""

_NOT_RECORDED = CaptureError.message.partition("{")[0]

_TOO_MANY = (
    "it was analysed for {} kinds of calls, as many as HexaConfig(specialisations=...) allows; what changed last: {}"
)


@dataclass(eq=False)
class Specialiser:
    """What the blocks of one model are analysed with. Copies of the model share it; a pickle keeps the options.

    Args:
        config: the options.
        finish: makes of a rewritten block what is installed.
        cache: analyses that hold for identical blocks.
        reports: of blocks that were first analysed, or first rewritten, when they were called, by path.
        written: paths of blocks whose inputs are written to after the call.
    """

    config: HexaConfig
    finish: Callable[[RewrittenBlock, HexaConfig], RewrittenBlock]
    cache: StructureCache
    reports: dict[str, BlockReport]
    written: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self._inspector = Inspector()
        self._around: set[str] = set()
        """Paths of modules around blocks, which are no blocks of their own unless they are rewritten."""

    def specialise(
        self, forward: HexaForward, args: tuple[Any, ...], kwargs: dict[str, Any], miss: GuardMiss | None, tried: int
    ) -> str:
        """See `hexa_fx.runtime.forward.Analyst`."""
        # What context variables say is of the user's forward: hooks that collect what modules give collect nothing here.
        run: Callable[[], str] = functools.partial(
            contextvars.Context().run, self._specialise, forward, args, kwargs, miss, tried
        )
        return torch.compiler.disable(run)() if "torch._dynamo" in sys.modules else run()

    def _specialise(
        self, forward: HexaForward, args: tuple[Any, ...], kwargs: dict[str, Any], miss: GuardMiss | None, tried: int
    ) -> str:
        module = forward.module
        if forward.exhausted:
            return forward.exhausted
        before = bool(forward.specialisations) and not forward.saved_own
        if reason := why_not_analysed(before) or why_partitioned(module):
            return f"{miss or 'it was not analysed yet'}; this call cannot be analysed: {reason}"
        with _analysing:
            known = forward.refusal_of(args, kwargs, miss)
            if known is not None:  # by another thread meanwhile
                return known.reason
            if any(_takes(each, forward, args, kwargs) for each in forward.specialisations[tried:]):
                return ""
            count, most = len(forward.specialisations) + len(forward.refused), self.config.specialisations
            if count >= most:
                forward.exhausted = _TOO_MANY.format(most, miss or "a call of another kind")
                return forward.exhausted
            return self._analysed(forward, module, args, kwargs, miss)

    def _analysed(
        self,
        forward: HexaForward,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        miss: GuardMiss | None,
    ) -> str:
        first, left, analysis, reason = not forward.specialisations, bool(forward.refused), None, ""
        gradients, missed = torch.is_grad_enabled(), said_of_sizes(miss)
        # By sizes, or by what a module counts with: then the same would exclude this call again.
        but = {each.origin for each in forward.specialisations if missed}
        try:
            with undisturbed():
                for asked in _asked(forward, miss):
                    analysis, same_as = self._analyse(forward, module, args, kwargs, True, asked, but)
                    if analysis.rewritten is not None:
                        break
                    new = asked.keys() - forward.numbers.keys()
                    forward.numbers |= dict.fromkeys(new) if len(new) == 1 else {}
                assert analysis is not None
                forward.numbers |= asked
                if not gradients and gradients_asked(analysis.reads) is not None:
                    analysis, same_as = self._analyse(forward, module, args, kwargs, gradients, asked, but)
                self.cache.forget_runs()
                is_said = first and not left and forward.path not in self._around
                if analysis.rewritten is not None:
                    self._add(forward, analysis.rewritten)
                    is_said = len(forward.specialisations) == 1
                if is_said:
                    block = module if analysis.captured is None else analysis.captured.block
                    with Sandbox(block):  # its code runs once more
                        report = describe(analysis.placed_in(module), same_as, self._inspector)
                    self.reports[forward.path] = replace(report, forward=forward)
                if analysis.rewritten is not None:
                    return ""
                reason = analysis.refusal.reason if analysis.refusal else ""
        except RankError:
            raise
        except (GuardMiss, InputError, PlanError) as error:
            reason = str(error)
        except Exception as error:  # of ours: the user's forward goes on in its own code
            log.exception("hexa_fx failed on %s; please report this", forward.path or "the model")
            reason = f"hexa_fx itself failed here with {type(error).__name__}: {error}"
        tokens = self.config.probe_tokens
        over = next((kind.lasted for kind in forward.refused if kind.is_over), None)
        calls = _AGAIN * (over or 1) if reason.startswith(NO_MEMORY) else None
        reads = () if analysis is None else analysis.reads
        kind = RefusedKind(module, args, kwargs, reason, reads, forward.own_forward, tokens, missed, calls)
        forward.refuse(kind)
        recorded = not reason.startswith(_NOT_RECORDED)  # else no module around it can be, either
        if (forward.specialisations or forward.around) and analysis is not None and not analysis.settled and recorded:
            self._try_around(forward)
        return reason

    def _try_around(self, forward: HexaForward) -> None:
        """Has the module around a block analysed when it is called next, if it is rewritten in calls of other kinds only, or not at
        all as it could first be read in a call: what it misses, such as who chooses the experts, may be there."""
        model, block = forward.within() if forward.within is not None else None, forward.module
        if model is None:
            return
        name = next((name for name, module in model.named_modules() if module is block), "")
        for path in forward.around or [*with_ancestors(name)][1:]:
            around = model.get_submodule(path)
            if type(around).forward is nn.Module.forward:  # a list
                continue
            others = (vars(module).get(FORWARD) for module in around.modules() if module not in (block, around))
            if not is_installed(around) and all(map(_is_refused_or_none, others)):
                of_model = f"{forward.path.removesuffix(name)}{path}".strip(".")
                installed = install(around, path=of_model, analyst=self)
                installed.within, installed.around, forward.around = forward.within, forward.around[1:], ()
                installed.inner, forward.waits = forward, True
                self._around.add(of_model)
            return

    def _analyse(
        self,
        forward: HexaForward,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        gradients: bool = True,
        asked: Mapping[str, float] = MappingProxyType({}),
        but: Collection[int] = (),
    ) -> tuple[BlockAnalysis, str | None]:
        """Analyses a call on a shadow of the block, unless an identical block was called like this before.

        Args:
            asked: see `Observation.numbers`. but: see `StructureCache.but`.
        """
        config, shadow, cache = self.config, self._shadow(forward, module), self.cache.but(but)
        put_apart(shadow, asked)
        call = copied_call(args, kwargs, config.probe_tokens)
        written = forward.path in self.written
        observation = Observation(forward.path, shadow, *call, gradients=gradients, written=written, numbers=asked)
        if (known := cache.find(observation)) is not None:
            return moved_to(known, forward.path), known.path
        with (
            Sandbox(shadow),
            collected_after(shadow),
            compiled_as_python(),
            gradients_kept(shadow),
            kernels_requested(config.compute),
        ):
            return analyse_level(observation, config, cache, config.compute == "native")

    def _shadow(self, forward: HexaForward, module: nn.Module) -> nn.Module:
        """What is analysed in the place of a block."""
        return shadow_of(module, frozenset({*PUT_ON, "report", "graphs"}), forward.own_forward)

    def _add(self, forward: HexaForward, rewritten: RewrittenBlock) -> None:
        """Adds what was made of a block for calls of another kind."""
        forward.add(self.finish(rewritten, self.config))

    def __deepcopy__(self, memo: dict[int, Any]) -> Specialiser:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Specialiser, (self.config, self.finish, StructureCache(), self.reports, self.written)


def _asked(forward: HexaForward, miss: GuardMiss | None) -> Iterator[dict[str, float]]:
    """Numbers that modules keep, and objects there, and that every call is to ask for, by name, as they were: those that are known
    and all that have changed; then of these only one, whose change kept a call from what was made of earlier ones; none.
    """
    module, missed = forward.module, miss.read if isinstance(miss, ReadMiss) else ""
    known = {name: number for name, number in forward.numbers.items() if number is not None}
    known = {name: number for name, number in known.items() if number_at(module, name) is not None}
    made = forward.specialisations if missed else ()
    before: dict[str, Any] = {}
    for read in (read for each in made for read in each.attributes.reads if not read.is_global):
        before[str(read)] = read.value
    numbers = (name for name in before.keys() - forward.numbers.keys() if type(before[name]) in _NUMBERS)
    now = {name: number_at(module, name) for name in numbers}
    changed = {
        name: before[name] for name in sorted(now) if now[name] is not None and not alike(now[name], before[name])
    }
    first = missed if missed in changed else next(iter(changed), "")
    yield known | changed
    if len(changed) > 1:
        yield known | {first: changed[first]}
    if known or changed:
        yield {}


def _is_refused_or_none(forward: object) -> bool:
    if isinstance(forward, HexaForward):
        return bool(forward.refused) and not forward.specialisations
    return not isinstance(forward, InPlace)


_NUMBERS = (int, float)


def _takes(made: Specialisation, forward: HexaForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a specialisation that another thread added takes a call, but for sizes."""
    try:
        made.meet(forward.module, forward.arguments, args, kwargs)
    except GuardMiss:
        return False
    return True


def copied_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], most_tokens: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a call as an analysis may use them: cut to few tokens, copied, and without a past."""
    args, kwargs = probe_inputs(args, kwargs, most_tokens)
    return copied(args), copied(kwargs)


@contextmanager
def undisturbed() -> Iterator[None]:
    """A context in which an analysis may run whatever the user's forward is in the middle of.

    It neither sees nor leaves anything of inference mode, gradient mode, hooks on saved tensors, casts that autocast keeps, and
    random numbers. Autocast itself is as it was: the call is analysed under it.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_apart, lambda tensor: tensor))
        stack.enter_context(autocast_uncached())
        stack.enter_context(random_state_kept())
        yield


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its place in the graph, which autograd puts it back to.

    A function that keeps its own result, as a sigmoid does, would else be kept by it for good, with all weights before it.
    """
    return tensor if tensor.grad_fn is None else tensor.detach()
