"""Finds runs of experts that differ only in whose parameters they read, and where they end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.fx

from hexa_fx.capture import CapturedBlock, record_of
from hexa_fx.operations import operation
from hexa_fx.passes.detect.graph import ancestors, in_words, is_float, is_tensor, live_nodes
from hexa_fx.passes.detect.tags import ALL, Tag

Column = tuple[torch.fx.Node, ...]
"""The same value in every run of an expert, in the order of the runs."""


@dataclass(frozen=True)
class AlikeRuns:
    """Runs of experts that do the same thing.

    Args:
        ends: columns at which the runs may end, earliest first.
        readers: the nodes that take an expert's parameter as an operand.
    """

    ends: tuple[Column, ...]
    readers: tuple[torch.fx.Node, ...]


def find_alike_runs(captured: CapturedBlock, tags: Mapping[torch.fx.Node, Tag]) -> AlikeRuns | None:
    """Runs of single experts that do the same thing, by the structure of what they compute.

    None if fewer than two experts are run one at a time, or if they differ in what they compute.
    """
    live = live_nodes(captured.graph)
    readers = tuple(n for n in captured.graph.nodes if n in live and n.op != "output" and _reads_expert(n, tags))
    if not readers or not all(in_one_expert(reader, tags) for reader in readers):
        return None
    signature = _signatures(captured, tags)
    classes: dict[Hashable, list[torch.fx.Node]] = defaultdict(list)
    for node, value in signature.items():
        classes[value].append(node)
    runs = len(classes[signature[readers[0]]])
    if runs < 2 or any(len(classes[signature[reader]]) != runs for reader in readers):
        return None
    ends = tuple(tuple(column) for column in classes.values() if len(column) == runs and _may_end(column, readers))
    return AlikeRuns(ends, readers) if ends else None


def experts_of(column: Column, tags: Mapping[torch.fx.Node, Tag]) -> tuple[int, ...]:
    """The expert of every run."""
    return tuple(next(iter(tags[node].experts)) for node in column)


def in_one_expert(node: torch.fx.Node, tags: Mapping[torch.fx.Node, Tag]) -> bool:
    """Whether the value is computed with the parameters of exactly one expert, and with something else."""
    return not tags[node].weight and len(tags[node].experts) == 1 and ALL not in tags[node].experts


def expert_operands(node: torch.fx.Node, tags: Mapping[torch.fx.Node, Tag]) -> list[torch.fx.Node]:
    """Operands that are parameters of experts."""
    return [n for n in node.all_input_nodes if tags[n].weight and tags[n].experts and is_tensor(n)]


def _reads_expert(node: torch.fx.Node, tags: Mapping[torch.fx.Node, Tag]) -> bool:
    return not tags[node].weight and is_tensor(node) and bool(expert_operands(node, tags))


def _may_end(column: list[torch.fx.Node], readers: tuple[torch.fx.Node, ...]) -> bool:
    """Whether a node is a matrix of rows that every use of an expert's parameter leads to."""
    values = [record_of(node).value for node in column]
    if not is_float(column[0]) or any(value.dim() != 2 for value in values):
        return False
    return ancestors(column).issuperset(readers)


def _signatures(captured: CapturedBlock, tags: Mapping[torch.fx.Node, Tag]) -> dict[torch.fx.Node, Hashable]:
    """Gives equal numbers to nodes that compute the same from their run's rows and their expert's parameters."""
    found: dict[torch.fx.Node, Hashable] = {}
    numbers: dict[Hashable, int] = {}
    of_node = partial(_operand, tags=tags, found=found)
    for node in captured.graph.nodes:
        if node.op == "output" or not in_one_expert(node, tags):
            continue
        parts = (node.op, operation(node), record_of(node).gradient, in_words((node.args, node.kwargs), of_node))
        found[node] = numbers.setdefault(parts, len(numbers))
    return found


def _operand(
    node: torch.fx.Node, tags: Mapping[torch.fx.Node, Tag], found: Mapping[torch.fx.Node, Hashable]
) -> Hashable:
    """What can be said about an operand without knowing the run's rows."""
    if node in found:
        return "inside", found[node]
    value, tag = record_of(node).value, tags[node]
    if not isinstance(value, torch.Tensor):
        return "number"
    if tag.weight:
        return "parameter", tuple(sorted(tag.bases)), tuple(value.shape)
    return "tensor", value.dtype, tuple(value.shape[1:])
