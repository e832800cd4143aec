"""The Python code of a graph, as a value that can be run and copied."""

from __future__ import annotations

import builtins
import hashlib
import linecache
import operator
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch.fx

from hexa_fx.ops.direct import DIRECT, TAKE_LISTS
from hexa_fx.ops.listed import dense
from hexa_fx.runtime.autocast import WITHOUT_AUTOCAST, WithoutAutocast


def direct(graph: torch.fx.Graph, lists: Collection[str] = ()) -> torch.fx.Graph:
    """A copy that calls the operators past torch's dispatcher (see `hexa_fx.ops.direct`), and some nodes with autocast off. Of the
    weights named in ``lists``, what reads no lists gets stacks."""
    copied = torch.fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    _stack_for_others(copied, lists)
    for node in [*copied.nodes]:
        node.target = DIRECT.get(node.target, node.target)
        if device := node.meta.get(WITHOUT_AUTOCAST):
            if node.op == "call_module":
                with copied.inserting_before(node):
                    node.args, node.target = (copied.get_attr(str(node.target)), *node.args), "__call__"
            node.op, node.target = "call_function", WithoutAutocast(node.target, device)
    return copied


def _stack_for_others(graph: torch.fx.Graph, lists: Collection[str]) -> None:
    listed: set[torch.fx.Node] = set()
    for node in [*graph.nodes]:
        given = [n for n in node.all_input_nodes if n in listed]
        if (node.op == "call_module" and node.target in lists) or (given and _keeps_lists(node, listed)):
            listed.add(node)
            continue
        for weight in given if node.target not in TAKE_LISTS else ():
            with graph.inserting_before(node):
                node.replace_input_with(weight, graph.call_function(dense, (weight,)))


_KEEP_LISTS: set[Any] = set()


def keep_lists(*functions: Callable[..., Any]) -> None:
    """Says of functions of a weight that they take a list, and make one of it."""
    _KEEP_LISTS.update(functions)


def _keeps_lists(node: torch.fx.Node, listed: Set[torch.fx.Node]) -> bool:
    """Whether a list of what it makes of every expert's tensor is as good as the same of the stack."""
    if node.op == "call_method":
        return (node.target, node.args[1:]) in (("flatten", (1,)), ("unsqueeze", (1,)), ("unsqueeze", (2,)))
    if node.target in _KEEP_LISTS:
        return True
    if node.target is operator.getitem:
        return type(node.args[1]) is tuple and node.args[1][0] == slice(None)
    return node.target is operator.mul and set(node.args) <= listed


@dataclass(eq=False)
class Program:
    """A graph's forward, ``function(module, *inputs)``, from the code that torch.fx generates for it."""

    source: str
    globals: Mapping[str, Any]
    inputs: tuple[str, ...]
    """Names of the placeholders, in order."""
    path: str
    """Of the block in its model, shown in tracebacks."""

    @classmethod
    def of(cls, graph: torch.fx.Graph, path: str, lists: Collection[str] = ()) -> Program:
        code = direct(graph, lists).python_code("self")
        inputs = tuple(str(node.target) for node in graph.nodes if node.op == "placeholder")
        return cls(code.src, code.globals, inputs, path)

    def __post_init__(self) -> None:
        digest = hashlib.sha256(self.source.encode()).hexdigest()[:12]
        filename = f"<hexa_fx {self.path or 'block'} {digest}>"
        lines = self.source.splitlines(keepends=True)
        # A size without a modification time makes linecache keep the entry, so tracebacks show the generated lines.
        linecache.cache[filename] = (len(self.source), None, lines, filename)
        # No __name__: Dynamo would look the globals up in the module of that name.
        namespace: dict[str, Any] = {"__builtins__": builtins, **self.globals}
        exec(compile(self.source, filename, "exec"), namespace)
        self.function: Callable[..., Any] = namespace["forward"]

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        return self
