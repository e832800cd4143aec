"""The result of detection: everything that the rewrite needs, as nodes of the captured graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch.fx

from hexa_fx.capture import Access, CapturedBlock, StoredValue
from hexa_fx.passes.detect.body import ExpertBody
from hexa_fx.passes.detect.decisions import Condition
from hexa_fx.passes.detect.free_body import FreeBody
from hexa_fx.passes.detect.graph import ancestors, is_float, is_tensor
from hexa_fx.passes.detect.routing import Passing, Routing
from hexa_fx.passes.detect.rows import Instance


@dataclass(frozen=True)
class MoEMatch:
    """One MoE region of a captured block, in canonical form.

    Args:
        captured: the block.
        source: node whose rows are the tokens.
        output: node of the combined result.
        num_experts: E.
        body: the expert function and its weights.
        routing: ids and factors.
        passing: which tokens the code adds to the output as they are, past the experts.
        conditions: under which the region looks like this.
        idiom: how the experts are run, in words, for reports.
        base: node that the combined outputs are added to, if the code does not start from zeros.
        detached: whether the experts read their tokens without a gradient.
        constant: whether the code lets no gradient through the region.
        stored: results that the code keeps beside its output, which the rewritten block has to leave there.
        instances: the runs of the experts.
        others: further regions of the same block.
    """

    captured: CapturedBlock
    source: torch.fx.Node
    output: torch.fx.Node
    num_experts: int
    body: ExpertBody | FreeBody
    routing: Routing
    passing: Passing | None
    conditions: tuple[Condition, ...]
    idiom: str
    stored: tuple[Access | StoredValue, ...] = ()
    base: torch.fx.Node | None = None
    detached: bool = False
    constant: bool = False
    instances: tuple[Instance, ...] = ()
    others: tuple[MoEMatch, ...] = ()

    @property
    def early_conditions(self) -> tuple[Condition, ...]:
        """Those that are known before the experts run."""
        return tuple(condition for condition in self.conditions if not condition.of_outputs)

    @property
    def is_given_ids(self) -> bool:
        """Whether the ids are computed from integers that the block is called with."""
        behind = ancestors([node for region in self.regions for node in region.routing.index.nodes])
        return any(node.op == "placeholder" and is_tensor(node) and not is_float(node) for node in behind)

    @property
    def regions(self) -> tuple[MoEMatch, ...]:
        """This one and the others."""
        return (self, *self.others)
