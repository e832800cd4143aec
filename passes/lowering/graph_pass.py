"""What the passes over the operator's graphs have in common, and how they are put in order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule

from hexa_fx.observers import announced


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
