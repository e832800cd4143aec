"""Rewrites a block for any size and routing: each MoE region becomes one `hexa::moe_ffn` node, the rest stays as recorded."""

from __future__ import annotations

import operator
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx
from torch.fx import Node

import hexa_fx.ops  # noqa: F401  (defines torch.ops.hexa)
from hexa_fx import operations as ops
from hexa_fx.capture import CapturedBlock, ModuleCall, StoredValue, functional, record_of
from hexa_fx.ir import InputGuard, RewrittenBlock
from hexa_fx.passes.canonicalize.size_origins import leading_sizes
from hexa_fx.passes.detect.decisions import Condition, cuts_rows
from hexa_fx.passes.detect.graph import ancestors, is_float, is_tensor, writes_outside, written_from
from hexa_fx.passes.detect.match import MoEMatch
from hexa_fx.passes.detect.rules import constant, refuse_array, refuse_generator
from hexa_fx.passes.detect.steps import FreeBody
from hexa_fx.passes.rewrite.autocast import mark_without_autocast
from hexa_fx.passes.rewrite.kept_calls import (
    KeptNodes,
    conditions_of_opened,
    keep,
    kept_routers,
    left_by_opened,
    refuse_far_limits,
    refuse_late_conditions,
    replaced,
    require_form,
)
from hexa_fx.passes.rewrite.own_code import own_code_limit
from hexa_fx.passes.rewrite.region import RegionEmitter
from hexa_fx.passes.rewrite.weights import WeightEmitter
from hexa_fx.runtime import guards
from hexa_fx.runtime.attribute_guards import ELSEWHERE, called_in, is_within


def input_guards(
    captured: CapturedBlock, graph: torch.fx.Graph, new: Mapping[Node, Node], by_rows: set[Node]
) -> tuple[InputGuard, ...]:
    """A guard for each argument, in order.

    Args:
        new: the nodes of ``graph``, by those of the recorded graph.
        by_rows: inputs of ``graph`` that are read as rows of just as many numbers as their last dimension has.
    """
    literal_dtypes = {
        item for node in graph.nodes for item in (*node.args, *node.kwargs.values()) if isinstance(item, torch.dtype)
    }
    called = called_in(graph)
    asked = {what for what, scopes in captured.asks.items() for scope in scopes if not is_within(scope, called)}
    result = []
    for name, value in captured.arguments:
        if not isinstance(value, Node):
            result.append(InputGuard(name, "constant", value))
            continue
        if not (value.users or record_of(value).asked):  # given to a router alone, say, and here in **kwargs
            result.append(InputGuard(name, "tensor"))
            continue
        tensor = record_of(value).value
        exact = "dtype" in asked or tensor.dtype in literal_dtypes
        device = tensor.device.type if "device" in asked else None
        layout = tensor.is_contiguous() if "layout" in asked else None
        gradient = record_of(value).wants_gradient if "gradient" in asked else None
        last, kind = tensor.shape[-1] if new[value] in by_rows else None, (tensor.dtype, tensor.dim())
        result.append(InputGuard(name, "tensor", None, *kind, exact, device, layout, gradient, last))
    return tuple(result)


def not_on_nothing(rewritten: RewrittenBlock) -> RewrittenBlock:
    """The block for calls with tokens: others run its own code."""
    return replace(rewritten, guards=tuple(replace(g, filled=_is_of_floats(g)) for g in rewritten.guards))


def in_own_dtypes(rewritten: RewrittenBlock) -> RewrittenBlock:
    """The block for floating-point inputs and weights in the dtypes that it was recorded with, and no others."""
    exact = (replace(guard, exact_dtype=guard.exact_dtype or _is_of_floats(guard)) for guard in rewritten.guards)
    return replace(rewritten, guards=tuple(exact))


def _is_of_floats(guard: InputGuard) -> bool:
    return guard.dtype is not None and guard.dtype.is_floating_point


_FREE_OF_EFFECTS = (
    "size",
    "detach",
    "flatten",
    "index_select",
    "clamp",
    "view",
    "reshape",
    operator.getitem,
    operator.eq,
    getattr,
)


def rewrite_block(match: MoEMatch, recompute_h: bool = False) -> RewrittenBlock:
    """Makes the block's new forward. Its ``get_attr`` and ``call_module`` targets are relative to the block."""
    return _Rewriter(match, recompute_h).run()


@dataclass
class _Rewriter:
    match: MoEMatch
    recompute_h: bool
    graph: torch.fx.Graph = field(default_factory=torch.fx.Graph)
    new: dict[Node, Node] = field(default_factory=dict)
    unwritten: dict[Node, Node] = field(default_factory=dict)
    """Copies of what regions read and the code writes to before it has added up their results."""
    called: dict[Node, ModuleCall] = field(default_factory=dict)
    opened: tuple[StoredValue, ...] = ()
    """What submodules keep that the new graph does not call, as their choices would be drawn twice."""
    elsewhere: frozenset[str] = frozenset()
    """Submodules that the code calls in places where the new graph does not, and those of whose results nothing can be asked."""

    def run(self) -> RewrittenBlock:
        captured = self.match.captured
        regions = self._regions()
        kept = keep(captured, self._roots(), [*regions])
        called = {call.path for call in kept.calls.values() if call.function is None}
        self.opened = left_by_opened(captured, called, self._stored())
        kept = keep(captured, self._roots(), [*regions]) if self.opened else kept
        while conditions := conditions_of_opened(self.match, kept):
            self.match = replace(self.match, conditions=(*self.match.conditions, *conditions))
            kept = keep(captured, self._roots(), [*regions])
        cut = (Condition(n, True, pieces=len(record_of(n).value)) for n in kept.order if cuts_rows(n))
        self.match = replace(self.match, conditions=(*self.match.conditions, *cut))
        for name, given in captured.arguments:
            placeholder = self.graph.placeholder(name.lstrip("*"))
            if isinstance(given, Node):
                self.new[given] = placeholder
        overwritten = self._overwritten(kept)
        order = sorted(kept.order, key=self._asked_first(kept).__contains__, reverse=True)
        refuse_late_conditions(self._early_conditions().keys(), order, kept)
        self.elsewhere = replaced(captured, kept)
        routers = kept_routers(captured, kept, order, self.match.regions, self.elsewhere)
        self.elsewhere |= routers.unasked
        for node in order:
            if node in regions:
                self.new[node] = self._written(node, regions[node].emit())
            elif node in kept.calls:
                self._call(node, kept)
            else:
                self._copy(node, kept)
            if node in overwritten:
                self.unwritten[node] = self.graph.call_method("clone", (self.new[node],))
            for match in routers.forms.get(node, ()):
                require_form(match, self.graph, self.new, self.called)
        removed = self._removed(kept)
        for match in self.match.regions:
            refuse_far_limits(removed, match)
        kept_values = tuple(self._map(item.value) for item in self._stored())
        output = self._built(self._map(captured.output))
        self.graph.output((output, kept_values) if kept_values else output)
        by_rows = {self.new[match.source] for match in self.match.regions if match.source.op == "placeholder"}
        by_rows.update(self.new[node] for match in self.match.regions for node in _given_slots(match))
        self._drop_unused()
        mark_without_autocast(self.graph, self.new, captured, self.match.regions)
        self.graph.lint()
        stored = tuple(item.place for item in self._stored())
        packed = tuple(weight for region in regions.values() for weight in region.weights.packed)
        small = own_code_limit(self.match, removed, self._added(), len(packed))
        guards, experts = input_guards(captured, self.graph, self.new, by_rows), self.match.num_experts
        of_python = routers.reads, None, routers.in_trace
        given_for = captured.path, self.graph, packed, guards, stored, small, experts
        return RewrittenBlock(*given_for, *of_python, dtypes=captured.dtypes)

    def _early_conditions(self) -> dict[Node, Condition]:
        return {condition.node: condition for match in self.match.regions for condition in match.early_conditions}

    def _asked_first(self, kept: KeptNodes) -> set[Node]:
        """Conditions on what is there before anything is drawn, written or called, which are checked first."""
        behind = map(ancestors, ([node] for node in self._early_conditions()))
        last = {*kept.calls, *(match.output for match in self.match.regions)}
        first = (
            found
            for found in behind
            if last.isdisjoint(found) and not any(record_of(n).writes or ops.is_random(n) for n in found)
        )
        return {n for found in first for n in found if n.op != "placeholder"}

    def _overwritten(self, kept: KeptNodes) -> set[Node]:
        """What regions read, or keep for backward, of inputs and buffers that are written to before they end; inputs also later."""
        order = {node: place for place, node in enumerate(self.match.captured.graph.nodes)}
        outputs = {match.output for match in self.match.regions}
        writes = [node for node in kept.order if writes_outside(node)]
        found = set[Node]()
        given = self.match.captured.graph.find_nodes(op="placeholder") if self.match.captured.written_later else ()
        written = {record_of(node).storage for node in given}
        for match in self.match.regions:
            found.update(node for node in filter(is_float, _read_by(match)) if record_of(node).storage in written)
            for node in filter(is_float, _read_by(match)):
                ends = outputs - {match.output} if node is match.base else outputs
                for write in (n for n in writes if n in ends or n not in outputs):
                    between = order[node] < order[write] <= order[match.output]
                    if between and record_of(node).storage == record_of(write).storage:
                        found.add(node)
        return found

    def _regions(self) -> dict[Node, RegionEmitter]:
        """By output."""
        found = {}
        for number, match in enumerate(self.match.regions):
            weights = WeightEmitter(self.graph, match.captured, f"_{number + 1}" if number else "")
            outside = ChainMap(self.unwritten, self.new)
            found[match.output] = RegionEmitter(match, self.graph, outside, weights, self.recompute_h)
        return found

    def _stored(self) -> list[StoredValue]:
        """What the block has to leave beside its output, each once, though every region lists it."""
        listed = {id(item) for match in self.match.regions for item in match.stored} | {*map(id, self.opened)}
        return [item for item in self.match.captured.stored if id(item) in listed]

    def _removed(self, kept: KeptNodes) -> list[Node]:
        """Recorded nodes that have no counterpart, not even inside a call that is kept."""
        order = [node for node in self.match.captured.graph.nodes if node.op != "output"]
        calls = {kept.calls[node].number for node in kept.order if node in kept.calls}
        return [node for node in order if node not in self.new and calls.isdisjoint(record_of(node).calls)]

    def _added(self) -> list[Node]:
        outputs = {match.output for match in self.match.regions}
        counterparts = {new for old, new in self.new.items() if old not in outputs}
        return [node for node in self.graph.nodes if node not in counterparts]

    def _roots(self) -> list[Node]:
        found: list[Node] = []
        torch.fx.map_arg([item.value for item in self._stored()], found.append)
        return found + [node for match in self.match.regions for node in _roots_of(match)]

    def _drop_unused(self) -> None:
        """Drops sizes and results that only the removed code read."""
        for node in reversed(self.graph.nodes):
            if not node.users and (node.target in _FREE_OF_EFFECTS or node.op == "get_attr"):
                self.graph.erase_node(node)

    # -- around the region ---------------------------------------------------------------------------------------------

    def _map(self, value: Any) -> Any:
        return torch.fx.map_arg(value, self.new.__getitem__)

    def _built(self, value: Any) -> Any:
        """A result with its named tuples as calls of their class: older torch cannot write them into an output."""
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return self.graph.call_function(type(value), tuple(map(self._built, value)))
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._built, value))
        return {key: self._built(item) for key, item in value.items()} if isinstance(value, dict) else value

    def _copy(self, node: Node, kept: KeptNodes) -> None:
        if node in self.new:
            return
        if node.op == "get_attr" and node.target in self.match.captured.constants:
            value = constant(self.match.captured, node)
            options: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
            self.new[node] = self.graph.call_function(torch.tensor, (value.tolist(),), options)
            return
        refuse_array(node)
        refuse_generator(node)
        copy = self.graph.node_copy(node, lambda argument: self._operand(node, argument, kept))
        copy.meta = {"from": node.name, "location": record_of(node).location}
        target = node.args[0] if record_of(node).writes else None
        parameter = target if isinstance(target, Node) and self._is_changed_parameter(target) else None
        self.new[node] = copy if parameter is None else self.new[parameter]
        if condition := self._early_conditions().get(node):
            self.graph.call_function(guards.require, (condition.holds(copy), condition.as_recorded()))

    def _operand(self, node: Node, argument: Node, kept: KeptNodes) -> Node:
        """The new node for an argument, without its gradient where the code computes under ``no_grad``."""
        # A read after a kept call's write is ordered after the call.
        after_call = node.target is functional.after and argument not in self.new
        operand = self.new[kept.stand_ins[argument] if after_call else argument]
        is_target = record_of(node).writes and argument is node.args[0]
        in_place = is_target and not self._is_changed_parameter(argument)
        if record_of(node).gradient or not is_float(argument) or in_place:
            return operand
        return self.graph.call_method("detach", (operand,))

    def _is_changed_parameter(self, node: Node) -> bool:
        """Whether it is a parameter that the code writes to, which it may do without gradients alone."""
        return node.op == "get_attr" and any(node.target == name for name, _ in self.match.captured.changed_parameters)

    def _written(self, node: Node, result: Node) -> Node:
        """A region's result, in the input or buffer that the code adds it up in, if it does so."""
        if not writes_outside(node):
            return result
        return self.graph.call_method("copy_", (self.new[written_from(node)], result))

    def _call(self, node: Node, kept: KeptNodes) -> None:
        """A submodule call, emitted once for all of its results."""
        call = kept.calls[node]
        if node in self.new:
            return
        args, kwargs = tuple(self._map(call.args)), self._map(call.kwargs)
        if call.function is None:
            result = self.graph.call_module(call.path, args, kwargs)
            self.called[result] = call
            if any(is_within(path, {call.path}) for path in self.elsewhere):
                result.meta[ELSEWHERE] = True
        else:
            result = self.graph.call_function(call.function, args, kwargs)
        captured = self.match.captured
        result.meta["call"] = [*map(id, (*captured.calls, *captured.functions))].index(id(call))
        self._bind(call.output, result)

    def _bind(self, output: Any, result: Node) -> None:
        if isinstance(output, Node):
            cut = is_float(output) and not record_of(output).gradient
            self.new[output] = self.graph.call_method("detach", (result,)) if cut else result
        elif isinstance(output, (tuple, list, dict)):
            for key, item in output.items() if isinstance(output, dict) else enumerate(output):
                if isinstance(item, (Node, tuple, list, dict)):
                    self._bind(item, self.graph.call_function(operator.getitem, (result, key)))


def _given_slots(match: MoEMatch) -> set[Node]:
    """Inputs of a row for each token that hold what the routing reads: with another k the code may do something else."""
    found = {_given_as(node) for node in match.routing.nodes if is_tensor(node)}
    return {n for n in found if n.op == "placeholder" and record_of(n).value.shape[-1:] == (match.routing.top_k,)}


def _given_as(node: Node) -> Node:
    """What came first of the tensors of as many numbers that a value was made of."""
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or not is_tensor(source):
        return node
    return _given_as(source) if record_of(source).value.numel() == record_of(node).value.numel() else node


def _roots_of(match: MoEMatch) -> list[Node]:
    """What the region and its conditions are computed from, and what its result is written to."""
    written = [written_from(match.output)] if writes_outside(match.output) else []
    sizes = [size for size in leading_sizes(match.output) or () if isinstance(size, Node)]
    return [*_read_by(match), *written, *sizes, *(condition.node for condition in match.early_conditions)]


def _read_by(match: MoEMatch) -> list[Node]:
    return [
        match.source,
        *(match.body.roots if isinstance(match.body, FreeBody) else ()),
        *match.routing.nodes,
        *([] if match.base is None else [match.base]),
    ]
