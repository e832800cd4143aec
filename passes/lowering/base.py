"""What every pass has: a contract that is checked before it runs, and a result that says what changed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch.fx

from hexa_fx.errors import HexaError
from hexa_fx.observers import notify

_FACTS = "hexa_facts"


class PassError(HexaError):
    """A pass was scheduled or called where its requirements do not hold, or left a broken graph behind."""


@dataclass(frozen=True)
class Contract:
    """What a pass requires of a graph and what it provides, as names of facts such as ``canonical``."""

    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset()
    removes: frozenset[str] = frozenset()


@dataclass(frozen=True)
class PassResult:
    """A graph after a pass, and what the pass did.

    Args:
        graph_module: the graph to go on with.
        name: the pass.
        changes: in how many places it changed the graph.
        before, after: number of nodes of each operator.
        notes: sentences for the report.
    """

    graph_module: torch.fx.GraphModule
    name: str
    changes: int
    before: Mapping[str, int]
    after: Mapping[str, int]
    notes: tuple[str, ...] = ()

    @property
    def modified(self) -> bool:
        """Whether anything changed."""
        return self.changes > 0

    def __str__(self) -> str:
        delta = op_count_difference(self.before, self.after)
        total = f"nodes {sum(self.before.values())} -> {sum(self.after.values())}"
        return f"{self.name}: {total}" + (f" ({delta})" if delta else "")


@dataclass(frozen=True)
class GraphPass(ABC):
    """Turns a graph into another. Subclasses are frozen dataclasses, with options as fields; `apply` does the work."""

    name: ClassVar[str]
    contract: ClassVar[Contract] = Contract()

    @abstractmethod
    def apply(self, gm: torch.fx.GraphModule) -> int:
        """Changes gm's graph in place, and returns the number of places."""

    def __call__(self, gm: torch.fx.GraphModule) -> PassResult:
        """Checks the contract, applies the pass, lints and recompiles.

        Raises:
            PassError: a required fact does not hold for gm, or the graph does not lint afterwards.
        """
        facts = facts_of(gm)
        missing = self.contract.requires - facts
        if missing:
            raise PassError(f"pass {self.name!r} requires {sorted(missing)}; the graph has {sorted(facts)}")
        before = op_counts(gm)
        notify(self.name, "before", gm.graph, type(gm).__name__)
        changes = self.apply(gm)
        try:
            gm.graph.lint()
        except RuntimeError as error:
            raise PassError(f"pass {self.name!r} left a graph that does not lint: {error}") from error
        gm.recompile()
        notify(self.name, "after", gm.graph, type(gm).__name__)
        gm.meta[_FACTS] = (facts - self.contract.removes) | self.contract.provides
        return PassResult(gm, self.name, changes, before, op_counts(gm))


@dataclass(frozen=True)
class Pipeline:
    """Passes in order. The schedule is checked when the pipeline is made, not when it runs.

    Args:
        passes: in the order in which they run.
        given: facts that hold for every graph that is put in.

    Raises:
        PassError: a pass requires what no earlier one provides.
    """

    passes: Sequence[GraphPass]
    given: frozenset[str] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        facts = self.given
        seen: list[str] = []
        for p in self.passes:
            missing = p.contract.requires - facts
            if missing:
                raise PassError(f"pass {p.name!r} requires {sorted(missing)}, which nothing before it provides: {seen}")
            facts = (facts - p.contract.removes) | p.contract.provides
            seen.append(p.name)

    def __call__(
        self, gm: torch.fx.GraphModule, after_each: Callable[[PassResult], None] | None = None
    ) -> list[PassResult]:
        """Runs all passes on gm. ``after_each`` sees every result: the hook for dumps, timing and checks."""
        gm.meta[_FACTS] = facts_of(gm) | self.given
        results = []
        for p in self.passes:
            result = p(gm)
            gm = result.graph_module
            results.append(result)
            if after_each is not None:
                after_each(result)
        return results


def facts_of(gm: torch.fx.GraphModule) -> frozenset[str]:
    """The facts that earlier passes established for a graph."""
    facts: frozenset[str] = gm.meta.get(_FACTS, frozenset())
    return facts


def add_facts(gm: torch.fx.GraphModule, facts: Iterable[str]) -> None:
    """States facts about a graph that was not made by a pass."""
    gm.meta[_FACTS] = facts_of(gm) | frozenset(facts)


def op_counts(gm: torch.fx.GraphModule) -> dict[str, int]:
    """Number of nodes of each operator, without placeholders and outputs."""
    return dict(Counter(op_name(n) for n in gm.graph.nodes if n.op not in ("placeholder", "output")))


def op_name(node: torch.fx.Node) -> str:
    """``hexa.esmm``, ``aten.cat.default``, ``getitem``, ``size``: what a node calls, in short."""
    if isinstance(node.target, torch._ops.OpOverload):
        name = str(node.target)
        return name.removesuffix(".default") if name.startswith("hexa.") else name
    if isinstance(node.target, str):
        return node.target
    return getattr(node.target, "__name__", str(node.target))


def op_count_difference(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """``hexa.esmm -1, hexa.esmm_act +1``; empty when nothing changed."""
    names = sorted(set(before) | set(after))
    deltas = ((n, after.get(n, 0) - before.get(n, 0)) for n in names)
    return ", ".join(f"{n} {d:+d}" for n, d in deltas if d)
