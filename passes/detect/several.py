"""Finds several mixtures in one forward, side by side or in sequence, as one region each.

Each is looked for with the parameters of the others treated as ordinary ones. Host decisions of the others' loops are ignored
meanwhile; those that no region replaces count in the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch.fx import Node

from hexa_fx import operations as ops
from hexa_fx.capture import CapturedBlock, record_of
from hexa_fx.operations import kind
from hexa_fx.passes.detect.decisions import Decisions, decision_left
from hexa_fx.passes.detect.match import Family, MoEMatch
from hexa_fx.passes.detect.projections import Contraction, find_contractions, group_instances, is_expert_weight
from hexa_fx.passes.detect.rules import opaque_nodes
from hexa_fx.passes.detect.tags import ExpertGroups, Tag, tag
from hexa_fx.passes.detect.verdict import Refuse

REPEATED = "the same experts run more than once in a forward; where each run is a call of a module of its own, they are rewritten"
IN_TURN = (
    "an expert is given what the experts before it gave: their outputs are added to the tensor that the tokens are read from, "
    "perhaps by a write into it (float() of a float32 tensor is that tensor, not a copy)"
)

_picks = ops.of(
    "topk argmax argmin argsort sort max multinomial one_hot gumbel_softmax eq gt ge lt le where nonzero scatter"
)

Members = frozenset[str]
"""Parameters and groups that work together in one kind of expert."""


@dataclass(frozen=True)
class Families:
    """The families of expert weights of a block: those of one mixture work together.

    Args:
        apart: the families, the ones with most runs first; empty if there is one, or they cannot be told apart.
        in_a_row: whether each works on the result of the one before; else they lie side by side.
        ordinary: expert weights that belong to none of them, such as biases that are added on their own.
        repeated: the refusal if the same experts run again on their own result.
    """

    apart: tuple[Members, ...] = ()
    in_a_row: bool = False
    ordinary: Members = frozenset()
    repeated: Refuse | None = None


def families_of(captured: CapturedBlock, groups: ExpertGroups) -> Families:
    """Tells from the matrix products which weights work together."""
    tags = tag(captured, groups)
    try:
        contractions = find_contractions(captured, tags)
        levels = max((c.level for c in contractions), default=0)
        pairs = range(1, levels, 2) if levels % 2 == 0 else ()
        families = tuple(family for level in pairs for family in _of_pairs(contractions, level, groups))
    except Refuse:
        return Families()
    if len(families) < 2:
        return Families()
    together = frozenset[str]().union(*families)
    if levels > 2 and sum(map(len, families)) > len(together):
        runs = [(c.base, c.expert) for c in contractions]
        said = IN_TURN if len(set(runs)) == len(runs) else REPEATED
        return Families(repeated=Refuse(said, contractions[-1].node))
    return Families(families, levels > 2, frozenset[str]().union(*(t.bases for t in tags.values())) - together)


def _of_pairs(contractions: Sequence[Contraction], level: int, groups: ExpertGroups) -> list[Members]:
    """The families whose first products are of this level."""
    pair = [replace(c, level=c.level - level + 1) for c in contractions if c.level in (level, level + 1)]
    runs: dict[Members, int] = {}
    for first, second in group_instances(pair):
        bases = frozenset(base for c in (*first, second) for base in (c.base, c.bias) if base)
        runs[bases] = runs.get(bases, 0) + 1
    owner = {base: base.rpartition(".")[0].rpartition(".")[0] for base in groups.members}
    # with what stands beside a family's parameters in the same modules, such as biases that are added later
    beside = {family: {owner[base] for base in family if base in owner} for family in runs}
    ordered = sorted(runs, key=lambda bases: -runs[bases])
    return [family | {base for base in owner if owner[base] in beside[family]} for family in ordered]


def chooses(captured: CapturedBlock) -> bool:
    """Whether the code picks anything by what it computes, or compares numbers."""
    return any(map(_picks, captured.graph.nodes))


def find_several(family: Family, parts: Iterable[Family], look: Callable[[Family], MoEMatch]) -> MoEMatch | None:
    """The first region with the others in it; None unless there are at least two that leave no host decision.

    ``parts``: what is looked for in turn, in the block of ``family``.
    """
    captured = family.captured
    decisions = frozenset(n for n in captured.graph.nodes if n.op != "output" and record_of(n).decision)

    def found(part: Family) -> Iterator[MoEMatch]:
        try:
            yield replace(look(part), captured=captured)
        except Refuse:
            aside = other_runs(captured, family.groups, part.members) if part.captured is captured else []
            for others in aside:
                yield from found(replace(part, captured=replace(captured, set_aside=others)))

    regions = [region for part in parts for region in found(replace(part, passed=decisions))]
    outputs = [region.output for region in regions]
    if len(outputs) < 2 or len(set(outputs)) < len(outputs):
        return None
    opaque = opaque_nodes(captured, outputs)
    if decision_left(outputs, opaque):
        return None
    routing = {node for region in regions for node in region.routing.index.nodes}
    # of one region alone, not all that ask for sizes can be asked
    asked = Decisions(captured, tag(captured, family.groups), routing, [], outputs, opaque).conditions(of_sizes=True)
    known = {condition.node for region in regions for condition in region.conditions}
    new = [condition for condition in asked if condition.node not in known]
    return replace(regions[0], conditions=(*regions[0].conditions, *new), others=tuple(regions[1:]))


def other_runs(captured: CapturedBlock, groups: ExpertGroups, members: Members | None = None) -> list[frozenset[Node]]:
    """For each run of the same experts by a routing of its own, what reads experts' weights in all the others.

    What does so before anything is chosen, as a gate among several in one tensor, belongs to none.

    Args:
        members: the weights that count, if not all do.
    """
    tags = tag(captured, groups, members)
    choices: dict[Node, frozenset[Node]] = {}
    runs: dict[frozenset[Node], set[Node]] = defaultdict(set)
    for node in captured.graph.nodes:
        own = {node} if ops.picks_best(node) or kind(node) == "max" else set()
        choices[node] = frozenset(own).union(*(choices[operand] for operand in node.all_input_nodes))
        if node.op != "output" and not tags[node].weight and _weights_of(node, tags):
            runs[choices[node]].add(node)
    readers = frozenset[Node]().union(*runs.values())
    runs.pop(frozenset(), None)
    read = [{part for node in run for part in _weights_of(node, tags)} for run in runs.values()]
    same = set.intersection(*read) if len(read) > 1 else set()
    return [readers - {n for n in run if _weights_of(n, tags) & same} for run in runs.values()] if same else []


def _weights_of(node: Node, tags: Mapping[Node, Tag]) -> set[Tag]:
    return {tags[n] for n in node.all_input_nodes if tags[n].weight and is_expert_weight(n, tags[n])}
