"""Shapes and dtypes that a graph's nodes have on the example, without computing anything."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.fx import Node

from hexa_fx.capture import CapturedBlock, record_of
from hexa_fx.ir import FfnSpec, RewrittenBlock
from hexa_fx.ops.table_layers import MoeFfn
from hexa_fx.sources.linear4bit import of_numbers

log = logging.getLogger(__name__)

MOE_FFN = tuple(operand.name for operand in MoeFfn.operands)
"""Tensor arguments of `hexa::moe_ffn`, in order."""


def like_meta(value: Any) -> Any:
    """The value with tensors replaced by ones on the meta device of the same strides, in any tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, (tuple, list)):
        return tuple(like_meta(item) for item in value)
    if isinstance(value, dict):
        return {key: like_meta(item) for key, item in value.items()}
    return value


class _Values(torch.fx.Interpreter):
    """Keeps the value of every node. A node that cannot run without data, and what depends on it, has none."""

    def __init__(self, graph: torch.fx.Graph, known: Mapping[Node, Any], sources: Mapping[Node, Node]) -> None:
        super().__init__(nn.Module(), garbage_collect_values=False, graph=graph)
        self.found: dict[Node, Any] = {}
        self._known, self._sources = known, sources

    def run_node(self, n: Node) -> Any:
        if n in self._known:
            self.found[n] = self._known[n]
            return self._known[n]
        source = self._sources.get(n)
        try:
            # torch's code for some operations on tensors without data imports all of dynamo, a second of every process
            repeats = source is not None and _is_new(source) and self._is_given_the_same(n, source)
            value = like_meta(record_of(source).value) if source is not None and repeats else self._run(n)
        except Exception as error:
            if source is None:
                log.debug("no shape for %s: %s", n.name, error)
                return None
            value = like_meta(record_of(source).value)
        self.found[n] = value
        return value

    def _is_given_the_same(self, n: Node, source: Node) -> bool:
        """Whether a node makes the call that was recorded, on values of the recorded shapes and dtypes."""
        given, recorded = n.all_input_nodes, source.all_input_nodes
        return _call_of(n) == _call_of(source) and all(
            one in self.found and _is_alike(self.found[one], two) for one, two in zip(given, recorded)
        )

    def _run(self, n: Node) -> Any:
        missing = [i.name for i in n.all_input_nodes if i not in self.found]
        if missing or n.op in ("placeholder", "get_attr", "call_module"):
            raise LookupError(f"nothing is known of {missing or n.op}")
        return super().run_node(n)


def values_on_meta(
    graph: torch.fx.Graph, known: Mapping[Node, Any], sources: Mapping[Node, Node] | None = None
) -> dict[Node, Any]:
    """The values of a graph's nodes, as tensors without data.

    Args:
        graph: whose modules are not run.
        known: values of inputs, parameters and module calls, on the meta device.
        sources: recorded nodes that nodes were made from, whose values they have if they cannot run without data.
    """
    interpreter = _Values(graph, known, sources or {})
    inputs = [None] * len(graph.find_nodes(op="placeholder"))
    with torch.no_grad():
        interpreter.run(*inputs, enable_io_processing=False)
    return interpreter.found


def _is_new(source: Node) -> bool:
    """Whether a recorded value lies in memory of its own, so that it was recorded with the strides that it has."""
    storage = record_of(source).storage
    return storage is not None and all(record_of(operand).storage != storage for operand in source.all_input_nodes)


def _call_of(node: Node) -> tuple[Any, ...]:
    """What a node calls, and how but for the values that it is given."""
    constants = str(torch.fx.map_arg((node.args, node.kwargs), lambda _: None))
    return node.op, node.target, len(node.all_input_nodes), constants


def _is_alike(value: Any, recorded: Node) -> bool:
    now, then = value, record_of(recorded).value
    if isinstance(now, Tensor) and isinstance(then, Tensor):
        return (now.shape, now.stride(), now.dtype) == (then.shape, then.stride(), then.dtype)
    return type(now) is type(then) and isinstance(now, (bool, int, float)) and now == then


@dataclass(frozen=True)
class FfnCall:
    """A node of `hexa::moe_ffn` on the example.

    Args:
        node: the node, whose ``meta`` holds the expert.
        operands: tensors without data, by operand name; absent ones are left out.
    """

    node: Node
    operands: Mapping[str, Tensor]

    @property
    def spec(self) -> FfnSpec:
        """The expert."""
        found: FfnSpec = self.node.meta["hexa"]
        return found


def moe_ffn_calls(graph: torch.fx.Graph, values: Mapping[Node, Any]) -> list[FfnCall]:
    """The calls of `hexa::moe_ffn` in a rewritten block's graph whose operands are among the known ``values`` of its nodes."""
    found = []
    for node in graph.nodes:
        if not isinstance(node.meta.get("hexa"), FfnSpec):
            continue
        given = {name: values.get(arg) for name, arg in zip(MOE_FFN, node.args) if isinstance(arg, Node)}
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        if len(tensors) == len(given):
            found.append(FfnCall(node, tensors))
    return found


def rewritten_values(captured: CapturedBlock, rewritten: RewrittenBlock) -> dict[Node, Any]:
    """Values of a rewritten block's nodes on the example, as tensors without data."""
    recorded = {node.name: node for node in captured.graph.nodes if node.op != "output"}
    inputs = {name.lstrip("*"): value for name, value in captured.arguments}
    calls = (*captured.calls, *captured.functions)
    packed = {weight.name: weight for weight in rewritten.packed}
    known: dict[Node, Any] = {}
    sources: dict[Node, Node] = {}
    for node in rewritten.graph.nodes:
        target = str(node.target)
        if node.op == "placeholder":
            value = inputs.get(target)
            known[node] = record_of(value).value if isinstance(value, Node) else value
        elif node.op == "get_attr":
            known[node] = captured.value_of(target)
        elif node.op == "call_module" and target in packed:
            parts = packed[target].parts
            first, *others = (of_numbers(captured.tensor_of(part[0])) for part in parts)
            rows = [sum(part.shape[0] for part in (first, *others))] if others else first.shape[:1]
            known[node] = torch.empty((len(parts[0]), *rows, *first.shape[1:]), dtype=first.dtype, device="meta")
        elif "call" in node.meta:
            known[node] = torch.fx.map_arg(calls[node.meta["call"]].output, lambda n: record_of(n).value)
        elif node.meta.get("from") in recorded:
            sources[node] = recorded[node.meta["from"]]
    return values_on_meta(rewritten.graph, {node: like_meta(value) for node, value in known.items()}, sources)
