"""Emits the MoE region in the rewritten graph: as one `hexa::moe_ffn`, or operator by operator for an unusual expert."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
import torch.fx

import hexa_fx.ops  # noqa: F401  (defines torch.ops.hexa)
from hexa_fx.capture import record_of
from hexa_fx.ir import FfnSpec
from hexa_fx.passes.detect.body import ExpertBody
from hexa_fx.passes.detect.free_body import FreeBody
from hexa_fx.passes.detect.graph import ancestors, operation
from hexa_fx.passes.detect.match import MoEMatch
from hexa_fx.passes.detect.routing_factors import Source
from hexa_fx.passes.emit_rows import RowEmitter
from hexa_fx.passes.weights import WeightEmitter
from hexa_fx.runtime import guards

Live: TypeAlias = Literal["gt", "ne"]


@dataclass
class RegionEmitter:
    """Emits a region into a graph.

    Args:
        match: the region.
        graph, weights: where to emit it.
        outside: the new node of every recorded one that the region reads.
        live: the comparison of a routing weight with 0 that says whether its pair runs at all; None: all do.
    """

    match: MoEMatch
    graph: torch.fx.Graph
    weights: WeightEmitter
    outside: Mapping[torch.fx.Node, torch.fx.Node]
    recompute_h: bool
    live: Live | None = None

    def emit(self) -> torch.fx.Node:
        """The node that stands for the region's output."""
        match, routing = self.match, self.match.routing
        tokens = self._as_rows(self.outside[match.source], record_of(match.source).value)
        index = self._routing(routing.index, None)
        self._require_slots(index)
        factor = self._product(routing.after, index)
        before = self._product(routing.before, index)
        if match.detached:
            tokens = self.graph.call_method("detach", (tokens,))
            before = None if before is None else self.graph.call_method("detach", (before,))
        if before is not None:
            tokens, index, factor = self._scale_rows(tokens, index, factor, before)
        past_experts = self._identity(tokens, index, factor) if match.identity and factor is not None else None
        index = self._without_dead(self._within_sentinel(index), factor)
        if isinstance(match.body, FreeBody):
            result = self._free(match.body, index, factor)
        else:
            result = self._canonical(match.body, tokens, index, factor)
        if before is not None and routing.top_k > 1:
            result = self.graph.call_method(
                "sum", (self.graph.call_method("unflatten", (result, 0, (-1, routing.top_k))), 1)
            )
        if past_experts is not None:
            result = self.graph.call_function(operator.add, (result, past_experts))
        if match.base is not None:
            base = self._as_rows(self.outside[match.base], record_of(match.base).value)
            result = self.graph.call_function(operator.add, (base, result))
        result = self._restore(result, self._dtype())
        return self.graph.call_method("detach", (result,)) if match.constant else result

    def _canonical(
        self,
        body: ExpertBody,
        tokens: torch.fx.Node,
        index: torch.fx.Node,
        factor: torch.fx.Node | None,
    ) -> torch.fx.Node:
        operands = self.weights.emit(body)
        static = (operands.glu, operands.layout1, operands.layout2, body.params, self.recompute_h)
        spec = FfnSpec(body.activation, *static)
        result = self.graph.call_function(
            torch.ops.hexa.moe_ffn.default,
            (tokens, index, factor, operands.w1, operands.b1, operands.w3, operands.b3, operands.w2, operands.b2)
            + (spec.activation, spec.glu, list(spec.params), spec.layout1, spec.layout2, spec.recompute_h),
        )
        result.meta["hexa"] = spec
        result.meta["top_k"] = 1 if self.match.routing.before else self.match.routing.top_k
        return result

    def _free(self, body: FreeBody, index: torch.fx.Node, factor: torch.fx.Node | None) -> torch.fx.Node:
        emitter = RowEmitter(
            graph=self.graph,
            weights=self.weights,
            body=body,
            outside=self.outside.__getitem__,
            as_rows=lambda node: self._as_rows(self.outside[node], record_of(node).value),
            factor=lambda sources: self._product(sources, index),
        )
        return emitter.emit(index, factor, self.match.routing.top_k)

    def _within_sentinel(self, index: torch.fx.Node) -> torch.fx.Node:
        """Turns ids without a stored expert into E, the id that contributes nothing."""
        nodes, experts = self.match.routing.index.nodes, self.match.num_experts
        recorded = torch.cat([record_of(node).value.flatten() for node in nodes])
        if int(recorded.max()) > experts:
            index = self.graph.call_method("clamp", (index,), {"max": experts})
        if int(recorded.min()) < 0:
            negative = self.graph.call_function(operator.lt, (index, 0))
            index = self.graph.call_method("masked_fill", (index, negative, experts))
        return index

    def _require_slots(self, index: torch.fx.Node) -> None:
        """Where the number of experts per token is computed, as in ``topk(min(k, len(x)))``, it is none if there are no tokens."""
        behind = [node for node in ancestors(self.match.routing.index.nodes) if operation(node) == "topk"]
        if any(
            isinstance(operand, torch.fx.Node) for node in behind for operand in (*node.args[1:2], node.kwargs.get("k"))
        ):
            some = self.graph.call_function(operator.gt, (self.graph.call_method("size", (index, 1)), 0))
            self.graph.call_function(guards.require, (some, "at least one expert per token"))

    def _without_dead(self, index: torch.fx.Node, factor: torch.fx.Node | None) -> torch.fx.Node:
        """Gives the pairs that code leaves out for their weight the id that contributes nothing, so that no NaN gets through."""
        if self.live is None or factor is None:
            return index
        alive = self.graph.call_function(getattr(operator, self.live), (factor, 0))
        dead = self.graph.call_function(torch.logical_not, (alive,))
        return self.graph.call_method("masked_fill", (index, dead, self.match.num_experts))

    def _identity(self, tokens: torch.fx.Node, index: torch.fx.Node, factor: torch.fx.Node) -> torch.fx.Node:
        """What ids of E and above add, the experts that return the token itself."""
        chosen = self.graph.call_function(operator.ge, (index, self.match.num_experts))
        exact = self.graph.call_method("to", (factor, tokens))  # the sum over slots in the tokens' precision
        masked = self.graph.call_function(operator.mul, (exact, chosen))
        weight = self.graph.call_method("sum", (masked, -1), {"keepdim": True})
        return self.graph.call_function(operator.mul, (weight, tokens))

    def _as_rows(self, node: torch.fx.Node, value: torch.Tensor) -> torch.fx.Node:
        return node if value.dim() == 2 else self.graph.call_method("flatten", (node, 0, -2))

    def _scale_rows(
        self, tokens: torch.fx.Node, index: torch.fx.Node, factor: torch.fx.Node | None, before: torch.fx.Node
    ) -> tuple[torch.fx.Node, torch.fx.Node, torch.fx.Node | None]:
        """Makes every slot a token with one expert, since a factor on the input differs from slot to slot."""
        top_k = self.match.routing.top_k
        if top_k > 1:
            tokens = self.graph.call_method("repeat_interleave", (tokens, top_k, 0))
            index = self.graph.call_method("reshape", (index, -1, 1))
            factor = None if factor is None else self.graph.call_method("reshape", (factor, -1, 1))
            before = self.graph.call_method("reshape", (before, -1, 1))
        return self.graph.call_function(operator.mul, (tokens, before)), index, factor

    def _product(self, sources: Sequence[Source], index: torch.fx.Node) -> torch.fx.Node | None:
        product: torch.fx.Node | None = None
        for source in sources:
            factor = self._routing(source, index)
            product = factor if product is None else self.graph.call_function(operator.mul, (product, factor))
        return product

    def _routing(self, source: Source, index: torch.fx.Node | None) -> torch.fx.Node:
        """A routing quantity as (T, k)."""
        k, call = self.match.routing.top_k, self.graph.call_method
        nodes = [self.outside[node] for node in source.nodes]
        value = record_of(source.nodes[0]).value
        if source.reading == "columns":
            if value.dim() == 2 and value.shape[1] == 1:
                return self.graph.call_function(torch.cat, (nodes, 1))
            flat = nodes if value.dim() == 1 else [call("reshape", (node, -1)) for node in nodes]
            return self.graph.call_function(torch.stack, (flat, 1))
        node = nodes[0]
        if value.dtype == torch.bool or (index is not None and not value.is_floating_point()):
            node = call("to", (node, record_of(self.match.source).value.dtype))
        if source.reading == "token_slot":
            return node if value.dim() == 2 and value.shape[1] == k else call("reshape", (node, -1, k))
        if source.reading == "slot_token":
            return call("t", (call("reshape", (node, k, -1)),))
        if source.reading == "one_hot":
            return self._ids_of_marks(node)
        if source.reading == "token":
            return call("expand", (call("reshape", (node, -1, 1)), -1, k))
        return call("gather", (self._by_expert(node, source, value), 1, index))

    def _ids_of_marks(self, node: torch.fx.Node) -> torch.fx.Node:
        """(T, k, E) zeros and ones as (T, k) ids; E where no expert is marked."""
        call, experts = self.graph.call_method, self.match.num_experts
        marks = call("reshape", (node, -1, self.match.routing.top_k, experts))
        ids = call("argmax", (call("int", (marks,)), -1))
        unmarked = self.graph.call_function(operator.eq, (call("sum", (marks, -1)), 0))
        return call("masked_fill", (ids, unmarked, experts))

    def _by_expert(self, node: torch.fx.Node, source: Source, value: torch.Tensor) -> torch.fx.Node:
        """A routing quantity as (T, E)."""
        call, experts = self.graph.call_method, self.match.num_experts
        if source.reading == "token_expert":
            return node if value.dim() == 2 else call("reshape", (node, -1, experts))
        if source.reading == "expert_token":
            return call("t", (call("reshape", (node, experts, -1)),))
        return call("reshape", (call("sum", (node, -1)), -1, experts))

    def _dtype(self) -> torch.dtype:
        """dtype of the region's result so far: an expert run operation by operation may end in float32 among 16-bit tensors."""
        match, source = self.match, record_of(self.match.source).value.dtype
        dtype = record_of(match.body.output).value.dtype if isinstance(match.body, FreeBody) else source
        if match.identity:
            dtype = torch.promote_types(dtype, source)
        return dtype if match.base is None else torch.promote_types(dtype, record_of(match.base).value.dtype)

    def _restore(self, result: torch.fx.Node, dtype: torch.dtype) -> torch.fx.Node:
        """(T, D), of ``dtype``, back to the shape and dtype the recorded output had."""
        value = record_of(self.match.output).value
        if value.dtype != dtype:
            result = self.graph.call_method("to", (result, value.dtype))
        if value.dim() == 2:
            return result
        like = self._same_leading(value)
        if like is None and sum(size != 1 for size in value.shape[:-1]) > 1:
            raise NotImplementedError(
                f"no input has the leading sizes {tuple(value.shape[:-1])} of the combined output"
            )
        if like is None:  # one group of all tokens: (1, T, D)
            return self.graph.call_method("reshape", (result, *[1] * (value.dim() - 2), -1, value.shape[-1]))
        sizes = [self.graph.call_method("size", (like, d)) for d in range(value.dim() - 1)]
        return self.graph.call_method("reshape", (result, *sizes, value.shape[-1]))

    def _same_leading(self, value: torch.Tensor) -> torch.fx.Node | None:
        for old in (self.match.source, *(n for n in self.outside if n.op == "placeholder")):
            known = record_of(old).value
            if known.dim() == value.dim() and known.shape[:-1] == value.shape[:-1]:
                return self.outside[old]
        return None
