"""What the passes hand on of one block, for one kind of call, and for blocks of the model that differ only in the values of their
parameters.

Two blocks share an analysis if they consist of modules and parameters of the same kinds and shapes, each under the same names, and
the second gives everything that the runs of the first read from Python as the first gave it. Nothing else can make them differ.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hexa_fx.capture import CapturedBlock
from hexa_fx.capture.calls import written_at
from hexa_fx.capture.observe import Observation
from hexa_fx.ir import PythonRead, Refusal, RewrittenBlock
from hexa_fx.isolation.lookup import number_at
from hexa_fx.isolation.module_tree import inside, kept_tensors, named_modules, one_by_another, tensors_by_name
from hexa_fx.isolation.torch_state import autocast_state
from hexa_fx.passes.detect import MoEMatch
from hexa_fx.passes.verify import VerificationResult
from hexa_fx.runtime.attribute_guards import HOOKS_OF_ALL
from hexa_fx.runtime.guards import HOOKS
from hexa_fx.runtime.resolution import holds
from hexa_fx.sources.linear4bit import shape_of

Mode = Literal["eval", "train"]


def mode_of(block: nn.Module) -> Mode:
    """The mode that a block is in."""
    return "train" if block.training else "eval"


@dataclass(frozen=True)
class BlockAnalysis:
    """What the passes made of one block as it was called.

    Args:
        path: the block's path.
        match: the region, if one was found.
        captured: the recorded run, if the block was rewritten at first.
        rewritten, refusal: exactly one of them is there.
        check: how what was rewritten at first compared; None if verification is off.
        seconds: time of capture, detection and rewriting.
        reads: what the runs read from Python.
        training: the mode, if the code asks for it; None if the other mode would give the same.
    """

    path: str
    match: MoEMatch | None = None
    captured: CapturedBlock | None = None
    rewritten: RewrittenBlock | None = None
    refusal: Refusal | None = None
    check: VerificationResult | None = None
    seconds: float = 0.0
    reads: tuple[PythonRead, ...] = ()
    training: bool | None = None

    def placed_in(self, block: nn.Module) -> BlockAnalysis:
        """With a place for a refusal that has none: the block's code, where no line of it is the reason."""
        if self.refusal is None or self.refusal.location:
            return self
        return replace(self, refusal=replace(self.refusal, location=written_at(block)))

    @property
    def asks_for_gradients(self) -> bool:
        return self.rewritten is not None and any(guard.requires_grad is not None for guard in self.rewritten.guards)

    def holds(self, block: nn.Module) -> bool:
        """Whether a block gives what was read, and is in the mode, if the code asks for it."""
        if self.training is None:
            return holds(block, [read for read in self.reads if read.steps[-1] != "training"])
        return bool(block.training) is self.training and holds(block, self.reads)

    @property
    def elsewhere(self) -> bool:
        """Whether it is refused because code around it gives tokens to experts."""
        return self.refusal is not None and self.refusal.elsewhere

    @property
    def settled(self) -> bool:
        """Whether it is refused for what other inputs, and modules around it, would not change."""
        return self.refusal is not None and self.refusal.settled


def refused(refusal: Refusal) -> BlockAnalysis:
    """Of a block that is left as it is."""
    return BlockAnalysis(refusal.path, refusal=refusal)


_PLAIN = (int, float, str, bool, type(None))


_Known = dict[Hashable, list[tuple[list[bool], BlockAnalysis]]]
"""With which of the tensors wanted a gradient, which counts only where the code asks."""


class StructureCache:
    """Analyses by the kinds and shapes of modules, parameters and inputs, by autocast, and by what was read.

    ``part``: path in the model of the part that is analysed; analyses are kept by their paths in the model.
    """

    def __init__(self, part: str = "", but: Collection[int] = (), known: _Known | None = None) -> None:
        self._known: _Known = {} if known is None else known
        self._part, self._but = part, but

    def within(self, part: str) -> StructureCache:
        """The same analyses, for blocks of a part of the model."""
        return StructureCache(part, (), self._known)

    def but(self, origins: Collection[int]) -> StructureCache:
        """The same but for what was made of reads with these ids: conditions on what modules count with exclude a call."""
        return StructureCache(self._part, origins, self._known)

    def find(self, observation: Observation) -> BlockAnalysis | None:
        alike, wanted = self._known.get(_key(observation), ()), _wanted(observation)
        takes = (known for before, known in alike if before == wanted or not known.asks_for_gradients)
        takes = (known for known in takes if known.rewritten is None or id(known.rewritten.reads) not in self._but)
        return next((known for known in takes if known.holds(observation.module)), None)

    def add(self, observation: Observation, analysis: BlockAnalysis) -> None:
        kept = replace(analysis, path=inside(self._part, analysis.path))
        self._known.setdefault(_key(observation), []).append((_wanted(observation), kept))

    def forget_runs(self) -> None:
        """Gives up the recorded runs, which hold the blocks and values that were computed. What was made of them stays."""
        for known in self._known.values():
            known[:] = [(wanted, replace(analysis, match=None, captured=None)) for wanted, analysis in known]


def moved_to(analysis: BlockAnalysis, path: str) -> BlockAnalysis:
    """The same analysis for the identical block at ``path``."""
    form, refusal = analysis.rewritten, analysis.refusal
    form, refusal = form and replace(form, path=path), refusal and replace(refusal, path=path)
    return replace(analysis, path=path, rewritten=form, refusal=refusal, seconds=0.0)


def _wanted(observation: Observation) -> list[bool]:
    leaves = tree_leaves((observation.args, observation.kwargs))
    return [leaf.requires_grad for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _key(observation: Observation) -> Hashable:
    block = observation.module
    tensors = [*tensors_by_name(block).items(), *kept_tensors(block).items()]
    modules = named_modules(block, every=True)
    return (
        tuple((name, type(module), *(bool(getattr(module, hooks)) for hooks in HOOKS)) for name, module in modules),
        one_by_another(modules),
        one_by_another(tensors),
        tuple((name, shape_of(t), t.dtype, t.device.type, t.requires_grad, type(t)) for name, t in tensors),
        _shape(observation.args),
        _shape(observation.kwargs),
        tuple(map(bool, HOOKS_OF_ALL)),
        autocast_state(),
        observation.gradients,
        observation.written,
        # What a condition on one of them says, which need not hold for another value.
        tuple((name, number_at(block, name)) for name in sorted(observation.numbers)),
        "forward" in vars(block),  # if it has one of its own, that is among the reads
    )


def _shape(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(_shape(item) for item in value)
    if isinstance(value, Mapping):
        return tuple((key, _shape(item)) for key, item in value.items())
    return repr(value) if isinstance(value, _PLAIN) else type(value).__name__
