"""Rewrites a lowered and fused graph into one that runs tile by tile on a CPU (see `hexa_fx.ops.tiles`).

Nodes fall into three parts: those before the tiles (the re-index, views of weights); those that produce or read rows of experts,
which become the graph ``body`` of one tile; and those that read a finished result, which come after the tiles.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.fx
from torch.fx import Graph, GraphModule, Node

from hexa_fx.ops import library, tiles, tiling
from hexa_fx.ops.table import Esmm, EsmmAct, Ess
from hexa_fx.passes.lowering.graph_pass import SAVED, GraphPass
from hexa_fx.torch_private import OpOverload

hexa = torch.ops.hexa


@dataclass(frozen=True)
class TileRows(GraphPass):
    """Turns the row operators of a graph into the ``body`` that `hexa_fx.ops.tiling.run` calls for every tile."""

    name: ClassVar[str] = "tile_rows"
    summary: ClassVar[str] = "row operators become the body that a CPU runs tile by tile"

    def apply(self, gm: GraphModule) -> int:
        """Moves every row operator into the body. Returns how many there were."""
        routing = _routing(gm.graph)
        return 0 if routing is None else _Tiler(gm, routing).split()


class _Tiler:
    def __init__(self, gm: GraphModule, routing: tuple[Node, Node, Node, Node]) -> None:
        self.gm = gm
        self.old = gm.graph
        self.outer = Graph()
        self.body = Graph()
        self.tile = self.body.placeholder("tile")
        self.in_outer: dict[Node, Node] = {}
        self.in_body: dict[Node, Any] = {}
        self.operands: dict[Node, Node] = {}
        self.keys: dict[Node, str] = {}
        self.routing = routing

    def split(self) -> int:
        """Sorts the nodes into body and outside, and joins the two."""
        after: list[Node] = []
        late: set[Node] = set()
        moved = 0
        for node in self.old.nodes:
            inputs = set(node.all_input_nodes)
            if node.op == "output" or inputs & (late | set(self.keys)):
                after.append(node)
                late.add(node)
            elif name := _operator(node):
                _emit(self, node, name)
                moved += 1
            elif inputs & self.in_body.keys():
                self._move(node)
            else:
                self.in_outer[node] = self.outer.node_copy(node, self.in_outer.__getitem__)
        self._join(after)
        return moved

    def _move(self, node: Node) -> None:
        """Moves a getitem of a row operator's results, or a torch operator on rows, into the body."""
        if node.target is operator.getitem and isinstance(self.in_body[node.args[0]], tuple):  # type: ignore[index]
            kind, value = self.in_body[node.args[0]][node.args[1]]  # type: ignore[index]
            if kind == "key":
                self.keys[node] = value
            else:
                self.in_body[node] = value
            return
        self.in_body[node] = self.body.node_copy(node, self.value)

    def value(self, arg: Any) -> Any:
        """What stands for an argument in the body: a node made there, an operand, or a constant."""
        if not isinstance(arg, Node):
            return arg
        if arg in self.in_body:
            return self.in_body[arg]
        if arg not in self.operands:
            self.operands[arg] = self.body.placeholder(arg.name)
        operand = self.operands[arg]
        if arg.op == "placeholder" and arg.name in SAVED:
            self.in_body[arg] = operand = self.body.call_function(tiles.part, (self.tile, operand))
        return operand

    def _join(self, after: list[Node]) -> None:
        placeholders = [n for n in self.body.nodes if n.op == "placeholder"]
        for one, other in pairwise(placeholders):
            one.append(other)
        self.body.output(())
        self.gm.add_submodule("body", GraphModule(torch.nn.Module(), self.body, "Tile"))
        outer = self.outer
        made = self._tiling(outer)
        cut = not any(n.target in _OVER_ROWS for n in self.body.nodes)
        args: tuple[Any, ...] = (made, outer.get_attr("body"), cut, *(self.in_outer[n] for n in self.operands))
        done = outer.create_node("call_function", tiling.run, args, name="done")
        for node, key in self.keys.items():
            if node.users:
                self.in_outer[node] = outer.create_node("call_function", tiling.output, (done, key), name=node.name)
        for node in after:
            self.in_outer[node] = outer.node_copy(node, self.in_outer.__getitem__)
        outer.eliminate_dead_code(lambda n: n is done or n.is_impure())  # it may write to buffers and return nothing
        self.gm.graph = outer

    def _tiling(self, outer: Graph) -> Node:
        """The node that makes the tiling, either from the saved re-index vector or together with a new one."""
        v, offs, top_k, like = self.routing
        if v.op == "placeholder":
            args = tuple(self.in_outer[n] for n in (v, offs, top_k, like))
            return outer.create_node("call_function", tiling.routed, args, name="tiling")
        reindex = v.args[0]
        assert isinstance(reindex, Node)
        index, experts = (self.in_outer[n] for n in reindex.all_input_nodes)
        args = (index, experts, self.in_outer[like])
        if not any(user.op == "output" for tensor in reindex.users for user in tensor.users):
            return outer.create_node("call_function", tiling.route, args, name="tiling")
        both = outer.create_node("call_function", tiling.route_and_reindex, args, name="routing")
        for tensor in reindex.users:
            self.in_outer[tensor].args = (both, int(tensor.args[1]) + 1)  # type: ignore[arg-type]
            both.append(self.in_outer[tensor])
        return outer.create_node("call_function", operator.getitem, (both, 0), name="tiling")


def _operator(node: Node) -> str:
    """The name of a row operator that runs on tiles; empty for other nodes."""
    target = node.target
    name = target._opname if isinstance(target, OpOverload) and target.namespace == library.NAMESPACE else ""
    return name if name in tiles.KERNELS else ""


def _routing(graph: Graph) -> tuple[Node, Node, Node, Node] | None:
    """(v, offs, top_k, a tensor of the operands' dtype) of a graph: those of its first gathering operator."""
    for node in graph.nodes:
        if name := _operator(node):
            o = library.record_of(name)(*node.args)
            if isinstance(o, Esmm | EsmmAct | Ess) and isinstance(o.v, Node):
                return o.v, o.offs, o.top_k, o.g if isinstance(o, Ess) else o.x  # type: ignore[return-value]
    return None


def _emit(t: _Tiler, node: Node, name: str) -> None:
    """Puts an operator's kernel on tiles in the body. Of its indices a tile only asks whether they are given."""
    o: Any = library.record_of(name)(*node.args)
    given = [_argument(t, field, value) for field, value in zip(o._fields, o)]
    args = (t.tile, tiles.keys_of(name, o, f"{node.name}_"), *given)
    made = t.body.create_node("call_function", tiles.KERNELS[name], args, name=node.name)
    results, count = tiles.RESULTS[name], tiles.RESULTS[name].count(tiles.ROWS)
    rows = iter([made] if count == 1 else [t.body.call_function(operator.getitem, (made, n)) for n in range(count)])
    each = [("rows", next(rows)) if key == tiles.ROWS else ("key", f"{node.name}_{key}") for key in results]
    if len(each) > 1:
        t.in_body[node] = tuple(each)
    elif each:
        ((kind, value),) = each
        found: dict[Node, Any] = t.in_body if kind == "rows" else t.keys
        found[node] = value


def _argument(t: _Tiler, field: str, value: Any) -> Any:
    if field == "top_k":
        return None if value is t.routing[2] else value
    if field in ("v", "x_index", "g_index", "inv", "offs"):
        return value is not None or None
    return t.value(value)


_OVER_ROWS = {tiles.KERNELS[f"{name}{end}"] for name in ("ess", "estmm", "esfk") for end in ("", "_add")}
"""What sums over an expert's rows, all of them at a time."""
