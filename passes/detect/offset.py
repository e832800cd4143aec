"""Explains what a combine holds besides the weighted expert products."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.fx

from hexa_fx.capture import record_of
from hexa_fx.capture.replay import Replay
from hexa_fx.passes.detect.combine import Combine
from hexa_fx.passes.detect.graph import ancestors, is_float
from hexa_fx.passes.detect.rows import Instance
from hexa_fx.passes.detect.slots import Pairs
from hexa_fx.passes.detect.stacks import WeightTable
from hexa_fx.passes.detect.tags import Tag
from hexa_fx.passes.detect.verdict import Refuse


@dataclass(frozen=True)
class Offset:
    """What a combine holds beside the weighted expert outputs and biases.

    Args:
        identity: the factor (T,) with which identity ("zero-computation") experts add the token, if they do.
        base: the tensor that the code adds the expert outputs onto, if it is not zeros.
    """

    identity: torch.Tensor | None = None
    base: torch.fx.Node | None = None


def explain_offset(
    pairs: Pairs,
    down_bias: str | None,
    combine: Combine,
    source: torch.fx.Node,
    weights: WeightTable,
    tags: Mapping[torch.fx.Node, Tag],
    replay: Replay,
) -> Offset:
    """What the combine holds without the products: weighted biases, the tokens times a factor, another tensor.

    Raises:
        Refuse: it holds something else.
    """
    offset = combine.offset
    expected = torch.zeros_like(offset)
    if down_bias is not None and bool((offset != 0).any()):
        vectors = weights.vectors(down_bias)
        if vectors is None:
            raise Refuse("an expert parameter after the second projection is not a bias vector", combine.node)
        expected.index_add_(0, pairs.token, pairs.after[:, None] * vectors[pairs.expert])
    if torch.allclose(offset, expected, rtol=1e-6, atol=1e-6):
        return Offset()
    base = _holding(offset - expected, combine.node, tags, replay)
    if base is not None:
        return Offset(base=base)
    x = replay.value(source).reshape(-1, record_of(source).value.shape[-1])
    if x.shape == offset.shape:
        factor = (offset * x).sum(1) / (x * x).sum(1).clamp(min=1e-300)
        if torch.allclose(offset, factor[:, None] * x, rtol=1e-6, atol=1e-6):
            return Offset(identity=factor)
    raise Refuse(
        "the tensor that collects the expert outputs holds something besides them (neither the experts' biases, nor the "
        "token itself, nor a tensor that the code had before)",
        combine.node,
    )


def check_base(
    base: torch.fx.Node,
    weights: Iterable[torch.fx.Node],
    instances: Iterable[Instance],
    end: torch.fx.Node,
    replay: Replay,
) -> None:
    """Experts are added onto ``base`` with any routing weights, not only with such that sum to one.

    An expert that returns ``x + f(x)`` adds the token once if the weights of a token sum to one, as they do on most examples.
    Other weights, here half of the example's, show that it is weighted.

    Args:
        weights: nodes that hold routing weights. instances: whose products are left out.

    Raises:
        Refuse: what lies beside the experts' outputs depends on the weights.
    """
    halved = {node: 0.5 * replay.value(node) for node in weights}
    none = {c: torch.zeros_like(replay.value(c)) for c in (instance.second.node for instance in instances)}
    before, after = (replay.run({**none, **weight}, [end])[end] for weight in ({}, halved))
    held = replay.value(base).reshape(before.shape)
    # A late bias of the experts is weighted too, if the weights are not normalised again on their way.
    expected = held + 0.5 * (before - held)
    if not any(torch.allclose(after, value, rtol=1e-6, atol=1e-6) for value in (before, expected)):
        raise Refuse("tokens reach the output past the experts with a weight that is not the router's", end)


def _holding(
    wanted: torch.Tensor, end: torch.fx.Node, tags: Mapping[torch.fx.Node, Tag], replay: Replay
) -> torch.fx.Node | None:
    """The last tensor before ``end`` with these numbers that does not depend on an expert."""
    behind = ancestors([end]) - {end}
    nodes: list[torch.fx.Node] = list(end.graph.nodes)
    for node in reversed(nodes):
        if node not in behind or not is_float(node) or tags[node].experts or tags[node].weight:
            continue
        value = record_of(node).value
        if value.numel() != wanted.numel() or value.shape[-1] != wanted.shape[-1]:
            continue
        if torch.allclose(replay.value(node).reshape(wanted.shape), wanted, rtol=1e-6, atol=1e-6):
            return node
    return None
