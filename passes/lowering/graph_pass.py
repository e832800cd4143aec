"""What the passes over the operator's graphs have in common, and how they are put in order; and the last ones: operators become
kernels, and what was saved is freed after its last use.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule

from hexa_fx.observers import announced
from hexa_fx.ops import library
from hexa_fx.torch_private import OpOverload


@dataclass(frozen=True)
class GraphPass(ABC):
    """Changes a graph of expert-specific operators in place. Subclasses are frozen dataclasses, with options as fields."""

    name: ClassVar[str]
    """As listeners know it (`hexa_fx.observers`)."""
    summary: ClassVar[str]
    """What it does, in a few words."""

    @abstractmethod
    def apply(self, gm: GraphModule) -> int:
        """Changes gm's graph, and returns the number of places."""

    def __call__(self, gm: GraphModule) -> int:
        """Applies the pass; what it changed is linted and recompiled. Listeners see the graph before and after. Returns the number
        of changes.
        """
        with announced(self.name, gm.graph, type(gm).__name__) as done:
            changes = self.apply(gm)
            if changes:
                gm.graph.lint()
                gm.recompile()
            done.graph = gm.graph
        return changes


@dataclass(frozen=True)
class Pipeline:
    """Passes in the order in which they run."""

    passes: tuple[GraphPass, ...]

    def __call__(self, gm: GraphModule) -> GraphModule:
        """Applies all passes to gm in place, and returns it."""
        for each in self.passes:
            each(gm)
        return gm

    def until(self, name: str) -> Pipeline:
        """The passes up to and including one, for those who look at the graph in between."""
        names = [each.name for each in self.passes]
        return Pipeline(self.passes[: names.index(name) + 1])


SAVED = ("h",)
"""Operands of the backward program that are rows in expert order, as forward saved them. They come in a list."""


@dataclass(frozen=True)
class BindKernels(GraphPass):
    """Replaces calls to ``torch.ops.hexa.*`` by calls to the kernels themselves, past torch's dispatcher.

    Args:
        device: device type, such as ``cuda``.
    """

    device: str
    name: ClassVar[str] = "bind_kernels"
    summary: ClassVar[str] = "operators become the kernels of a device"

    def apply(self, gm: GraphModule) -> int:
        """Replaces the target of every hexa node for which the device has a kernel in Python."""
        bound = 0
        for node in gm.graph.nodes:
            target = node.target
            if isinstance(target, OpOverload) and target.namespace == library.NAMESPACE:
                node.target = library.kernel_for(target._opname, self.device)
            elif hasattr(target, "on"):  # a function of operators
                node.target = target.on(self.device)
            bound += node.target is not target
        return bound


@dataclass(frozen=True)
class TakeSaved(GraphPass):
    """Takes h, which forward saved for a single use, out of a list.

    A call's frames hold its arguments until it returns, and h is as large as everything that backward computes from it. Popped
    from a list, its memory is free as soon as the last operator has read it.
    """

    name: ClassVar[str] = "take_saved"
    summary: ClassVar[str] = "what forward saved is freed after its last use"

    def apply(self, gm: GraphModule) -> int:
        """Puts a pop behind every placeholder of `SAVED`."""
        saved = [n for n in gm.graph.nodes if n.op == "placeholder" and n.target in SAVED]
        for box in saved:
            with gm.graph.inserting_after(box):
                taken = gm.graph.call_method("pop", (box,))
            box.replace_all_uses_with(taken, delete_user_cb=lambda user, taken=taken: user is not taken)
        return len(saved)
