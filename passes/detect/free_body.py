"""An expert of any form, as a list of row-wise steps: what `ExpertBody` cannot express.

Every recorded node of one expert run gets a role; the rewrite turns each into one node over all routed rows at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.fx

from hexa_fx.capture import record_of
from hexa_fx.capture.functional import row_dropout
from hexa_fx.ir import Layout
from hexa_fx.operations import operation
from hexa_fx.passes.detect.routing_sources import RoutingSource
from hexa_fx.passes.detect.stacks import Form

TIED = (
    "the experts share a matrix and have biases of their own in one layer; with the bias added to the product "
    "(F.linear(x, weight) + bias) they are rewritten"
)


@dataclass(frozen=True)
class TokenRows:
    """The rows' tokens: rows of ``source``."""

    source: torch.fx.Node


@dataclass(frozen=True)
class RowFactor:
    """One number per row: the product of routing quantities, or 1 if there are none."""

    sources: tuple[RoutingSource, ...]


@dataclass(frozen=True)
class RowCount:
    """The number of rows."""


@dataclass(frozen=True)
class Outside:
    """A value computed before the experts and used by all of them."""


@dataclass(frozen=True)
class Shared:
    """A parameter or buffer that all experts use, by its name."""

    name: str


@dataclass(frozen=True)
class Literal:
    """A number that follows from the shapes of parameters."""

    value: int | float | bool


@dataclass(frozen=True)
class OfExpert:
    """A parameter of the row's expert, as (E, *shape) of ``base``."""

    base: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class FromExpert:
    """The recorded operation, element by element, on a parameter of the row's expert: ``1 + weight``, ``softplus(beta)``."""


@dataclass(frozen=True)
class Product:
    """``data @ W[e].T + b[e]``."""

    data: torch.fx.Node
    base: str
    bias: str | None
    layout: Layout


@dataclass(frozen=True)
class Copy:
    """The recorded operation on the new operands."""


Role = TokenRows | RowFactor | RowCount | Outside | Shared | Literal | OfExpert | FromExpert | Product | Copy


@dataclass(frozen=True)
class FreeBody:
    """An expert as steps over rows.

    Args:
        steps: the role of every node of one expert's run, in recorded order.
        output: the node whose rows are combined.
        experts: E.
        hidden_size, intermediate_size: width of the tokens, and of the widest value that a product reads.
        form: how the first expert parameter is stored.
        runs: the nodes of all runs that do the step.
        slots_first: whether an expert's rows come in the order of the slots that chose it, and then of tokens; else of tokens.
    """

    steps: Mapping[torch.fx.Node, Role]
    output: torch.fx.Node
    experts: int
    hidden_size: int
    intermediate_size: int
    form: Form
    runs: Mapping[torch.fx.Node, tuple[torch.fx.Node, ...]]
    slots_first: bool = False

    @property
    def operations(self) -> tuple[str, ...]:
        """Names of what an expert computes, products as ``linear``."""
        names = []
        for node, role in self.steps.items():
            if isinstance(role, Product):
                names.append("linear")
            elif isinstance(role, Copy) and operation(node) != "size":
                names.append(operation(node))
        return tuple(names)

    @property
    def dropouts(self) -> list[torch.fx.Node]:
        """The steps that drop numbers at random, in the order in which an expert draws."""
        return [node for node in self.steps if node.target is row_dropout]

    @property
    def roots(self) -> list[torch.fx.Node]:
        """Recorded nodes outside the experts that the steps read."""
        found: list[torch.fx.Node] = []
        for node, role in self.steps.items():
            if isinstance(role, TokenRows):
                found.append(role.source)
            elif isinstance(role, Outside):
                found.append(node)
            elif isinstance(role, RowFactor):
                found.extend(n for source in role.sources for n in source.nodes)
        return found


def width_of(node: torch.fx.Node) -> int:
    return int(record_of(node).value.shape[-1])
