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

import torch
from torch.fx import Node

from hexa_fx.capture import CapturedBlock, StoredValue, record_of
from hexa_fx.capture.replay import Replay
from hexa_fx.ir import RUNS_ALREADY, Refusal
from hexa_fx.operations import operation
from hexa_fx.passes.detect.body import ExpertBody, bias_bases, identify_body
from hexa_fx.passes.detect.combine import Combine, find_combine
from hexa_fx.passes.detect.explain import explained, without_products
from hexa_fx.passes.detect.free import INSIDE, NotFree, detect_free, has_idle
from hexa_fx.passes.detect.graph import ancestors, descendants
from hexa_fx.passes.detect.match import Family, MoEMatch
from hexa_fx.passes.detect.projections import Contraction, find_contractions, group_instances, without_scores
from hexa_fx.passes.detect.rows import Instance, match_rows
from hexa_fx.passes.detect.rules import is_cut_off, opaque_nodes, stored_outside_calls
from hexa_fx.passes.detect.several import families_of, find_several, other_runs
from hexa_fx.passes.detect.slots import Pairs
from hexa_fx.passes.detect.tags import ALL, Tag, expert_groups, without_lone_parts
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
    _refuse_own_operators(captured)
    groups = expert_groups(captured.named_tensors())
    family = Family(captured, groups, Replay(captured), prefer_earliest)

    def look(
        members: frozenset[str] | None, passed: frozenset[Node] = frozenset(), aside: frozenset[Node] = frozenset()
    ) -> MoEMatch:
        part = replace(captured, set_aside=aside)
        return _detect_family(replace(family, captured=part, members=members, passed=passed), form)

    families = families_of(captured, groups)
    parts = [(part | families.ordinary, frozenset[Node]()) for part in families.apart]
    if (found := find_several(captured, groups, parts, look)) is not None:
        return found
    narrower = (narrow(captured, groups) for narrow in (without_lone_parts, without_scores))
    wanted = itertools.chain(families.side_by_side, [None], (members for members in narrower if members is not None))
    try:
        return first_match(partial(look, members) for members in wanted)
    except Refuse as refusal:
        runs = [(None, others) for others in other_runs(captured, groups)]
        if (found := find_several(captured, groups, runs, look)) is not None:
            return found
        raise explained(captured, families.repeated or refusal) from None


def _refuse_own_operators(captured: CapturedBlock) -> None:
    for node in captured.graph.nodes:
        if getattr(node.target, "namespace", "") == "hexa":
            raise Refuse(RUNS_ALREADY, node)


def _detect_family(family: Family, form: Form) -> MoEMatch:
    """The region with experts of the standard form, or else with experts of any form that run one at a time."""
    try:
        return _in_form(family, form)
    except Refuse as refusal:
        if refusal.reason == INSIDE:  # what stands in their way without dropout too is the reason
            _detect_standard(family)
        raise


def _in_form(family: Family, form: Form) -> MoEMatch:
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
    rows = match_rows(group_instances(contractions), captured, tags, family.replay, family.weights)
    match_of = partial(_match_of, family, stored)
    return first_match(partial(match_of, source, instances) for source, instances in rows)


def _match_of(family: Family, stored: tuple[StoredValue, ...], source: Node, instances: list[Instance]) -> MoEMatch:
    """The region if its tokens are the rows of ``source``."""
    captured, tags, replay = family.captured, family.tags, family.replay
    products = [c.node for instance in instances for c in (*instance.first, instance.second)]
    tokens = record_of(source).value.numel() // record_of(source).value.shape[-1]
    opaque = opaque_nodes(captured, products)
    combine = find_combine(captured.graph, instances, tokens, replay, opaque | family.passed)
    late = _late_bias(instances, combine.node, tags) if bool((combine.offset != 0).any()) else None
    body = identify_body(instances, tags, replay, family.weights, late)
    added = body.down_bias if late is not None else None  # a bias inside the product is part of what was replaced
    experts = body.down.matrices.shape[0]
    routed = family.routed(_pairs(instances, body, combine, added), combine, source, instances, experts, added)
    idiom = _idiom([instance.second for instance in instances], captured)
    match = family.matched(source, routed, body, products, instances, stored, idiom)
    detached = is_cut_off(source, [contraction.data for i in instances for contraction in i.first])
    return replace(match, detached=detached)


def _late_bias(instances: list[Instance], end: Node, tags: Mapping[Node, Tag]) -> str | None:
    """The expert parameter that is added between the second product and the combine, if any."""
    seconds = {instance.second.node for instance in instances}
    between = (descendants(seconds) & ancestors([end])) - seconds
    computed = descendants([first.node for instance in instances for first in instance.first])
    beside = {node for node in ancestors(between) - computed if tags[node].experts and not tags[node].weight}
    bases = bias_bases(between | beside, tags, instances[0].readings[0].matrices.shape[0])
    if len(bases) > 1:
        raise Refuse("several expert parameters act on the expert outputs before they are combined", end)
    return bases[0] if bases else None


def _pairs(instances: list[Instance], body: ExpertBody, combine: Combine, added: str | None) -> Pairs:
    """``added``: the bias that is added after the second product, if one is. It has to be there as often as what was multiplied."""
    token = torch.cat([instance.token for instance in instances])
    expert = torch.cat([instance.expert for instance in instances])
    before = torch.cat([instance.scale for instance in instances])
    after = torch.cat([a * b for a, b in zip(combine.coefficients, body.between)])
    if body.down_bias != added and any(bool((b != 1).any()) for b in body.between):
        raise Refuse("a factor between the projections is followed by a bias, so it is no routing weight", combine.node)
    real = token >= 0
    return Pairs(token[real], expert[real], before[real], after[real])


def _idiom(contractions: list[Contraction], captured: CapturedBlock) -> str:
    operations = {operation(node) for node in captured.graph.nodes if node.op != "output"}
    if any(contraction.expert == ALL for contraction in contractions):
        batched = next(c for c in contractions if c.expert == ALL)
        return f"batched {operation(batched.node)}"
    sorted_first = operations & {"argsort", "sort"} and operations & {"split", "cat", "concat"}
    return "sorted slices" if sorted_first else "loop over experts"
