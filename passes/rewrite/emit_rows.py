"""Emits a `FreeBody` as nodes over all routed rows at once: directly in level 2, with the operators' own autograd.

v, inv, offs = reindex(ids, E); rows = x[v // k]; every product an esmm; every other parameter of an expert gathered by the
row's expert; the rest as recorded; y = combine(rows, weights).

Rows of sentinel ids belong to no expert, and the combine skips them. Whatever enters them is replaced by a constant, so that they
never send a gradient, let alone NaN, back to a token.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate

import hexa_fx.ops  # noqa: F401  (defines torch.ops.hexa)
from hexa_fx.capture import record_of
from hexa_fx.operations import operation
from hexa_fx.passes.detect.free import probability
from hexa_fx.passes.detect.graph import is_float
from hexa_fx.passes.detect.routing_sources import RoutingSource
from hexa_fx.passes.detect.steps import (
    FreeBody,
    FromExpert,
    OfExpert,
    Outside,
    Product,
    Role,
    RowCount,
    RowFactor,
    Shared,
    TokenRows,
)
from hexa_fx.passes.rewrite.weights import WeightEmitter
from hexa_fx.torch_private import _disable_dynamo


# What is drawn depends on how many rows each expert has. `torch.compiler.disable` would import all of dynamo now.
@_disable_dynamo
def kept_rows(
    like: Tensor,
    v: Tensor,
    offs: Tensor,
    top_k: int,
    slots_first: bool,
    kinds: Sequence[tuple[tuple[int, ...], torch.dtype | None, float]],
) -> list[Tensor]:
    """What the dropouts of all experts keep, drawn for one expert after the other, in each for one dropout after the other.

    Reads ``offs`` on the host.

    Args:
        like: of the device, and of the dtype of rows where none is named.
        v, offs: of `hexa_fx.ops.reindex.reindex`.
        slots_first: whether the code lists an expert's rows by slot and then by token; else by token.
        kinds: of each dropout the shape of a row, the dtype of the rows and the probability.

    Returns:
        for each dropout (n, *shape) bool; true in rows of sentinel ids.
    """
    masks = [torch.ones((len(v), *shape), dtype=torch.bool, device=like.device) for shape, _, _ in kinds]
    ends = offs.tolist()
    for start, end in pairwise(ends):
        for mask, (shape, dtype, p) in zip(masks, kinds if end > start else ()):
            ones = torch.ones((end - start, *shape), dtype=dtype or like.dtype, device=like.device)
            mask[start:end] = F.dropout(ones, p) != 0
    if not slots_first:
        return masks
    group = torch.searchsorted(
        offs[1:].contiguous(), torch.arange(len(v), device=v.device, dtype=offs.dtype), right=True
    )
    order = (group * top_k + v % top_k).argsort(stable=True)
    return [torch.empty_like(mask).index_copy_(0, order, mask) for mask in masks]


def drop(rows: Tensor, kept: Tensor, p: float) -> Tensor:
    """``F.dropout(rows, p)`` that keeps what ``kept``, of the shape of the rows, says; with torch's own rounding on the device."""
    if rows.is_cuda:
        dropped: Tensor = torch.ops.aten.native_dropout_backward(rows, kept, 0.0 if p == 1 else 1 / (1 - p))
        return dropped
    factor = kept.to(rows.dtype)
    return rows * (factor if p == 1 else factor.div_(1 - p))


@dataclass
class RowEmitter:
    """Emits a body into a graph.

    Args:
        outside, as_rows: the new node of a recorded one, as it is or flattened to (T, C).
        factor: the product of routing quantities as (T, k), None for 1.
    """

    graph: torch.fx.Graph
    weights: WeightEmitter
    body: FreeBody
    outside: Callable[[Node], Node]
    as_rows: Callable[[Node], Node]
    factor: Callable[[Sequence[RoutingSource]], Node | None]
    _new: dict[Node, Node] = field(default_factory=dict)
    _kept: dict[Node, Node] = field(default_factory=dict)
    _gathered: dict[tuple[str, tuple[int, ...]], Node] = field(default_factory=dict)

    def emit(self, index: Node, weights: Node | None, top_k: int) -> Node:
        """The (T, D) result for ids and routing weights (T, k)."""
        self._route(index, top_k)
        for node, role in self.body.steps.items():
            if not isinstance(role, (OfExpert, FromExpert)):
                made, cut = self._step(node, role), is_float(node) and not record_of(node).gradient
                self._new[node] = self._method("detach", made) if cut else made
        rows = self._new[self.body.output]
        return self._call(torch.ops.hexa.combine.default, rows, weights, self._inv, self._offs, top_k)

    def _route(self, index: Node, top_k: int) -> None:
        experts = self.body.experts
        self._top_k = top_k
        routed = self._call(torch.ops.hexa.reindex.default, index, experts)
        self._v, self._inv, self._offs = (
            self._call(operator.getitem, routed, i, name=name) for i, name in enumerate(("v", "inv", "offs"))
        )
        chosen = self._method("index_select", self._method("reshape", index, -1), 0, self._v)
        self._expert = self._method("clamp", chosen, 0, experts - 1)
        self._is_routed = {1: self._call(operator.eq, chosen, self._expert, name="is_routed")}
        self._draw()

    def _draw(self) -> None:
        """What all dropouts keep, drawn before any of them is reached, since the original draws expert after expert."""
        drops = self.body.dropouts
        if not drops:
            return
        source = next(role.source for role in self.body.steps.values() if isinstance(role, TokenRows))
        own, values = record_of(source).value.dtype, [record_of(node).value for node in drops]
        kinds = [
            (self.body.row_shape(n), None if v.dtype == own else v.dtype, probability(n)) for n, v in zip(drops, values)
        ]
        like = self.as_rows(source)
        masks = self._call(kept_rows, like, self._v, self._offs, self._top_k, self.body.slots_first, kinds)
        self._kept = {node: self._call(operator.getitem, masks, number) for number, node in enumerate(drops)}

    def _step(self, node: Node, role: Role) -> Node:
        match role:
            case TokenRows(source):
                return self._token_rows(node, source)
            case RowFactor(sources):
                return self._row_factor(node, sources)
            case RowCount():
                return self._method("size", self._v, 0)
            case Outside():
                return self.outside(node)
            case Shared(name):
                return self.graph.get_attr(name)
            case Product():
                return self._product(role)
        return self._copy(node)

    # -- rows ----------------------------------------------------------------------------------------------------------

    def _token_rows(self, node: Node, source: Node) -> Node:
        """x[v // k], or the tokens themselves if only products read them, which gather as they read."""
        tokens, value = self.as_rows(source), record_of(node).value
        # Each expert may cast what it is given, as adapters of another dtype do.
        if record_of(source).value.dtype != value.dtype:
            tokens = self._method("to", tokens, value.dtype)
        if self._only_in_products(node):
            return tokens
        token = self._v if self._top_k == 1 else self._call(operator.floordiv, self._v, self._top_k)
        return self._routed_only(self._method("index_select", tokens, 0, token), self._dims(node))

    def _dims(self, node: Node) -> int:
        """Of what stands for a recorded node, whose rows lie in one dimension here."""
        return 1 + len(self.body.row_shape(node))

    def _only_in_products(self, node: Node) -> bool:
        steps = self.body.steps
        return all(isinstance(steps[user], Product) for user in node.users if user in steps)

    def _routed_only(self, rows: Node, dims: int) -> Node:
        """``rows`` with a constant in the rows without an expert."""
        if dims not in self._is_routed:
            self._is_routed[dims] = self._method("view", self._is_routed[1], -1, *[1] * (dims - 1))
        return self._call(torch.where, self._is_routed[dims], rows, 1.0)

    def _row_factor(self, node: Node, sources: Sequence[RoutingSource]) -> Node:
        factor, value = self.factor(sources), record_of(node).value
        shape = (-1, *[1] * len(self.body.row_shape(node)))
        if factor is None:
            return self._method(
                "new_ones", next(iter(self._new.values())), (self._method("size", self._v, 0), *shape[1:])
            )
        flat = self._method("index_select", self._method("reshape", factor, -1), 0, self._v)
        if record_of(sources[0].nodes[0]).value.dtype != value.dtype:
            flat = self._method("to", flat, value.dtype)
        return self._routed_only(self._method("view", flat, *shape), len(shape))

    # -- parameters ----------------------------------------------------------------------------------------------------

    def _product(self, role: Product) -> Node:
        weight = self.weights.matrices(role.base, self.body.experts)
        bias = None if role.bias is None else self.weights.vectors(role.bias)
        gathered = isinstance(self.body.steps[role.data], TokenRows) and self._only_in_products(role.data)
        v, top_k = (self._v, self._top_k) if gathered else (None, 1)
        data = self._new[role.data]
        rows = self._call(torch.ops.hexa.esmm.default, data, weight, bias, v, self._offs, top_k, role.layout)
        return self._routed_only(rows, 2) if self._shares() else rows

    def _shares(self) -> bool:
        """Whether rows meet a tensor that all experts share, whose gradient the zero rows of an esmm could spoil (as 0/0 does)."""
        return any(isinstance(role, (Shared, Outside)) and is_float(node) for node, role in self.body.steps.items())

    def _of_expert(self, role: OfExpert, dims: int) -> Node:
        """The parameter of every row's expert, (n, 1, ..., *shape) with ``dims`` dimensions."""
        shape = role.shape
        while len(shape) >= dims and shape[:1] == (1,):
            shape = shape[1:]
        shape = (*[1] * (dims - 1 - len(shape)), *shape)
        key = role.base, shape
        if key not in self._gathered:
            table = self.weights.vectors(role.base)
            taken = self._method("index_select", table, 0, self._expert)
            self._gathered[key] = self._routed_only(self._method("view", taken, -1, *shape), len(shape) + 1)
        return self._gathered[key]

    # -- other operations ----------------------------------------------------------------------------------------------

    def _copy(self, node: Node) -> Node:
        if node in self._kept:
            return self._call(drop, self._operand(node.all_input_nodes[0], node), self._kept[node], probability(node))
        parameters = [n for n in node.all_input_nodes if isinstance(self.body.steps[n], (OfExpert, FromExpert))]
        if parameters and operation(node) in _SPECIAL:
            return _SPECIAL[operation(node)](self, node)
        return self._as_recorded(node, lambda operand: self._operand(operand, node))

    def _as_recorded(self, node: Node, operand: Callable[[Node], Node]) -> Node:
        copy = self.graph.node_copy(node, operand)
        copy.meta = {"from": node.name, "location": record_of(node).location}
        self._count_dims(copy, _PLACE_OF_DIM.get(operation(node), 0))
        return copy

    def _count_dims(self, copy: Node, place: int) -> None:
        """Counts dimensions of what a row has from the one dimension that rows lie in here. ``place``: that of ``dim``, or 0."""

        def counted(dim: Any) -> Any:
            return dim - self.body.lead + 1 if isinstance(dim, int) and dim >= self.body.lead else dim

        if "dim" in copy.kwargs:
            copy.update_kwarg("dim", map_aggregate(copy.kwargs["dim"], counted))
        if 0 < place < len(copy.args):
            copy.update_arg(place, map_aggregate(copy.args[place], counted))

    def _operand(self, operand: Node, reader: Node) -> Node:
        is_parameter = isinstance(self.body.steps[operand], (OfExpert, FromExpert))
        return self._of_parameter(operand, self._dims(reader)) if is_parameter else self._new[operand]

    def _of_parameter(self, node: Node, dims: int) -> Node:
        """A parameter of every row's expert, or what is made of it, for a reader with ``dims`` dimensions."""
        role = self.body.steps[node]
        if isinstance(role, OfExpert):
            return self._of_expert(role, dims)
        return self._as_recorded(node, lambda operand: self._of_parameter(operand, dims))

    def _norm(self, node: Node) -> Node:
        """A normalisation with the expert's weight and bias: done without them, then scaled and shifted."""
        bias = () if operation(node) == "rms_norm" else ("bias",)
        named = dict(zip(("input", "normalized_shape", "weight", *bias, "eps"), node.args)) | dict(node.kwargs)
        given = {key: torch.fx.map_arg(named[key], self._new.__getitem__) for key in ("input", "normalized_shape")}
        eps = {"eps": named["eps"]} if named.get("eps") is not None else {}
        assert callable(node.target)
        result = self.graph.call_function(node.target, tuple(given.values()), eps)
        for key, combine in (("weight", operator.mul), ("bias", operator.add)):
            parameter = named.get(key)
            if isinstance(parameter, Node):
                result = self._call(combine, result, self._operand(parameter, node))
        return result

    def _prelu(self, node: Node) -> Node:
        data, slope = node.all_input_nodes
        x, dims = self._new[data], self._dims(node)
        role = self.body.steps[slope]
        assert isinstance(role, OfExpert)
        per_channel = OfExpert(role.base, (*role.shape, *[1] * (dims - 2)))
        positive = self._call(operator.gt, x, 0)
        return self._call(torch.where, positive, x, self._call(operator.mul, self._of_expert(per_channel, dims), x))

    def _call(self, target: Callable[..., Any], *args: Any, name: str | None = None) -> Node:
        return self.graph.create_node("call_function", target, args, name=name)

    def _method(self, name: str, *args: Any) -> Node:
        return self.graph.call_method(name, args)


_REDUCE = "sum mean max min amax amin var std logsumexp softmax log_softmax cumsum glu"
_SHAPE = "cat stack squeeze unsqueeze flatten unflatten flip size"
_PLACE_OF_DIM = dict.fromkeys(f"{_REDUCE} {_SHAPE}".split(), 1) | dict.fromkeys("chunk split normalize norm".split(), 2)

_SPECIAL: dict[str, Callable[[RowEmitter, Node], Node]] = {
    "layer_norm": RowEmitter._norm,
    "rms_norm": RowEmitter._norm,
    "prelu": RowEmitter._prelu,
}
