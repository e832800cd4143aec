"""The result of detection, everything that the rewrite needs as nodes of the captured graph, and the family of experts' weights in
which it is looked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch.fx import Node

from hexa_fx.capture import CapturedBlock, StoredValue, record_of
from hexa_fx.capture.replay import Replay
from hexa_fx.passes.detect.body import ExpertBody
from hexa_fx.passes.detect.combine import Combine, check_base, explain_offset
from hexa_fx.passes.detect.decisions import Condition, Decisions
from hexa_fx.passes.detect.graph import ancestors, is_float, is_tensor
from hexa_fx.passes.detect.projections import Instance
from hexa_fx.passes.detect.routing import Passing, Routing, find_routing, how_tokens_pass
from hexa_fx.passes.detect.routing_sources import Search
from hexa_fx.passes.detect.rules import decided_anew, is_constant, refuse_own_backward, refuse_stored_intermediates
from hexa_fx.passes.detect.slots import Pairs
from hexa_fx.passes.detect.stacks import WeightTable
from hexa_fx.passes.detect.steps import FreeBody
from hexa_fx.passes.detect.tags import ExpertGroups, Tag, tag
from hexa_fx.passes.detect.verdict import Refuse


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
        base: node that the combined outputs are added to, if the code does not start from zeros; ``passing`` says if with weights.
        detached: whether the experts read their tokens without a gradient.
        constant: whether the code lets no gradient through the region.
        stored: results that the code keeps beside its output, which the rewritten block has to leave there.
        instances: the runs of the experts.
        decisions: what judged the host decisions, which leaves to submodule calls what these decide again.
        others: further regions of the same block.
    """

    captured: CapturedBlock
    source: Node
    output: Node
    num_experts: int
    body: ExpertBody | FreeBody
    routing: Routing
    passing: Passing | None
    conditions: tuple[Condition, ...]
    idiom: str
    stored: tuple[StoredValue, ...] = ()
    base: Node | None = None
    detached: bool = False
    constant: bool = False
    instances: tuple[Instance, ...] = ()
    decisions: Decisions | None = None
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


@dataclass(frozen=True)
class Routed:
    """Which token goes where in a region; as in `MoEMatch`."""

    search: Search
    routing: Routing
    base: Node | None
    passing: Passing | None


@dataclass(frozen=True)
class Family:
    """What is looked for.

    Args:
        prefer_earliest: as in `hexa_fx.passes.detect.detect_block`.
        members: the parameters and groups of the family; None: all that may be experts'.
        passed: host decisions after the experts that do not count.
    """

    captured: CapturedBlock
    groups: ExpertGroups
    replay: Replay
    prefer_earliest: bool
    members: frozenset[str] | None = None
    passed: frozenset[Node] = frozenset()

    @cached_property
    def tags(self) -> dict[Node, Tag]:
        return tag(self.captured, self.groups, self.members)

    @cached_property
    def weights(self) -> WeightTable:
        return WeightTable(self.captured, self.groups, self.tags)

    def routed(
        self,
        pairs: Pairs,
        combine: Combine,
        source: Node,
        instances: Iterable[Instance],
        experts: int,
        late_bias: str | None = None,
    ) -> Routed:
        """How the tokens in ``source`` come to experts and back. ``late_bias``: a parameter that is added to what experts give."""
        end, replay, value = combine.node, self.replay, record_of(source).value
        identity, base = explain_offset(pairs, late_bias, combine, source, self.weights, replay)
        tokens = value.numel() // value.shape[-1]
        search = Search(self.captured, self.tags, end, tokens, experts, replay, self.prefer_earliest)
        routing = find_routing(pairs, search)
        weighted = base is not None and check_base(base, routing.weights, instances, end, replay)
        lost = routing.capacity is not None or (routing.keep and not routing.zeros)
        if weighted and (routing.before or routing.always or lost):
            raise Refuse(
                "tokens reach the output past the experts, and the routing does not say with which weight", end
            )
        passing = "weighted" if weighted else how_tokens_pass(identity, pairs, routing, experts, end, replay)
        return Routed(search, routing, base, passing)

    def matched(
        self,
        source: Node,
        routed: Routed,
        body: ExpertBody | FreeBody,
        inside: Sequence[Node],
        instances: Sequence[Instance],
        stored: tuple[StoredValue, ...],
        idiom: str,
    ) -> MoEMatch:
        """The region, of whose experts the nodes are ``inside``."""
        routing, end, last = routed.routing, routed.search.end, [instance.second.node for instance in instances]
        of_body = body.roots if isinstance(body, FreeBody) else ()
        roots = [source, *of_body, *routing.nodes, *filter(None, [routed.base])]
        anew = decided_anew(self.captured, inside, end, roots)
        # Stacks that the family leaves out are a router's: what is computed with them is not of the experts.
        of_all = tag(self.captured, self.groups, self.members and self.members | frozenset(self.groups.members))
        decisions = Decisions(self.captured, of_all, set(routing.index.nodes), last, [end], anew)
        conditions = decisions.conditions()
        refuse_stored_intermediates(stored, self.tags, end)
        refuse_own_backward(end, self.tags, last)
        return MoEMatch(
            captured=self.captured,
            source=source,
            output=end,
            num_experts=routed.search.experts,
            body=body,
            routing=routing,
            passing=routed.passing,
            conditions=conditions,
            idiom=idiom,
            stored=stored,
            base=routed.base,
            constant=is_constant(end),
            instances=tuple(instances),
            decisions=decisions,
        )
