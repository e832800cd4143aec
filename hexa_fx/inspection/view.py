"""A torch.fx graph as plain data: what printing, drawing, counting and pickling need, and no tensors."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.fx

from hexa_fx.inspection.operators import CHECKS, op_name
from hexa_fx.inspection.work import flops_of, moved_bytes
from hexa_fx.ir import SourceLocation
from hexa_fx.passes.detect.graph import nodes_in
from hexa_fx.torch_private import dtype_abbrs

Kind = Literal["input", "parameter", "call", "module", "output"]
Role = Literal["input", "weight", "router", "dispatch", "up", "act", "down", "combine", "region", "collective", "other"]

_KINDS: dict[str, Kind] = {
    "placeholder": "input",
    "get_attr": "parameter",
    "call_module": "module",
    "output": "output",
}
_RELEASED = re.compile(r";\s+[\w\s=]+= None$")
_ASSIGNED = re.compile(r"\s+(\w+)(?:: [^=]+)? = ")


@dataclass(frozen=True)
class TensorType:
    """Dtype and shape of a value, as ``f32[14, 8]``."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int = 0

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    @classmethod
    def of(cls, value: torch.Tensor) -> TensorType:
        name = dtype_abbrs.get(value.dtype, str(value.dtype).removeprefix("torch."))
        return cls(name, tuple(int(n) for n in value.shape), value.numel() * value.element_size())


@dataclass(frozen=True)
class NodeView:
    """One node.

    Args:
        name: its name in the graph.
        kind: what it is.
        op: what it calls, in short (``hexa.esmm``, ``linear``).
        detail: its plain arguments.
        inputs: names of the nodes that it reads, in order of appearance, repeated if read twice.
        types: types of its results by position; None for results that are no tensors.
        index: which result a getitem on a tuple takes.
        role: what it does in a mixture of experts.
        keys: what links it to nodes of other stages, see `hexa_fx.inspection.roles`.
        where: the line of the user's code.
        flops: FLOPs of matrix products.
        moved: bytes that it reads and writes, counting each operand once.
    """

    name: str
    kind: Kind
    op: str
    detail: str = ""
    inputs: tuple[str, ...] = ()
    types: tuple[TensorType | None, ...] = ()
    index: int | None = None
    role: Role = "other"
    keys: tuple[str, ...] = ()
    where: SourceLocation | None = None
    flops: int = 0
    moved: int = 0

    @property
    def type(self) -> TensorType | None:
        """Type of its only, or first, result."""
        return self.types[0] if self.types else None


@dataclass(frozen=True)
class GraphView:
    """A graph: nodes in execution order, and its readable code."""

    nodes: tuple[NodeView, ...]
    code: str = ""

    @property
    def counts(self) -> dict[str, int]:
        """Number of nodes of each operator, without inputs, parameters, outputs, and checks of what was assumed."""
        calls = (node.op for node in self.nodes if node.kind in ("call", "module"))
        return dict(Counter(op for op in calls if op not in CHECKS))

    @property
    def size(self) -> str:
        """``35 operators``."""
        count = sum(self.counts.values())
        return f"{count} operator{'s' * (count != 1)}"

    @property
    def flops(self) -> int:
        """FLOPs of all matrix products."""
        return sum(node.flops for node in self.nodes)

    @property
    def moved(self) -> int:
        """Bytes that all nodes read and write."""
        return sum(node.moved for node in self.nodes)

    def table(self) -> str:
        """One line per node: kind, name, operator, inputs, type, line of code."""
        rows = [(n.kind, n.name, n.op, ", ".join(n.inputs), _types(n), str(n.where or "")) for n in self.nodes]
        widths = [min(44, max((len(row[i]) for row in rows), default=0)) for i in range(5)]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, [*widths, 0])).rstrip() for row in rows)

    def readable(self) -> str:
        """The code, annotated with the type of every value and the user's source line."""
        by_name = {node.name: node for node in self.nodes}
        lines = []
        for line in self.code.strip("\n").splitlines():
            text = _RELEASED.sub("", line.rstrip())
            found = _ASSIGNED.match(text)
            note = _note(by_name[found[1]]) if found and found[1] in by_name else ""
            lines.append(f"{text}  # {note}" if note else text)
        return "\n".join(line for line in lines if line)

    def marked(self, mark: Callable[[NodeView], tuple[Role, tuple[str, ...]]]) -> GraphView:
        """The same graph with roles and keys."""
        marked = []
        for node in self.nodes:
            role, keys = mark(node)
            marked.append(replace(node, role=role, keys=keys))
        return GraphView(tuple(marked), self.code)


def view_of(
    graph: torch.fx.Graph,
    values: Mapping[torch.fx.Node, Any],
    code: str = "",
    where: Callable[[torch.fx.Node], SourceLocation | None] = lambda node: None,
    aliases: Callable[[torch.fx.Node], bool] = lambda node: False,
) -> GraphView:
    """Reads a graph.

    Args:
        values: what nodes give: tensors (also without data) or tuples of them. Missing ones have no type.
        code: its readable code.
        where: the user's line of a node.
        aliases: whether a node's result is memory that was there before, so that nothing is moved.
    """
    return GraphView(tuple(_node(node, values, where, aliases) for node in graph.nodes), code)


def _node(
    node: torch.fx.Node,
    values: Mapping[torch.fx.Node, Any],
    where: Callable[[torch.fx.Node], SourceLocation | None],
    aliases: Callable[[torch.fx.Node], bool],
) -> NodeView:
    value = values.get(node)
    results = value if isinstance(value, (tuple, list)) else (value,)
    types = tuple(TensorType.of(v) if isinstance(v, torch.Tensor) else None for v in results) if node in values else ()
    read = nodes_in((node.args, node.kwargs))
    op = op_name(node)
    operands = [values.get(n) for n in read]
    counted = node.op in ("call_function", "call_method")
    moved = 0 if not counted or aliases(node) else moved_bytes(op, operands, results)
    return NodeView(
        name=node.name,
        kind=_KINDS.get(node.op, "call"),
        op=op,
        detail=_detail(node),
        inputs=tuple(n.name for n in read),
        types=types,
        index=_tuple_index(node, values),
        where=where(node) if counted else None,
        flops=flops_of(op, node.args, operands, results) if counted else 0,
        moved=moved,
    )


def _tuple_index(node: torch.fx.Node, values: Mapping[torch.fx.Node, Any]) -> int | None:
    if op_name(node) != "getitem" or len(node.args) != 2 or not isinstance(node.args[1], int):
        return None
    source = values.get(node.args[0]) if isinstance(node.args[0], torch.fx.Node) else None
    return node.args[1] if isinstance(source, (tuple, list)) else None


def _detail(node: torch.fx.Node) -> str:
    if node.op in ("placeholder", "output", "get_attr", "call_module"):
        return "" if node.op in ("placeholder", "output") else str(node.target)
    plain = [repr(a) for a in node.args if not _holds_node(a) and a is not None]
    plain += [f"{key}={value!r}" for key, value in node.kwargs.items() if not _holds_node(value) and value is not None]
    return ", ".join(plain)[:160]


def _holds_node(value: Any) -> bool:
    if isinstance(value, (torch.fx.Node, str, int, float, type(None))):
        return isinstance(value, torch.fx.Node)
    return bool(nodes_in(value))


def _types(node: NodeView) -> str:
    return ", ".join(str(t) for t in node.types if t is not None)


def _note(node: NodeView) -> str:
    where = "" if node.where is None else f"{os.path.basename(node.where.file)}:{node.where.line}"
    return "  ".join(part for part in (_types(node), where) if part)
