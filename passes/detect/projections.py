"""Finds the expert matrix products of a recorded block: their weights, their level, and which belong together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from torch.fx import Node

from hexa_fx import operations as ops
from hexa_fx.capture import CapturedBlock, record_of
from hexa_fx.operations import kind, operation
from hexa_fx.passes.detect.graph import ancestors, descendants, is_float, is_scored
from hexa_fx.passes.detect.tags import ALL, ExpertGroups, Tag, is_stack, tag
from hexa_fx.passes.detect.verdict import Refuse

MIXED = "the weight of an expert's matrix product is made of several parameters; it has to be one parameter, or a part of one"


@dataclass(frozen=True)
class Contraction:
    """One recorded matrix product with expert weights.

    Args:
        node: the product. data: its token operand.
        expert: which expert, `ALL` for a batched product. base: parameter or group the weight comes from.
        bias: base of a bias inside the same call.
        level: 1 for a product of tokens, 2 for a product of a level-1 product's result, ...
    """

    node: Node
    data: Node
    expert: int
    base: str
    bias: str | None
    level: int


class Instance(NamedTuple):
    """One run of one expert (or of all of them at once): its first products, and its second."""

    first: tuple[Contraction, ...]
    second: Contraction

    @property
    def products(self) -> tuple[Contraction, ...]:
        return (*self.first, self.second)

    @property
    def between(self) -> set[Node]:
        """Nodes between the first products and the second."""
        start = {contraction.node for contraction in self.first}
        return (descendants(start) & ancestors([self.second.data])) - start


def find_contractions(captured: CapturedBlock, tags: Mapping[Node, Tag]) -> list[Contraction]:
    """Every product of a token operand with expert weights, in order."""
    found: list[Contraction] = []
    levels: dict[Node, int] = {}  # by node, the highest of the contractions that it depends on
    for node in captured.graph.nodes:
        levels[node] = max((levels[source] for source in node.all_input_nodes), default=0)
        if node.op == "output" or not ops.contracts(node) or tags[node].weight or node in captured.set_aside:
            continue
        contraction = _read_contraction(node, tags, levels)
        if contraction is not None:
            found.append(contraction)
            levels[node] = max(levels[node], contraction.level)
    return found


def scored_parts(captured: CapturedBlock, groups: ExpertGroups) -> frozenset[str]:
    """Parameters and groups from whose products the code chooses: a router's, as product keys are, or what comes before it."""
    with suppress(Refuse):
        scored = [c for c in find_contractions(captured, tag(captured, groups)) if is_scored(c.node)]
        return frozenset(base for c in scored for base in (c.base, c.bias) if base)
    return frozenset()


def _read_contraction(node: Node, tags: Mapping[Node, Tag], levels: Mapping[Node, int]) -> Contraction | None:
    operands = [n for n in node.all_input_nodes if is_float(n)]
    weights = [n for n in operands if tags[n].weight and is_expert_weight(n, tags[n])]
    if not weights:
        return None
    data = [n for n in operands if not tags[n].weight]
    if len(data) != 1:
        raise Refuse(f"an expert product takes {len(data)} token operands where one was expected", node)
    # In addmm(b, x, W) and baddbmm(b, x, W) the first operand is the bias, whatever its rank.
    bias_first = operation(node) in ("addmm", "baddbmm") and len(weights) > 1
    matrices = [n for n in weights if record_of(n).value.dim() >= 2 and not (bias_first and node.args[0] is n)]
    if len(matrices) != 1 or len(tags[matrices[0]].bases) != 1:
        raise Refuse(MIXED, node)
    weight = matrices[0]
    biases = [n for n in weights if n is not weight]
    experts = tags[weight].experts or frozenset({ALL})
    if len(experts) != 1:
        raise Refuse("an expert product mixes the parameters of several experts", node)
    bias = next(iter(tags[biases[0]].bases)) if biases else None
    (expert,), (base,) = experts, tags[weight].bases
    return Contraction(node, data[0], expert, base, bias, 1 + levels[data[0]])


def is_expert_weight(weight: Node, tag: Tag) -> bool:
    """One expert's parameter, all experts' gathered, or a whole stack in a batched product."""
    return bool(tag.experts) or (is_stack(weight) and not tag.ordinary)


def group_instances(contractions: list[Contraction]) -> list[Instance]:
    """Pairs every second-level product with the first-level products of the same expert that feed it."""
    levels = {c.level for c in contractions}
    if levels == {1}:
        if all(is_scored(contraction.node) for contraction in contractions):
            raise Refuse(
                "the code chooses from what it multiplies with a stacked weight, so that these are a router's scores, and no "
                "product with weights of experts was seen",
                contractions[0].node,
            )
        raise Refuse(
            "each expert has a single matrix product, or several side by side; such experts are rewritten only where the code runs "
            "one expert at a time, on rows of a matrix",
            contractions[0].node,
        )
    if max(levels) > 2:
        raise Refuse(
            f"the experts have {max(levels)} matrix products in a row, or read each other's outputs; more than two are rewritten "
            "only where the code runs one expert at a time, all of them alike, and each on its tokens alone",
            contractions[-1].node,
        )
    found, of_expert = [], defaultdict[int, list[Contraction]](list)
    for contraction in (c for c in contractions if c.level == 1):
        of_expert[contraction.expert].append(contraction)
    for second in (seconds := [c for c in contractions if c.level == 2]):
        behind = ancestors([second.data])
        first = tuple(c for c in of_expert[second.expert] if c.node in behind)
        turns = [c for c in seconds if (c.base, c.expert) == (second.base, ALL)]
        by_base = [[c for c in first if c.base == base] for base in dict.fromkeys(c.base for c in first)]
        joined = second in turns and all(len(firsts) == len(turns) for firsts in by_base)
        if joined:  # and taken apart again, in one order
            first = tuple(firsts[turns.index(second)] for firsts in by_base)
        if not first:
            raise Refuse("an expert's second projection does not read its first", second.node)
        found.append(Instance(first, second))
    used = {c.node for instance in found for c in instance.first}
    for contraction in contractions:
        if contraction.level == 1 and contraction.node not in used:
            raise Refuse("an expert projection is used outside a two-projection expert", contraction.node)
    return found


def feature_size(node: Node) -> int:
    """Size of the last dimension; a trailing 1 makes the value a column vector, whose features are the dimension before, unless a
    linear layer gives it, as that of experts of one output does.
    """
    shape = record_of(node).value.shape
    return int(shape[-2] if shape[-1] == 1 and len(shape) >= 2 and kind(node) != "linear" else shape[-1])
