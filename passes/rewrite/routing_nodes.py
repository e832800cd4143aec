"""Emits what says where tokens go: the experts of every token, factors, and the slots that are kept, each as (T, k)."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.fx

from hexa_fx import operations as ops
from hexa_fx.capture import record_of
from hexa_fx.passes.detect.graph import is_float, is_tensor
from hexa_fx.passes.detect.match import MoEMatch
from hexa_fx.passes.detect.routing_factors import RoutingSource
from hexa_fx.passes.detect.slots import chosen_apart
from hexa_fx.passes.ranks import ranks_of_choices, repeated_in_groups
from hexa_fx.passes.rewrite.given_ids import given_ids
from hexa_fx.runtime import guards


@dataclass
class RoutingEmitter:
    """Emits a region's routing into a graph.

    Args:
        match: the region.
        graph: where to emit it.
        outside: the new node of every recorded one that the routing is read from.
    """

    match: MoEMatch
    graph: torch.fx.Graph
    outside: Mapping[torch.fx.Node, torch.fx.Node]

    def as_given(self, index: torch.fx.Node) -> torch.fx.Node:
        """The ids, checked where the block is given them and its code does something else with an id of no expert."""
        found = given_ids(self.match)
        if found is None:
            return index
        experts = self.match.num_experts
        return self.graph.call_function(
            guards.require_experts, (index, found.past, experts if found.from_the_end else 0)
        )

    def kept(self, index: torch.fx.Node) -> torch.fx.Node:
        """The ids, and E in the slots that are not kept."""
        for source in self.match.routing.keep:
            marks = self.quantity(source, index, as_marks=True)
            is_bool = record_of(source.nodes[0]).value.dtype == torch.bool
            dropped = self.graph.call_function(*((operator.invert, (marks,)) if is_bool else (operator.eq, (marks, 0))))
            index = self.graph.call_method("masked_fill", (index, dropped, self.match.num_experts))
        return index

    def within_capacity(self, index: torch.fx.Node, kept: torch.fx.Node) -> torch.fx.Node:
        """``kept`` with E in the slots that come after their expert was full. ``index``: the ids as the router gives them."""
        capacity = self.match.routing.capacity
        if capacity is None:
            return kept
        rank = self.graph.call_function(ranks_of_choices, (index, capacity.order))
        limit = capacity.limit if isinstance(capacity.limit, int) else self.outside[capacity.limit]
        late = self.graph.call_function(operator.ge, (rank, limit))
        return self.graph.call_method("masked_fill", (kept, late, self.match.num_experts))

    def quantity(self, source: RoutingSource, index: torch.fx.Node | None, as_marks: bool = False) -> torch.fx.Node:
        """A routing quantity as (T, k); a factor as floating point, ``as_marks`` as it is."""
        k, call = self.match.routing.top_k, self.graph.call_method
        nodes = [self.outside[node] for node in source.nodes]
        value = record_of(source.nodes[0]).value
        if value.is_floating_point() and not any(_has_gradient(node, self.match.output) for node in source.nodes):
            nodes = [call("detach", (node,)) for node in nodes]
        if source.reading == "columns":
            if value.dim() == 2 and value.shape[1] == 1:
                return self.graph.call_function(torch.cat, (nodes, 1))
            flat = nodes if value.dim() == 1 else [call("reshape", (node, -1)) for node in nodes]
            return self.graph.call_function(torch.stack, (flat, 1))
        node = self._of_each_token(nodes[0]) if source.groups else nodes[0]
        if not as_marks and (value.dtype == torch.bool or (index is not None and not value.is_floating_point())):
            node = call("to", (node, record_of(self.match.source).value.dtype))
        if source.reading == "token_slot":
            return node if value.dim() == 2 and value.shape[1] == k else call("reshape", (node, -1, k))
        if source.reading == "slot_token":
            return call("t", (call("reshape", (node, k, -1)),))
        if source.reading == "one_hot":
            return self._ids_of_marks(node)
        if source.reading == "token":
            return call("expand", (call("reshape", (node, -1, 1)), -1, k))
        assert index is not None
        index = self._in_range(index)
        if source.reading == "expert":
            return self.graph.call_function(operator.getitem, (call("reshape", (node, -1)), index))
        factors = call("gather", (self._by_expert(node, source, value), 1, index))
        return factors if as_marks or not chosen_apart(self.match.routing.index.nodes) else self._once(factors, index)

    def times_constant(
        self, factor: torch.fx.Node | None, index: torch.fx.Node, tokens: torch.fx.Node
    ) -> torch.fx.Node | None:
        """The factor (T, k) of the outputs, and the number in the code that they are multiplied by too."""
        constant = self.match.routing.constant
        if constant == 1:
            return factor
        if factor is not None:
            return self.graph.call_function(operator.mul, (factor, constant))
        return self.graph.call_method("new_full", (tokens, self.graph.call_method("size", (index,)), constant))

    def _of_each_token(self, node: torch.fx.Node) -> torch.fx.Node:
        return self.graph.call_function(repeated_in_groups, (node, self.outside[self.match.source]))

    def _once(self, factors: torch.fx.Node, index: torch.fx.Node) -> torch.fx.Node:
        """``factors`` and zeros for an expert that an earlier slot of the token names: a table has one number for both."""
        call = self.graph.call_method
        same = call("eq", (call("unsqueeze", (index, 2)), call("unsqueeze", (index, 1))))
        return call("masked_fill", (factors, call("any", (call("tril", (same, -1)), -1)), 0))

    def _in_range(self, index: torch.fx.Node) -> torch.fx.Node:
        """The ids as indices of a table, whatever is found there for those of no expert."""
        recorded = torch.cat([record_of(node).value.flatten() for node in self.match.routing.index.nodes])
        experts = self.match.num_experts
        if int(recorded.max()) < experts and int(recorded.min()) >= 0 and not self.match.routing.keep:
            return index
        return self.graph.call_method("clamp", (index, 0, experts - 1))

    def _ids_of_marks(self, node: torch.fx.Node) -> torch.fx.Node:
        """(T, k, E) zeros and ones as (T, k) ids; E where no expert is marked."""
        call, experts = self.graph.call_method, self.match.num_experts
        marks = call("reshape", (node, -1, self.match.routing.top_k, experts))
        ids = call("argmax", (call("int", (marks,)), -1))
        unmarked = self.graph.call_function(operator.eq, (call("sum", (marks, -1)), 0))
        return call("masked_fill", (ids, unmarked, experts))

    def _by_expert(self, node: torch.fx.Node, source: RoutingSource, value: torch.Tensor) -> torch.fx.Node:
        """A routing quantity as (T, E)."""
        call, experts = self.graph.call_method, self.match.num_experts
        if source.reading == "token_expert":
            return node if value.dim() == 2 else call("reshape", (node, -1, experts))
        if source.reading == "expert_token":
            return call("t", (call("reshape", (node, experts, -1)),))
        return call("reshape", (call("sum", (node, -1)), -1, experts))


def _has_gradient(node: torch.fx.Node, end: torch.fx.Node) -> bool:
    """Whether a gradient of ``end`` reaches ``node``: plain numbers that the code reads of it pass none on."""
    left, seen = [node], {node}
    while left:
        users = [user for user in left.pop().users if user not in seen and not ops.gives_numbers(user)]
        if end in users:
            return True
        seen |= set(users)
        left += [user for user in users if user.op != "output" and (is_float(user) or not is_tensor(user))]
    return False
