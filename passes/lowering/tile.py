"""Rewrites a lowered and fused graph into one that runs tile by tile on a CPU (see `hexa_fx.ops.tiles`).

Nodes fall into three parts: those before the tiles (the re-index, views of weights); those that produce or read rows of experts,
which become the graph ``body`` of one tile; and those that read a finished result, which come after the tiles.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.fx
from torch.fx import Graph, GraphModule, Node

from hexa_fx.ops import tiles, tiling
from hexa_fx.passes.lowering.graph_pass import GraphPass

hexa = torch.ops.hexa

_ROW_INPUTS = ("h",)
"""Placeholders that are in expert order: what forward saved."""


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
            elif rule := _RULES.get(node.target):
                rule(self, node)
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
        if arg.op == "placeholder" and arg.name in _ROW_INPUTS:
            self.in_body[arg] = operand = self.body.call_function(tiles.part, (self.tile, operand))
        return operand

    def emit(self, node: Node, kernel: Callable[..., Any], *args: Any) -> Node:
        """The body's call of a tile kernel that stands for a node."""
        return self.body.create_node("call_function", kernel, (self.tile, *args), name=node.name)

    def _join(self, after: list[Node]) -> None:
        placeholders = [n for n in self.body.nodes if n.op == "placeholder"]
        first = placeholders[0]
        for node in placeholders[1:]:
            first.append(node)
            first = node
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


def _routing(graph: Graph) -> tuple[Node, Node, Node, Node] | None:
    """(v, offs, top_k, a tensor of the operands' dtype) of a graph: those of its first gathering operator."""
    places = {
        hexa.esmm.default: (3, 4, 5, 0),
        hexa.esmm_act.default: (5, 6, 7, 0),
        hexa.ess.default: (1, 2, 3, 0),
        hexa.ess_add.default: (2, 3, 4, 1),
    }
    for node in graph.nodes:
        place = places.get(node.target)
        if place is not None and isinstance(node.args[place[0]], Node):
            return tuple(node.args[i] for i in place)  # type: ignore[return-value]
    return None


def _esmm(t: _Tiler, node: Node) -> None:
    x, weight, bias, v, _, _, layout = node.args
    t.in_body[node] = t.emit(node, tiles.esmm, t.value(x), t.value(weight), t.value(bias), v is not None, layout)


def _esmm_act(t: _Tiler, node: Node) -> None:
    *operands, v, _, _, layout, activation, glu, params, keep_h = node.args
    key = "h" if keep_h else None
    args = (key, *(t.value(o) for o in operands), v is not None, layout, activation, glu, params)
    a = t.emit(node, tiles.esmm_act, *args)
    t.in_body[node] = (("key", "h"), ("rows", a))


def _activate(t: _Tiler, node: Node) -> None:
    t.in_body[node] = t.emit(node, tiles.activate, *(t.value(a) for a in node.args))


def _activate_backward(t: _Tiler, node: Node) -> None:
    da, h, weights, _, _, activation, glu, params = node.args
    key, rows = "dweights", (t.value(da), t.value(h), t.value(weights))
    both = t.emit(node, tiles.activate_backward, key, *rows, activation, glu, params)
    dh, a_s = (t.body.call_function(operator.getitem, (both, i)) for i in range(2))
    t.in_body[node] = (("rows", dh), ("rows", a_s), ("key", key))


def _ess(t: _Tiler, node: Node) -> None:
    g, v, _, _, scale = node.args
    t.emit(node, tiles.ess, node.name, t.value(g), v is not None, t.value(scale))
    t.keys[node] = node.name


def _estmm(t: _Tiler, node: Node) -> None:
    x, g, x_index, g_index, _, _, layout = node.args
    t.emit(node, tiles.estmm, node.name, t.value(x), t.value(g), x_index is not None, g_index is not None, layout)
    t.keys[node] = node.name


def _esfk(t: _Tiler, node: Node) -> None:
    x, g, weight, v, _, _, layout, has_bias = node.args
    dw, db = f"{node.name}_dw", f"{node.name}_db"
    keys = (dw, db if has_bias else None)
    dx = t.emit(node, tiles.esfk, *keys, t.value(x), t.value(g), t.value(weight), v is not None, layout)
    t.in_body[node] = (("rows", dx), ("key", dw), ("key", db))


def _ess_add(t: _Tiler, node: Node) -> None:
    into, g, v, _, _, scale = node.args
    t.emit(node, tiles.ess_add, t.value(into), t.value(g), v is not None, t.value(scale))


def _estmm_add(t: _Tiler, node: Node) -> None:
    into, x, g, x_index, g_index, _, _, layout = node.args
    gathered = (x_index is not None, g_index is not None)
    t.emit(node, tiles.estmm_add, t.value(into), t.value(x), t.value(g), *gathered, layout)


def _esfk_add(t: _Tiler, node: Node) -> None:
    *operands, v, _, _, layout = node.args
    t.in_body[node] = t.emit(node, tiles.esfk_add, *(t.value(o) for o in operands), v is not None, layout)


def _combine(t: _Tiler, node: Node) -> None:
    y, weights, _, _, top_k = node.args
    t.emit(node, tiles.combine, node.name, t.value(y), t.value(weights), top_k is not t.routing[2])
    t.keys[node] = node.name


_RULES: dict[Any, Callable[[_Tiler, Node], None]] = {
    hexa.esmm.default: _esmm,
    hexa.esmm_act.default: _esmm_act,
    hexa.activate.default: _activate,
    hexa.activate_backward.default: _activate_backward,
    hexa.ess.default: _ess,
    hexa.estmm.default: _estmm,
    hexa.esfk.default: _esfk,
    hexa.ess_add.default: _ess_add,
    hexa.estmm_add.default: _estmm_add,
    hexa.esfk_add.default: _esfk_add,
    hexa.combine.default: _combine,
}
_OVER_ROWS = (tiles.estmm, tiles.esfk, tiles.ess, tiles.estmm_add, tiles.esfk_add, tiles.ess_add)
"""What sums over an expert's rows, all of them at a time."""
