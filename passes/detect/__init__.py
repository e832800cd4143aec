"""Finds the MoE region of a captured block by dataflow and experiment, whatever idiom it is written in.

tags -> which experts every value depends on
projections -> the expert products, and the token behind each of their rows
body -> the expert function between and after them
combine -> where outputs become tokens again, with which weights
routing -> the tensors that hold ids and weights
rules -> what one run cannot show
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Literal

from torch.fx import Node

from hexa_fx.capture import CapturedBlock, StoredValue, record_of
from hexa_fx.capture.replay import Replay
from hexa_fx.ir import RUNS_ALREADY, Refusal
from hexa_fx.operations import operation
from hexa_fx.passes.detect.body import bias_bases, identify_body
from hexa_fx.passes.detect.combine import find_combine
from hexa_fx.passes.detect.explain import explained, without_products
from hexa_fx.passes.detect.free import INSIDE, NotFree, detect_free, has_idle
from hexa_fx.passes.detect.graph import ancestors, descendants
from hexa_fx.passes.detect.match import Family, MoEMatch
from hexa_fx.passes.detect.projections import Contraction, Instance, find_contractions, group_instances, scored_parts
from hexa_fx.passes.detect.rows import Rows, match_rows
from hexa_fx.passes.detect.rules import is_cut_off, opaque_nodes, stored_outside_calls
from hexa_fx.passes.detect.several import families_of, find_several, other_runs
from hexa_fx.passes.detect.tags import ALL, Tag, all_but, expert_groups, lone_parts
from hexa_fx.passes.detect.verdict import Refuse, experiments, first_match

__all__ = ["MoEMatch", "detect_block"]

Form = Literal["any", "free"]
"""How experts are read: in the standard form, and if that is not possible as any steps on rows; or only as these."""


def detect_block(captured: CapturedBlock, prefer_earliest: bool = False, form: Form = "any") -> MoEMatch | Refusal:
    """The block's MoE region, which refers to further ones, or a sentence that says why there is none to rewrite.

    Args:
        prefer_earliest: of several tensors that hold the same routing take the first, not the last. They differ where the code
            detaches in between, which values do not show.
        form: how to read the experts.
    """
    try:
        return _detect(captured, prefer_earliest, "free" if has_idle(captured) else form)
    except Refuse as refusal:
        return refusal.at(captured.path)


def _detect(captured: CapturedBlock, prefer_earliest: bool, form: Form) -> MoEMatch:
    """Tries every family of expert weights, since shared experts in a list look like experts until one looks for their routing."""
    for node in captured.graph.nodes:
        if getattr(node.target, "namespace", "") == "hexa":
            raise Refuse(RUNS_ALREADY, node)
    groups = expert_groups(captured.named_tensors())
    family = Family(captured, groups, Replay(captured), prefer_earliest)

    look = partial(_detect_family, form=form)
    families = families_of(captured, groups)
    parts = (replace(family, members=part | families.ordinary) for part in families.apart)
    if (found := find_several(family, parts, look)) is not None:
        return found
    side_by_side = () if families.in_a_row else families.apart
    left_out = (parts(captured, groups) for parts in (lone_parts, scored_parts))
    narrower = (all_but(captured, groups, parts) for parts in left_out if parts)
    wanted = itertools.chain(side_by_side, [None], narrower)
    try:
        return first_match(partial(look, replace(family, members=members)) for members in wanted)
    except Refuse as refusal:
        aside = (replace(captured, set_aside=others) for others in other_runs(captured, groups))
        if (found := find_several(family, (replace(family, captured=part) for part in aside), look)) is not None:
            return found
        raise explained(captured, families.repeated or refusal) from None


def _detect_family(family: Family, form: Form) -> MoEMatch:
    """The region with experts of the standard form, or else with experts of any form that run one at a time."""
    try:
        if form == "free":
            idle = has_idle(family.captured)
            raise Refuse(INSIDE if idle else "its experts are not read in the standard form")
        return _detect_standard(family)
    except Refuse:
        with suppress(NotFree):
            return detect_free(family)
        raise


@experiments()
def _detect_standard(family: Family) -> MoEMatch:
    captured, tags = family.captured, family.tags
    contractions = find_contractions(captured, tags)
    if not contractions:
        raise without_products(captured, tags)
    stored = stored_outside_calls(captured, [contraction.node for contraction in contractions])
    instances = group_instances(contractions)
    found = match_rows(instances, family.replay, family.weights)
    return first_match(partial(_match_of, family, stored, instances, source, rows) for source, rows in found)


def _match_of(
    family: Family, stored: tuple[StoredValue, ...], instances: list[Instance], source: Node, rows: Rows
) -> MoEMatch:
    """The region if its tokens are the rows of ``source``."""
    captured, tags, replay = family.captured, family.tags, family.replay
    products = [c.node for instance in instances for c in instance.products]
    tokens = record_of(source).value.numel() // record_of(source).value.shape[-1]
    opaque = opaque_nodes(captured, products)
    combine = find_combine(captured.graph, instances, rows, tokens, replay, opaque | family.passed)
    experts = rows.readings[0].matrices.shape[0]
    late = _late_bias(instances, combine.node, tags, experts) if bool((combine.offset != 0).any()) else None
    body = identify_body(instances, rows, replay, family.weights, late)
    added = body.down_bias if late is not None else None  # a bias inside the product is part of what was replaced
    if body.down_bias != added and bool((body.between != 1).any()):  # it would have to be there as often as the product
        raise Refuse("a factor between the projections is followed by a bias, so it is no routing weight", combine.node)
    pairs, experts = rows.pairs(combine.coefficients * body.between), body.down.matrices.shape[0]
    routed = family.routed(pairs, combine, source, instances, experts, added)
    idiom = _idiom([instance.second for instance in instances], captured)
    match = family.matched(source, routed, body, products, instances, stored, idiom)
    detached = is_cut_off(source, [contraction.data for i in instances for contraction in i.first])
    return replace(match, detached=detached)


def _late_bias(instances: list[Instance], end: Node, tags: Mapping[Node, Tag], experts: int) -> str | None:
    """The expert parameter that is added between the second product and the combine, if any."""
    seconds = {instance.second.node for instance in instances}
    between = (descendants(seconds) & ancestors([end])) - seconds
    computed = descendants([first.node for instance in instances for first in instance.first])
    beside = {node for node in ancestors(between) - computed if tags[node].experts and not tags[node].weight}
    bases = bias_bases(between | beside, tags, experts)
    if len(bases) > 1:
        raise Refuse("several expert parameters act on the expert outputs before they are combined", end)
    return bases[0] if bases else None


def _idiom(contractions: list[Contraction], captured: CapturedBlock) -> str:
    if batched := [c.node for c in contractions if c.expert == ALL]:
        return f"batched {operation(batched[0])}"
    operations = {operation(node) for node in captured.graph.nodes if node.op != "output"}
    sorted_first = operations & {"argsort", "sort"} and operations & {"split", "cat", "concat"}
    return "sorted slices" if sorted_first else "loop over experts"
