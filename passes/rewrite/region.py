"""Emits the MoE region in the rewritten graph: as one `hexa::moe_ffn`, or operator by operator for an unusual expert."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.fx
from torch.fx import Node

import hexa_fx.ops  # noqa: F401  (defines torch.ops.hexa)
from hexa_fx import operations as ops
from hexa_fx.capture import record_of
from hexa_fx.capture.records import reached
from hexa_fx.ir import FfnSpec
from hexa_fx.operations import kind, operation
from hexa_fx.ops.table_layers import PARAMETERS, static_of
from hexa_fx.passes.canonicalize.size_origins import Dim, Origin, leading_sizes
from hexa_fx.passes.detect.body import ExpertBody
from hexa_fx.passes.detect.decisions import is_check_of_numbers
from hexa_fx.passes.detect.graph import ancestors, is_float, is_tensor, traced
from hexa_fx.passes.detect.match import MoEMatch
from hexa_fx.passes.detect.routing_sources import RoutingSource
from hexa_fx.passes.detect.slots import chosen_apart
from hexa_fx.passes.detect.steps import FreeBody
from hexa_fx.passes.detect.verdict import Refuse
from hexa_fx.passes.ranks import ids_of_marks, ranks_of_choices, repeated_in_groups
from hexa_fx.passes.rewrite.emit_rows import RowEmitter
from hexa_fx.passes.rewrite.weights import WeightEmitter
from hexa_fx.runtime import guards
from hexa_fx.torch_private import _is_any_autocast_enabled

_leads_on = ops.of("unique unique_consecutive sort msort cat stack")
_leaves_out = ops.of("argsort eq ne lt le gt ge size numel nelement dim")


_MARKS = ("one_hot", "marks")


def given_ids(match: MoEMatch) -> tuple[int, int] | None:
    """Of ids that a block is given, and uses for more than comparisons, the least that is too large for the code, and E if negative
    ones count from the last expert, else 0.

    A comparison with the number of every expert leaves out an id of none, as the operators do. A look-up takes -1 for the last
    expert, and other code raises an error. An example shows none of that.

    None if a choice in the block gives its ids, or the code only compares them, or the example held such an id.

    Marks for all experts are no ids: where a slot has none, no expert gets it.
    """
    if match.routing.index.reading in _MARKS:
        return None
    given = [node for node in map(_given, match.routing.index.nodes) if node is not None]
    ids = [record_of(node).value for node in given]
    if len(given) < len(match.routing.index.nodes) or not all(value.numel() for value in ids):
        return None
    if any(int(value.min()) < 0 or int(value.max()) >= match.num_experts for value in ids):
        return None
    uses = list(_uses(given))
    if not uses:
        return None
    counts = (count for use in uses if kind(use) == "one_hot" for count in (*use.args[1:], *use.kwargs.values()))
    past = max((count for count in counts if isinstance(count, int)), default=match.num_experts)
    looks_up = all(kind(use) == "getitem" or ops.gives_numbers(use) for use in uses)
    return past, match.num_experts if looks_up else 0


def _uses(given: Iterable[Node]) -> Iterator[Node]:
    """What the ids are used for, but to be compared or counted."""
    left = [(node, user) for node in given for user in node.users]
    while left:
        node, user = left.pop()
        if _leads_on(user) or (_moves(user) and user.args[0] is node):
            left += [(user, after) for after in user.users]
        elif not _leaves_out(user) and user.op != "output":
            yield user


def _moves(node: Node) -> bool:
    return ops.views(node) or ops.casts(node) or ops.takes_part(node)


def _given(node: Node) -> Node | None:
    """The input that the ids are a view or part of; None if they are computed."""
    node = traced(node, _moves)[-1]
    return node if node.op == "placeholder" and is_tensor(node) and not is_float(node) else None


@dataclass
class RoutingEmitter:
    """Emits a region's routing into a graph. ``outside``: the new node of every recorded one that the region reads."""

    match: MoEMatch
    graph: torch.fx.Graph
    outside: Mapping[Node, Node]

    def as_given(self, index: Node) -> Node:
        """The ids, checked where the block is given them and its code does something else with an id of no expert."""
        found = given_ids(self.match)
        return index if found is None else self.graph.call_function(guards.require_experts, (index, *found))

    def kept(self, index: Node, factor: Node | None) -> Node:
        """The ids, and E in the slots that are not kept. A factor of NaN is no zero: then the code may keep such a slot."""
        for source in self.match.routing.keep:
            marks = self.quantity(source, index, as_marks=True)
            is_bool = record_of(source.nodes[0]).value.dtype == torch.bool
            dropped = self.graph.call_function(*((operator.invert, (marks,)) if is_bool else (operator.eq, (marks, 0))))
            if factor is not None and self.match.routing.zeros:
                zero = self.graph.call_function(operator.eq, (factor, 0))
                dropped = self.graph.call_function(operator.and_, (dropped, zero))
            index = self.graph.call_method("masked_fill", (index, dropped, self.match.num_experts))
        return index

    def within_capacity(self, index: Node, kept: Node) -> Node:
        """``kept`` with E in the slots that come after their expert was full. ``index``: the ids as the router gives them."""
        capacity = self.match.routing.capacity
        if capacity is None:
            return kept
        rank = self.graph.call_function(ranks_of_choices, (index, capacity.order))
        limit = capacity.limit if isinstance(capacity.limit, int) else self.outside[capacity.limit]
        late = self.graph.call_function(operator.ge, (rank, limit))
        return self.graph.call_method("masked_fill", (kept, late, self.match.num_experts))

    def quantity(self, source: RoutingSource, index: Node | None, as_marks: bool = False) -> Node:
        """A routing quantity as (T, k); a factor as floating point, ``as_marks`` as it is."""
        k, call = self.match.routing.top_k, self.graph.call_method
        has_gradient = any(_has_gradient(node, self.match.output) for node in source.nodes)
        source = self._unflattened(source)
        nodes, value = [self.outside[node] for node in source.nodes], record_of(source.nodes[0]).value
        if value.is_floating_point() and not has_gradient:
            nodes = [call("detach", (node,)) for node in nodes]
        if source.reading == "columns":
            if value.dim() == 2 and value.shape[1] == 1:
                return self.graph.call_function(torch.cat, (nodes, 1))
            flat = nodes if value.dim() == 1 else [call("reshape", (node, -1)) for node in nodes]
            return self.graph.call_function(torch.stack, (flat, 1))
        node = nodes[0]
        if source.groups:
            node = self.graph.call_function(repeated_in_groups, (node, self.outside[self.match.source]))
        if not as_marks and (value.dtype == torch.bool or (index is not None and not value.is_floating_point())):
            node = call("to", (node, record_of(self.match.source).value.dtype))
        if source.reading == "token_slot":
            return node if value.dim() == 2 and value.shape[1] == k else call("reshape", (node, -1, k))
        if source.reading == "slot_token":
            return call("t", (call("reshape", (node, k, -1)),))
        if source.reading == "one_hot":
            return self._ids_of_marks(node)
        if source.reading == "marks":
            node = call("reshape", (node, -1, k))
            return self.graph.call_function(ids_of_marks, (node, self.match.num_experts))
        if source.reading == "token":
            return call("expand", (call("reshape", (node, -1, 1)), -1, k))
        assert index is not None
        index = self._in_range(index)
        if source.reading == "expert":
            return self.graph.call_function(operator.getitem, (call("reshape", (node, -1)), index))
        factors = call("gather", (self._by_expert(node, source, value), 1, index))
        return factors if as_marks or not chosen_apart(self.match.routing.index.nodes) else self._once(factors, index)

    def _unflattened(self, source: RoutingSource) -> RoutingSource:
        """The source as it was before the code flattened it, perhaps to sort it, if that was (T, k) and nothing writes to it."""
        if source.reading != "token_slot" or source.groups:
            return source
        recorded = self.match.captured.graph.nodes
        written = {record_of(node).storage for node in recorded if node.op != "output" and record_of(node).writes}
        behind = [node for node in traced(source.nodes[0], _keeps_order) if node in self.outside]
        fitting = (node for node in behind if record_of(node).value.shape[1:] == (self.match.routing.top_k,))
        found = next((node for node in fitting if record_of(node).storage not in written), source.nodes[0])
        return replace(source, nodes=(found,))

    def times_constant(self, factor: Node | None, index: Node, tokens: Node) -> Node | None:
        """The factor (T, k) of the outputs, and the number in the code that they are multiplied by too."""
        constant = self.match.routing.constant
        if constant == 1:
            return factor
        if factor is not None:
            return self.graph.call_function(operator.mul, (factor, constant))
        return self.graph.call_method("new_full", (tokens, self.graph.call_method("size", (index,)), constant))

    def _once(self, factors: Node, index: Node) -> Node:
        """``factors`` and zeros for an expert that an earlier slot of the token names: a table has one number for both."""
        call = self.graph.call_method
        same = call("eq", (call("unsqueeze", (index, 2)), call("unsqueeze", (index, 1))))
        return call("masked_fill", (factors, call("any", (call("tril", (same, -1)), -1)), 0))

    def _in_range(self, index: Node) -> Node:
        """The ids as indices of a table, whatever is found there for those of no expert."""
        recorded = torch.cat([record_of(node).value.flatten() for node in self.match.routing.index.nodes])
        experts = self.match.num_experts
        marked = self.match.routing.index.reading in _MARKS or bool(self.match.routing.keep)
        if int(recorded.max()) < experts and int(recorded.min()) >= 0 and not marked:
            return index
        return self.graph.call_method("clamp", (index, 0, experts - 1))

    def _ids_of_marks(self, node: Node) -> Node:
        """(T, k, E) zeros and ones as (T, k) ids; E where no expert is marked."""
        call, experts = self.graph.call_method, self.match.num_experts
        marks = call("reshape", (node, -1, self.match.routing.top_k, experts))
        ids = call("argmax", (call("int", (marks,)), -1))
        unmarked = self.graph.call_function(operator.eq, (call("sum", (marks, -1)), 0))
        return call("masked_fill", (ids, unmarked, experts))

    def _by_expert(self, node: Node, source: RoutingSource, value: torch.Tensor) -> Node:
        """A routing quantity as (T, E); of stacks that were cut, E is another number by now."""
        call, experts = self.graph.call_method, self.match.num_experts
        if source.reading == "token_expert":
            return node if value.dim() == 2 else call("reshape", (node, -1, experts))
        if source.reading == "expert_token":
            is_matrix = value.dim() == 2 and value.shape[0] == experts and value.shape[1] > 1
            return call("t", (node if is_matrix else call("reshape", (node, experts, -1)),))
        return call("reshape", (call("sum", (node, -1)), -1, experts))


def _has_gradient(node: Node, end: Node) -> bool:
    """Whether a gradient of ``end`` reaches ``node``: plain numbers that the code reads of it pass none on."""

    def onward(user: Node) -> list[Node]:
        passes = user is node or is_float(user) or not is_tensor(user)
        return [] if not passes else [n for n in user.users if n.op != "output" and not ops.gives_numbers(n)]

    return node is not end and end in reached([node], onward)


_keeps_order = ops.of("reshape view flatten contiguous")


@dataclass
class RegionEmitter(RoutingEmitter):
    """Emits all of a region into a graph."""

    weights: WeightEmitter
    recompute_h: bool

    def emit(self) -> Node:
        """The node that stands for the region's output."""
        match, routing = self.match, self.match.routing
        tokens = self._cast(self._as_rows(match.source), record_of(match.source).value.dtype)
        index = self.as_given(self.quantity(routing.index, None))
        self._require_slots(index)
        self._refuse_numbers_of_nan()
        factor = self.times_constant(self._product(routing.after, index), index, tokens)
        kept = self.within_capacity(index, self.kept(index, factor))
        before = self._product(routing.before, index)
        given = tokens
        if match.detached:
            tokens = self.graph.call_method("detach", (tokens,))
            before = None if before is None else self.graph.call_method("detach", (before,))
        past_experts = self._past_experts(given, index, kept, factor)
        index = kept
        if before is not None:
            tokens, index, factor = self._as_slots(tokens, index, factor, before)
        index = self._within_sentinel(index)
        if routing.always:
            index, factor = self._with_shared(index, factor)
        if isinstance(match.body, FreeBody):
            result = self._free(match.body, index, factor)
        else:
            result = self._canonical(match.body, tokens, index, factor)
        if before is not None and routing.top_k > 1:
            slots = self.graph.call_method("unflatten", (result, 0, (-1, routing.top_k)))
            result = self.graph.call_method("sum", (slots, 1))
        if past_experts is not None:
            result = self.graph.call_function(operator.add, (result, past_experts))
        if match.base is not None and match.passing != "weighted":
            result = self.graph.call_function(operator.add, (self._as_rows(match.base), result))
        asked = next((condition for condition in match.conditions if condition.of_outputs), None)
        if asked is not None:  # the code asks whether what experts give is finite
            self.graph.call_function(guards.require_finite, (result, asked.as_recorded()))
        result = self._restore(result, self._dtype())
        return self.graph.call_method("detach", (result,)) if match.constant else result

    def _canonical(self, body: ExpertBody, tokens: Node, index: Node, factor: Node | None) -> Node:
        (given, glu), up = self.weights.emit(body), None if body.up is None else body.up.base
        bases = (body.gate.base, body.gate_bias, up, body.up_bias, body.down.base, body.down_bias)
        dtypes = (None if base is None else self.weights.first_of(base).dtype for base in bases)
        weights = [
            node if (node := given.get(name)) is None or dtype is None else self._cast(node, dtype)
            for name, dtype in zip(PARAMETERS, dtypes, strict=True)
        ]
        static = (glu, body.gate.layout, body.down.layout, body.params, self.recompute_h)
        spec = FfnSpec(body.activation, *static)
        operands = (tokens, index, factor, *weights, *static_of(spec))
        result = self.graph.call_function(torch.ops.hexa.moe_ffn.default, operands)
        result.meta["hexa"] = spec
        result.meta["top_k"] = 1 if self.match.routing.before else self._slots
        return result

    def _free(self, body: FreeBody, index: Node, factor: Node | None) -> Node:
        emitter = RowEmitter(
            graph=self.graph,
            weights=self.weights,
            body=body,
            outside=self.outside.__getitem__,
            as_rows=self._as_rows,
            factor=lambda sources: self._product(sources, index),
        )
        return emitter.emit(index, factor, self._slots)

    @property
    def _slots(self) -> int:
        """Of each token."""
        return self.match.routing.top_k + len(self.match.routing.always)

    def _with_shared(self, index: Node, factor: Node | None) -> tuple[Node, Node | None]:
        """Ids and factors with a slot more for each expert of the list that every token is given."""
        if self.match.routing.first:
            index = self.graph.call_function(operator.add, (index, self.match.routing.first))
        rows = self.graph.call_method("size", (index, 0))
        ids = [self.graph.call_method("new_full", (index, (rows, 1), expert)) for expert in self.match.routing.always]
        index = self.graph.call_function(torch.cat, ([index, *ids], 1))
        if factor is None:
            return index, None
        ones = self.graph.call_method("new_ones", (factor, (rows, len(ids))))
        return index, self.graph.call_function(torch.cat, ([factor, ones], 1))

    def _within_sentinel(self, index: Node) -> Node:
        """Turns ids without a stored expert into E, the id that contributes nothing."""
        nodes, experts = self.match.routing.index.nodes, self.match.num_experts
        recorded = torch.cat([record_of(node).value.flatten() for node in nodes])
        if int(recorded.max()) > experts:
            index = self.graph.call_method("clamp", (index,), {"max": experts})
        if int(recorded.min()) < 0:
            negative = self.graph.call_function(operator.lt, (index, 0))
            index = self.graph.call_method("masked_fill", (index, negative, experts))
        return index

    def _require_slots(self, index: Node) -> None:
        """Where the number of experts per token is computed, as in ``topk(min(k, len(x)))``, it is none if there are no tokens."""
        behind = [node for node in ancestors(self.match.routing.index.nodes) if operation(node) == "topk"]
        if any(isinstance(operand, Node) for node in behind for operand in (*node.args[1:2], node.kwargs.get("k"))):
            some = self.graph.call_function(operator.gt, (self.graph.call_method("size", (index, 1)), 0))
            self.graph.call_function(guards.require, (some, "at least one expert per token"))

    def _refuse_numbers_of_nan(self) -> None:
        """0 * NaN is NaN: where code makes a number of that, the weight of a slot that it drops is no longer zero."""
        sources = [node for source in self.match.routing.after for node in source.nodes]
        for check in filter(is_check_of_numbers, ancestors(sources)):
            for product in (node for node in ancestors([check]) if operation(node) in ("mul", "mul_")):
                if any(is_tensor(operand) and not is_float(operand) for operand in product.all_input_nodes):
                    raise Refuse("the code replaces NaN in routing weights that it has multiplied by a mask", check)

    def _past_experts(self, tokens: Node, index: Node, kept: Node, factor: Node | None) -> Node | None:
        """The tokens that are added to the output as they are. ``index``: the router's ids, ``kept``: E for no expert."""
        call, experts = self.graph.call_function, self.match.num_experts
        if self.match.passing == "unrouted":
            absent = call(operator.ge, (self._within_sentinel(kept), experts))
            return call(torch.where, (self.graph.call_method("all", (absent, -1), {"keepdim": True}), tokens, 0.0))
        if self.match.passing is None or factor is None:
            return None
        base = self.match.base if self.match.passing == "weighted" else None
        rows = tokens if base is None else self._as_rows(base)
        exact = self.graph.call_method("to", (factor, rows))  # the sum over slots in the tokens' precision
        masked = exact if base is not None else call(operator.mul, (exact, call(operator.ge, (index, experts))))
        weight = self.graph.call_method("sum", (masked, -1), {"keepdim": True})
        return call(operator.mul, (weight, rows))

    def _as_rows(self, node: Node) -> Node:
        """The new node of a recorded one, as (T, C)."""
        new = self.outside[node]
        return new if record_of(node).value.dim() == 2 else self.graph.call_method("flatten", (new, 0, -2))

    def _as_slots(self, tokens: Node, index: Node, factor: Node | None, before: Node) -> tuple[Node, Node, Node | None]:
        """Makes every slot a token with one expert: for a factor on the input, which differs from slot to slot."""
        top_k = self.match.routing.top_k
        if top_k > 1:
            tokens = self.graph.call_method("repeat_interleave", (tokens, top_k, 0))
            index = self.graph.call_method("reshape", (index, -1, 1))
            factor = None if factor is None else self.graph.call_method("reshape", (factor, -1, 1))
            before = self.graph.call_method("reshape", (before, -1, 1))
        return self._scaled(tokens, before), index, factor

    def _scaled(self, tokens: Node, before: Node) -> Node:
        """Tokens times their factors, in the dtype that experts are given: the code may multiply in a wider one."""
        match = self.match
        scaled = self.graph.call_function(operator.mul, (tokens, before))
        kinds = [record_of(node).value.dtype for source in match.routing.before for node in source.nodes]
        wide = functools.reduce(torch.promote_types, kinds, record_of(match.source).value.dtype)
        given = record_of(match.instances[0].first[0].data).value.dtype
        return scaled if given == wide else self.graph.call_method("to", (scaled, given))

    def _product(self, sources: Sequence[RoutingSource], index: Node) -> Node | None:
        product: Node | None = None
        for source in sources:
            factor = self.quantity(source, index)
            factor = self.graph.call_method("reciprocal", (factor,)) if source.divides else factor
            product = factor if product is None else self.graph.call_function(operator.mul, (product, factor))
        return product

    def _dtype(self) -> torch.dtype:
        """dtype of the region's result so far: an expert run operation by operation may end in float32 among 16-bit tensors."""
        match, source = self.match, record_of(self.match.source).value.dtype
        of_rows = record_of(match.body.output).value.dtype if isinstance(match.body, FreeBody) else self._multiplied_in
        dtype = of_rows or source
        if match.passing is not None:
            dtype = torch.promote_types(dtype, source)
        return dtype if match.base is None else torch.promote_types(dtype, record_of(match.base).value.dtype)

    @functools.cached_property
    def _multiplied_in(self) -> torch.dtype | None:
        """The dtype of all of the experts' products, by the casts that the code makes; None if it is not one, or sums are wider."""
        body = self.match.body
        if not isinstance(body, ExpertBody) or _is_any_autocast_enabled():
            return None
        if not self.weights.first_of(body.gate.base).dtype.is_floating_point:  # codes, which are multiplied as they are
            return None
        products = (product for run in self.match.instances for product in run.products)
        found = {record_of(product.data).value.dtype for product in products}
        biases = filter(None, (body.gate_bias, body.up_bias, body.down_bias))
        return found.pop() if len(found) == 1 and all(self.weights.is_in(base, *found) for base in biases) else None

    def _cast(self, node: Node, dtype: torch.dtype) -> Node:
        """What has this dtype, in that of the products."""
        if self._multiplied_in in (None, dtype):
            return node
        return self.graph.call_method("to", (node, self._multiplied_in))

    def _restore(self, result: Node, dtype: torch.dtype) -> Node:
        """(T, D), of ``dtype``, back to the shape and dtype the recorded output had."""
        value = record_of(self.match.output).value
        if value.dtype != dtype or _is_any_autocast_enabled():  # which the operators give their result in
            result = self.graph.call_method("to", (result, value.dtype))
        if value.dim() == 2:
            return result
        if (leading := leading_sizes(self.match.output)) is not None:
            return self.graph.call_method("reshape", (result, *map(self._size, leading), value.shape[-1]))
        source = record_of(self.match.source).value
        if source.shape[:-1] == value.shape[:-1]:
            like = self.outside[self.match.source]
            sizes: list[Node | int] = [self.graph.call_method("size", (like, d)) for d in range(value.dim() - 1)]
        else:  # one group of all tokens, (1, T, D), or a row each, (T, 1, D)
            rows = max(reversed(range(value.dim() - 1)), key=lambda dim: value.shape[dim])
            sizes = [-1 if dim == rows else 1 for dim in range(value.dim() - 1)]
        return self.graph.call_method("reshape", (result, *sizes, value.shape[-1]))

    def _size(self, size: Origin) -> Node | int:
        if isinstance(size, Dim):
            asked = self.outside[size.tensor], size.dim
            known = (node for node in self.graph.find_nodes(op="call_method", target="size") if node.args == asked)
            return next(known, None) or self.graph.call_method("size", asked)
        return self.outside[size] if isinstance(size, Node) else size
