"""The MoE region of a block as one `hexa::moe_ffn` node; the rest as it was recorded, for any size and routing."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

import hexa_fx.ops  # noqa: F401  (defines torch.ops.hexa)
from hexa_fx.capture import CapturedBlock, functional, record_of
from hexa_fx.ir import FfnSpec, InputGuard, RewrittenBlock
from hexa_fx.passes.detect.body import ExpertBody
from hexa_fx.passes.detect.free_body import FreeBody
from hexa_fx.passes.detect.graph import is_float
from hexa_fx.passes.detect.match import MoEMatch
from hexa_fx.passes.detect.routing import Source
from hexa_fx.passes.detect.rules import is_outside
from hexa_fx.passes.emit_rows import RowEmitter
from hexa_fx.passes.kept_calls import Kept, keep
from hexa_fx.passes.own_code import own_code_limit
from hexa_fx.passes.weights import WeightEmitter
from hexa_fx.runtime import guards

_FREE_OF_EFFECTS = (
    "size",
    "detach",
    "flatten",
    "index_select",
    "clamp",
    "view",
    "reshape",
    operator.getitem,
    operator.lt,
)


def rewrite(match: MoEMatch, recompute_h: bool = False, fused_backward: bool = True) -> RewrittenBlock:
    """The block's new forward. Its ``get_attr`` and ``call_module`` targets are relative to the block."""
    return _Rewriter(match, recompute_h, fused_backward).run()


@dataclass
class _Rewriter:
    match: MoEMatch
    recompute_h: bool
    fused_backward: bool
    graph: torch.fx.Graph = field(default_factory=torch.fx.Graph)
    new: dict[torch.fx.Node, torch.fx.Node] = field(default_factory=dict)

    def run(self) -> RewrittenBlock:
        captured = self.match.captured
        kept = keep(captured, self._roots(), self.match.output)
        self._placeholders(captured)
        weights = WeightEmitter(self.graph, captured)
        for node in kept.order:
            if node is self.match.output:
                self.new[node] = self._region(weights)
            elif node in kept.calls:
                self._call(node, kept)
            else:
                self._copy(node, kept)
        kept_values = tuple(self._map(item.value) for item in self.match.stored)
        output = self._map(captured.output)
        self.graph.output((output, kept_values) if kept_values else output)
        self._drop_unused()
        self.graph.lint()
        stored = tuple((item.path, item.name) for item in self.match.stored)
        packed, guards = tuple(weights.packed), self._guards(captured)
        small = own_code_limit(captured, self._removed(kept), self._added())
        return RewrittenBlock(captured.path, self.graph, packed, guards, stored, small, self.match.num_experts)

    def _removed(self, kept: Kept) -> list[torch.fx.Node]:
        """Recorded nodes without a counterpart, neither alone nor in a call that is kept."""
        order = [node for node in self.match.captured.graph.nodes if node.op != "output"]
        calls = [kept.calls[node] for node in kept.order if node in kept.calls]
        inside = {node for call in calls for node in order[call.start : call.end]}
        return [node for node in order if node not in self.new and node not in inside]

    def _added(self) -> list[torch.fx.Node]:
        counterparts = {new for old, new in self.new.items() if old is not self.match.output}
        return [node for node in self.graph.nodes if node not in counterparts]

    def _roots(self) -> list[torch.fx.Node]:
        routing = self.match.routing
        sources = (routing.index, *routing.before, *routing.after)
        return [
            self.match.source,
            *(self.match.body.roots if isinstance(self.match.body, FreeBody) else ()),
            *(node for source in sources for node in source.nodes),
            *([] if self.match.base is None else [self.match.base]),
            *(b.condition for b in self.match.branches),
            *self._stored_nodes(),
        ]

    def _stored_nodes(self) -> list[torch.fx.Node]:
        found: list[torch.fx.Node] = []
        torch.fx.map_arg([item.value for item in self.match.stored], found.append)
        return found

    def _drop_unused(self) -> None:
        """Sizes and results that only the removed code read."""
        for node in reversed(self.graph.nodes):
            if not node.users and (node.target in _FREE_OF_EFFECTS or node.op == "get_attr"):
                self.graph.erase_node(node)

    # -- around the region ---------------------------------------------------------------------------------------------

    def _placeholders(self, captured: CapturedBlock) -> None:
        for name, value in captured.arguments:
            placeholder = self.graph.placeholder(name.lstrip("*"))
            if isinstance(value, torch.fx.Node):
                self.new[value] = placeholder

    def _map(self, value: Any) -> Any:
        return torch.fx.map_arg(value, self.new.__getitem__)

    def _copy(self, node: torch.fx.Node, kept: Kept) -> None:
        if node in self.new:
            return
        if node.op == "get_attr" and node.target in self.match.captured.constants:
            self.new[node] = self._constant(str(node.target))
            return
        if node in kept.rereads:
            reread = kept.rereads[node]
            self.new[node] = self.graph.call_function(
                functional.after, (self.new[reread.argument], self.new[reread.result])
            )
            return
        copy = self.graph.node_copy(node, lambda argument: self._operand(node, argument, kept))
        copy.meta = {"from": node.name, "location": record_of(node).location}
        self.new[node] = copy
        for branch in self.match.branches:
            if branch.condition is node:
                holds = copy if branch.outcome else self.graph.call_function(operator.not_, (copy,))
                self.graph.call_function(guards.require, (holds, _as_recorded(node)))

    def _input_of(self, node: torch.fx.Node, argument: torch.fx.Node, kept: Kept) -> torch.fx.Node:
        """The new node for an argument; a read after a kept call's write is ordered after the call."""
        after_call = node.target is functional.after and argument not in self.new
        return self.new[kept.stand_ins[argument] if after_call else argument]

    def _constant(self, name: str) -> torch.fx.Node:
        """A tensor that stood ready outside the block's parameters and buffers, such as a number that a module keeps."""
        if is_outside(self.match.captured, name):
            raise NotImplementedError(f"the code reads {name}, which is neither a parameter nor a buffer")
        value = self.match.captured.constants[name]
        options: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
        return self.graph.call_function(torch.tensor, (value.tolist(),), options)

    def _operand(self, node: torch.fx.Node, argument: torch.fx.Node, kept: Kept) -> torch.fx.Node:
        """The new node for an argument, without its gradient where the code computes under ``no_grad``."""
        operand = self._input_of(node, argument, kept)
        if record_of(node).gradient or not is_float(argument) or (record_of(node).writes and argument is node.args[0]):
            return operand
        return self.graph.call_method("detach", (operand,))

    def _call(self, node: torch.fx.Node, kept: Kept) -> None:
        """A submodule call, emitted once for all of its results."""
        call = kept.calls[node]
        if node in self.new:
            return
        result = self.graph.call_module(call.path, tuple(self._map(call.args)), self._map(call.kwargs))
        self._bind(call.output, result)

    def _bind(self, output: Any, result: torch.fx.Node) -> None:
        if isinstance(output, torch.fx.Node):
            cut = is_float(output) and not record_of(output).gradient
            self.new[output] = self.graph.call_method("detach", (result,)) if cut else result
        elif isinstance(output, (tuple, list)):
            for index, item in enumerate(output):
                if isinstance(item, (torch.fx.Node, tuple, list)):
                    self._bind(item, self.graph.call_function(operator.getitem, (result, index)))

    def _guards(self, captured: CapturedBlock) -> tuple[InputGuard, ...]:
        literal_dtypes = {
            item
            for node in self.graph.nodes
            for item in (*node.args, *node.kwargs.values())
            if isinstance(item, torch.dtype)
        }
        result = []
        for name, value in captured.arguments:
            if not isinstance(value, torch.fx.Node):
                result.append(InputGuard(name, "constant", value))
                continue
            tensor = record_of(value).value
            exact = tensor.dtype in literal_dtypes
            result.append(InputGuard(name, "tensor", dtype=tensor.dtype, ndim=tensor.dim(), exact_dtype=exact))
        return tuple(result)

    # -- the region ----------------------------------------------------------------------------------------------------

    def _region(self, weights: WeightEmitter) -> torch.fx.Node:
        match, routing = self.match, self.match.routing
        tokens = self._as_rows(self.new[match.source], record_of(match.source).value)
        index = self._routing(routing.index, None)
        factor = self._product(routing.after, index)
        before = self._product(routing.before, index)
        if match.detached:
            tokens = self.graph.call_method("detach", (tokens,))
            before = None if before is None else self.graph.call_method("detach", (before,))
        if before is not None:
            tokens, index, factor = self._scale_rows(tokens, index, factor, before)
        past_experts = self._identity(tokens, index, factor) if match.identity and factor is not None else None
        index = self._within_sentinel(index)
        if isinstance(match.body, FreeBody):
            result = self._free(match.body, weights, index, factor)
        else:
            result = self._canonical(match.body, weights, tokens, index, factor)
        if before is not None and routing.top_k > 1:
            result = self.graph.call_method(
                "sum", (self.graph.call_method("unflatten", (result, 0, (-1, routing.top_k))), 1)
            )
        if past_experts is not None:
            result = self.graph.call_function(operator.add, (result, past_experts))
        if match.base is not None:
            base = self._as_rows(self.new[match.base], record_of(match.base).value)
            result = self.graph.call_function(operator.add, (base, result))
        result = self._restore(result)
        return self.graph.call_method("detach", (result,)) if match.constant else result

    def _canonical(
        self,
        body: ExpertBody,
        weights: WeightEmitter,
        tokens: torch.fx.Node,
        index: torch.fx.Node,
        factor: torch.fx.Node | None,
    ) -> torch.fx.Node:
        operands = weights.emit(body)
        static = (operands.glu, operands.layout1, operands.layout2, body.params, self.recompute_h, self.fused_backward)
        spec = FfnSpec(body.activation, *static)
        result = self.graph.call_function(
            torch.ops.hexa.moe_ffn.default,
            (tokens, index, factor, operands.w1, operands.b1, operands.w3, operands.b3, operands.w2, operands.b2)
            + (spec.activation, spec.glu, list(spec.params), spec.layout1, spec.layout2, spec.recompute_h)
            + (() if spec.fused_backward else (False,)),
        )
        result.meta["hexa"] = spec
        result.meta["top_k"] = 1 if self.match.routing.before else self.match.routing.top_k
        return result

    def _free(
        self, body: FreeBody, weights: WeightEmitter, index: torch.fx.Node, factor: torch.fx.Node | None
    ) -> torch.fx.Node:
        emitter = RowEmitter(
            graph=self.graph,
            weights=weights,
            body=body,
            outside=self.new.__getitem__,
            as_rows=lambda node: self._as_rows(self.new[node], record_of(node).value),
            factor=lambda sources: self._product(sources, index),
        )
        return emitter.emit(index, factor, self.match.routing.top_k)

    def _within_sentinel(self, index: torch.fx.Node) -> torch.fx.Node:
        """Ids that no stored expert has become the one id that contributes nothing, E."""
        nodes, experts = self.match.routing.index.nodes, self.match.num_experts
        recorded = torch.cat([record_of(node).value.flatten() for node in nodes])
        if int(recorded.max()) > experts:
            index = self.graph.call_method("clamp", (index,), {"max": experts})
        if int(recorded.min()) < 0:
            negative = self.graph.call_function(operator.lt, (index, 0))
            index = self.graph.call_method("masked_fill", (index, negative, experts))
        return index

    def _identity(self, tokens: torch.fx.Node, index: torch.fx.Node, factor: torch.fx.Node) -> torch.fx.Node:
        """What the experts that return the token itself add: ids of E and above."""
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
        """A factor on the input differs from slot to slot, so every slot becomes a token with one expert."""
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
        nodes = [self.new[node] for node in source.nodes]
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

    def _restore(self, result: torch.fx.Node) -> torch.fx.Node:
        """(T, D) back to the shape and dtype the recorded output had."""
        value, source = record_of(self.match.output).value, record_of(self.match.source).value
        if value.dtype != source.dtype:
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
        for old in (self.match.source, *(n for n in self.new if n.op == "placeholder")):
            known = record_of(old).value
            if known.dim() == value.dim() and known.shape[:-1] == value.shape[:-1]:
                return self.new[old]
        return None


def _as_recorded(condition: torch.fx.Node) -> str:
    """The branch in words, for the log line when it goes the other way."""
    record = record_of(condition)
    return f"the size condition at {record.location} to be {record.value}"
