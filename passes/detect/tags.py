"""Finds which experts' parameters every recorded value depends on, by dataflow alone."""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from hexa_fx import operations as ops
from hexa_fx.capture import CapturedBlock, record_of
from hexa_fx.operations import kind, operation
from hexa_fx.passes.detect.graph import is_float, is_tensor, traced

ALL = -1
"""Stands for every expert at once, in a value computed from stacked weights."""


@dataclass(frozen=True)
class Tag:
    """What a recorded value depends on.

    Args:
        experts: the experts whose parameters the value depends on; `ALL` where they are used together.
        weight: the value depends on nothing but parameters.
        bases: for a weight, the parameter or the expert group it comes from.
        ordinary: a weight that counts as no expert's, whatever its shape.
    """

    experts: frozenset[int] = frozenset()
    weight: bool = False
    bases: frozenset[str] = frozenset()
    ordinary: bool = False


@dataclass(frozen=True)
class ExpertGroups:
    """Per-expert parameters that differ in one number of their path, by a pattern with ``{}`` in its place."""

    members: Mapping[str, tuple[str, ...]]


_INDEX = re.compile(r"(?:(?<=^)|(?<=\.)|(?<=expert_)|(?<=experts_)|(?<=expert))\d+(?=\.|$)")
_NUMBER = re.compile(r"\d+(?=[^.]*\.)")
"""In the name of a module: ``w1``, ``w2`` and ``w3`` that are parameters may hold all experts each."""


def expert_groups(parameters: Mapping[str, torch.Tensor]) -> ExpertGroups:
    """Finds lists of like-shaped parameters numbered 0, 1, 2, ... A parameter belongs to its longest list; one of all, to none.

    If there are none, and no weight is stacked: sibling networks of the same structure, such as those that a dictionary holds by
    name; then names that differ in any one number (``default_0``, ``w1_0``), three or more from 0 or 1 on; then three or more
    siblings of one matrix each.
    """
    numbered = _numbered(parameters, _INDEX, starts=(0,), fewest=2)
    if numbered or any(parameter.dim() > 2 for parameter in parameters.values()):
        return ExpertGroups(numbered)
    return ExpertGroups(
        _named_siblings(parameters, matrices=2, fewest=2)
        or _numbered(parameters, _NUMBER, starts=(0, 1), fewest=3)
        or _named_siblings(parameters, matrices=1, fewest=3)
    )


def _numbered(
    parameters: Mapping[str, torch.Tensor], numbers: re.Pattern[str], starts: Collection[int], fewest: int
) -> dict[str, tuple[str, ...]]:
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for name in parameters:
        for match in numbers.finditer(name):
            found[name[: match.start()] + "{}" + name[match.end() :]][int(match.group())] = name
    complete = {
        pattern: tuple(by_index[i] for i in sorted(by_index))
        for pattern, by_index in found.items()
        if len(by_index) >= fewest and min(by_index) in starts and max(by_index) - min(by_index) + 1 == len(by_index)
        # of one shape, and not one parameter
        if len({parameters[name].shape for name in by_index.values()}) == 1
        if len({id(parameters[name]) for name in by_index.values()}) > 1
    }
    longest: dict[str, str] = {}  # of equally long ones the one of the outer number: two experts of two layers
    for pattern, names in sorted(complete.items(), key=lambda item: (-len(item[1]), item[0].index("{}"))):
        for name in names:
            longest.setdefault(name, pattern)
    return {p: names for p, names in complete.items() if all(longest[name] == p for name in names)}


def _named_siblings(parameters: Mapping[str, torch.Tensor], matrices: int, fewest: int) -> dict[str, tuple[str, ...]]:
    """The parameters of the largest set of siblings that hold the same.

    ``matrices``: how many each has to hold. If it is one, there are no other siblings: those of an attention are no experts.
    """
    inside: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in parameters:
        parts = name.split(".")
        for place in range(len(parts) - 1):
            inside[".".join(parts[:place])][parts[place]].append(".".join(parts[place + 1 :]))
    best: tuple[str, list[str], list[str]] = ("", [], [])
    for owner, children in inside.items():
        prefix = f"{owner}." if owner else ""
        alike: dict[tuple[Any, ...], list[str]] = defaultdict(list)
        for child, rests in children.items():
            shapes = [parameters[f"{prefix}{child}.{rest}"].shape for rest in rests]
            if sum(len(shape) == 2 for shape in shapes) >= matrices:
                alike[tuple(zip(rests, shapes))].append(child)
        largest = max(alike.values(), key=len, default=[])
        apart = len(alike) > 1 and any(map(str.isdigit, largest))  # a list of two kinds
        if len(largest) > len(best[1]) and not apart and (matrices > 1 or len(largest) == len(children)):
            best = (prefix, largest, children[largest[0]])
    prefix, names, rests = best
    if len(names) < fewest:
        return {}
    return {f"{prefix}{{}}.{rest}": tuple(f"{prefix}{name}.{rest}" for name in names) for rest in rests}


def shared_by_some(parameters: Mapping[str, torch.Tensor]) -> str | None:
    """A sentence on the first two experts that have a parameter in common, which not all of them have."""
    for names in expert_groups(parameters).members.values():
        first: dict[int, str] = {}
        for name in names:
            if first.setdefault(id(parameters[name]), name) != name:
                return (
                    f"some experts share a parameter: {name} is {first[id(parameters[name])]}; each has to have one of its own, "
                    "or all of them the same"
                )
    return None


def uneven_experts(parameters: Mapping[str, torch.Tensor], in_turn: Container[str] = ()) -> str | None:
    """A sentence about the first numbered list of parameters that differ in shape, or that some modules lack; else empty.

    ``in_turn``: paths of modules whose parts are numbered but no experts: they run one after another, as those of nn.Sequential.
    """
    found: dict[str, dict[int, torch.Size]] = defaultdict(dict)
    modules: dict[str, set[int]] = defaultdict(set)
    alike = {name for names in expert_groups(parameters).members.values() for name in names}
    for name, parameter in parameters.items():
        for match in _INDEX.finditer(name):
            if name[: match.start()].removesuffix(".") in in_turn:
                continue
            if name not in alike:
                found[name[: match.start()] + "{}" + name[match.end() :]][int(match.group())] = parameter.shape
            modules[name[: match.start()]].add(int(match.group()))
    for pattern, shapes in found.items():
        sizes = sorted({tuple(shape) for shape in shapes.values()})
        if len(sizes) > 1:
            return (
                f"the experts differ in shape: {pattern} is {' and '.join(str(size) for size in sizes)}; only experts of one shape "
                "are rewritten"
            )
        if len(shapes) < len(modules[pattern.partition("{}")[0]]) and len(shapes) > 1:
            return f"the experts differ in structure: only some of them hold {pattern}; only experts of one structure are rewritten"
    return None


def tag(captured: CapturedBlock, groups: ExpertGroups, only: frozenset[str] | None = None) -> dict[Node, Tag]:
    """A tag for every node of the recorded graph.

    ``only``: the parameters and groups that count as experts'. All others are ordinary weights, such as a list of shared experts.
    """
    group_of = {name: (pattern, i) for pattern, names in groups.members.items() for i, name in enumerate(names)}
    counts = expert_counts(captured, groups)
    tags: dict[Node, Tag] = {}
    for node in captured.graph.nodes:
        if node.op == "output":
            continue
        aside = node in captured.set_aside
        found = Tag() if aside else _tag_node(node, tags, group_of, captured, counts)
        ordinary = only is not None and found.weight and not found.bases & only
        tags[node] = Tag(weight=True, bases=found.bases, ordinary=True) if ordinary else found
    return tags


def all_but(captured: CapturedBlock, groups: ExpertGroups, left_out: frozenset[str]) -> frozenset[str]:
    """The parameters and groups that may be experts', but for some."""
    read = {str(node.target) for node in captured.graph.find_nodes(op="get_attr", sort=False)}
    grouped = {name for names in groups.members.values() for name in names}
    return (frozenset(groups.members) | read - grouped) - left_out


def lone_parts(captured: CapturedBlock, groups: ExpertGroups) -> frozenset[str]:
    """Stacks and lists of which the code itself picks one part, as it picks the gate of a task by the task's number."""
    read = [n for n in captured.graph.find_nodes(op="get_attr", sort=False) if n.target not in captured.constants]
    names_read = {str(n.target) for n in read}
    listed = {base for base, names in groups.members.items() if len(names_read.intersection(names)) == 1 < len(names)}
    grouped = {name for names in groups.members.values() for name in names}
    return frozenset(listed).union(str(n.target) for n in read if is_stack(n) and _reads_one_part(n)) - grouped


def _reads_one_part(stack: Node) -> bool:
    parts = [node.args[1] if operation(node) == "getitem" else None for node in stack.users]
    return len(set(map(repr, parts))) == 1 and isinstance(parts[0], int)


def expert_counts(captured: CapturedBlock, groups: ExpertGroups) -> set[int]:
    """Numbers of experts that lists and the shapes of stacks allow."""
    values = (record_of(node).value for node in captured.graph.nodes if node.op == "get_attr")
    stacked = {value.shape[0] for value in values if value.dim() >= 3}
    return {len(names) for names in groups.members.values()} | stacked


def _tag_node(
    node: Node,
    tags: Mapping[Node, Tag],
    group_of: Mapping[str, tuple[str, int]],
    captured: CapturedBlock,
    counts: set[int],
) -> Tag:
    if node.op == "placeholder" or operation(node) == "size":
        return Tag()
    if node.op == "get_attr":
        name = str(node.target)
        if name in captured.constants or not is_float(node):  # integers are tables, such as of experts by token
            return Tag()
        base, *expert = group_of.get(name, (name,))
        return Tag(frozenset(expert), weight=True, bases=frozenset({base}))
    inputs = node.all_input_nodes
    weights = [n for n in inputs if tags[n].weight]
    if node.target is operator.getitem and weights and node.args[0] is weights[0]:
        return _tag_selection(node, tags, counts)
    by_expert = (
        bool(weights) and kind(node) in ("repeat_interleave", "embedding") and _has_a_part_each(weights[0], counts)
    )
    if by_expert and len(weights) < len([n for n in inputs if is_tensor(n)]):
        return Tag(frozenset({ALL}), weight=True, bases=tags[weights[0]].bases)
    if weights and all(tags[n].weight or not is_tensor(n) for n in inputs):
        experts = frozenset[int]().union(*(tags[n].experts for n in weights))
        bases = frozenset[str]().union(*(tags[n].bases for n in weights))
        if operation(node) == "stack" and len(bases) == 1 and len(experts) > 1:
            experts = frozenset({ALL})  # a list of per-expert parameters stacked on the fly
        return Tag(experts, weight=True, bases=bases)
    experts = frozenset[int]().union(*(tags[n].experts for n in inputs))
    if ops.contracts(node) and any(not tags[n].experts and not tags[n].ordinary and is_stack(n) for n in weights):
        experts |= {ALL}
    return Tag(experts)


def _has_a_part_each(weight: Node, counts: set[int]) -> bool:
    """Whether a weight has a part for each expert, perhaps with rows after these for slots without an expert, and is no matrix
    that tokens are multiplied with, as a router's is."""
    weight = traced(weight, ops.of("cat pad"))[-1]
    if record_of(weight).value.shape[:1].numel() not in counts:
        return False
    alike = weight.graph.find_nodes(op="get_attr", target=weight.target, sort=False) if weight.op == "get_attr" else []
    return not any(ops.contracts(user) for read in (weight, *alike) for user in read.users)


def _tag_selection(node: Node, tags: Mapping[Node, Tag], counts: set[int]) -> Tag:
    """``weight[index]``: picks one expert, gathers experts by a tensor of ids, or takes several experts or a part of a matrix."""
    base, place = node.args[0], _index_of_experts(node)
    assert isinstance(base, Node)
    tag = tags[base]
    is_mask = isinstance(place, bool) or (isinstance(place, torch.Tensor) and place.dtype == torch.bool)
    if tag.experts or is_mask or not isinstance(place, (int, slice, torch.Tensor)):
        return tag
    if isinstance(place, torch.Tensor) and place.numel() != 1:
        numbers = record_of(base).value.dim() == 1  # one for each expert, which may be a router's
        return tag if numbers else Tag(frozenset({ALL}), weight=True, bases=tag.bases)
    picked = _experts_at(base, place if isinstance(place, slice) else int(place), counts)
    if len(picked) != 1 or (isinstance(place, slice) and record_of(base).value.shape[0] == 1):
        return tag
    return Tag(frozenset(picked), weight=True, bases=tag.bases)


def _index_of_experts(node: Node) -> object:
    """The subscript of the first dimension, or of a list of pieces."""
    index = node.args[1]
    first = index[0] if isinstance(index, (tuple, list)) and index else index
    return torch.fx.node.map_arg(first, lambda operand: record_of(operand).value)


def _experts_at(base: Node, place: int | slice, counts: set[int]) -> range:
    """The experts whose parts ``base[place]`` holds; none if ``base`` holds no experts along its first dimension."""
    if is_tensor(base):
        held = _experts_in(base, counts)
        return held[place] if isinstance(place, slice) else held[place:][:1]
    position = 1 if operation(base) == "unbind" else 2
    dim = base.kwargs.get("dim", base.args[position] if len(base.args) > position else 0)
    if not _cuts_experts(base) or dim != 0 or isinstance(place, slice):
        return range(0)
    held, pieces = _experts_in(base.all_input_nodes[0], counts), record_of(base).value
    if not held or operation(base) == "unbind":
        return (held or range(len(pieces)))[place:][:1]  # none held: a matrix of all experts below each other
    start = sum(map(len, pieces[: place % len(pieces)]))
    return held[start : start + len(pieces[place])]


def _experts_in(node: Node, counts: set[int]) -> range:
    """The experts whose parts a stack, or what was cut out of one, holds along its first dimension; none if it is no stack."""
    if not is_tensor(node):
        return range(0)
    if node.target is operator.getitem and isinstance(base := node.args[0], Node):
        place = _index_of_experts(node)
        if isinstance(place, slice) or (isinstance(place, int) and not is_tensor(base)):
            return _experts_at(base, place, counts)
    shape = record_of(node).value.shape
    return range(shape[0]) if len(shape) >= 3 or (len(shape) >= 1 and shape[0] in counts) else range(0)


_cuts_experts = ops.of("chunk split split_with_sizes tensor_split unbind")


def is_stack(node: Node) -> bool:
    """Whether it holds several matrices: not one alone, perhaps repeated for each sequence."""
    value = record_of(node).value
    several = node.op == "get_attr" or (is_tensor(node) and value.shape[:1] != (1,) and value.stride()[:1] != (0,))
    return is_tensor(node) and value.dim() >= 3 and several
