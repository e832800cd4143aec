"""Lowers a canonical node's expert to a forward graph and a backward graph of expert-specific operators.

Weights are tensors, packed, or have low-rank additions. The graphs are those of docs/operators.md, node for node; what a device
makes of them, `hexa_fx.passes.lowering.pipelines` says. Lowering omits what is not there, such as a bias, and fuses nothing.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx import Graph, GraphModule, Node

from hexa_fx.errors import InputError
from hexa_fx.ir import Layout
from hexa_fx.observers import notify
from hexa_fx.ops import projection
from hexa_fx.ops.activations import check_activation
from hexa_fx.ops.program import FfnRequest
from hexa_fx.ops.records import DENSE
from hexa_fx.ops.rows import flip
from hexa_fx.ops.table_layers import OPERANDS, SOURCES_OPERANDS

hexa = torch.ops.hexa
PROJECTION = {
    (False, False): hexa.esmm.default,
    (False, True): hexa.esmm_low_rank.default,
    (True, False): hexa.esmm_packed.default,
    (True, True): hexa.esmm_packed_low_rank.default,
}
"""The product with a weight, by whether it is packed, and whether it has a low-rank addition."""
PRODUCT = (hexa.estmm.default, hexa.estmm_add.default)
SUM = (hexa.ess.default, hexa.ess_add.default)


@dataclass(frozen=True)
class Lowered:
    """The two graphs of one expert FFN.

    Args:
        forward: over the given operands of ``hexa::moe_ffn`` in schema order. Returns y; for training the tuple
            ``(y, h, v, inv, offs)``, without h when it is recomputed.
        backward: over ``dy``, then what was saved, the given weights, ``top_k`` and buffers. Returns the gradients asked
            for that are not added to a buffer, in the order of `OPERANDS`.
    """

    forward: GraphModule
    backward: GraphModule


def lower_forward(request: FfnRequest) -> GraphModule:
    """The forward graph of a request as `hexa::moe_ffn` makes it."""
    check_activation(request.spec.activation, request.spec.glu, request.spec.params)
    return _ForwardBuilder(request).build()


def lower_backward(request: FfnRequest) -> GraphModule:
    """The backward graph of a request as `hexa::moe_ffn` makes it."""
    absent = request.grads - request.given
    if absent:
        raise InputError(f"gradients of {sorted(absent)} were asked for, but only {sorted(request.given)} are given")
    return _BackwardBuilder(request).build()


class _Builder:
    """Writes nodes under the names that docs/operators.md gives them."""

    def __init__(self, request: FfnRequest) -> None:
        self.request = request
        self.spec = request.spec
        self.graph = Graph()
        self.node: dict[str, Node | None] = {}

    def inputs(self, *names: str) -> None:
        for name in names:
            self.node[name] = self.graph.placeholder(name)

    def operands(self, *names: str) -> None:
        self.inputs(*(n for n in names if n in self.request.given))
        for name in names:
            self.node.setdefault(name, None)

    def call(self, name: str, target: Any, *args: Any) -> Node:
        """Of a function, or of a method by its name."""
        op = "call_method" if isinstance(target, str) else "call_function"
        self.node[name] = node = self.graph.create_node(op, target, args, name=name)
        return node

    def call_tuple(self, names: tuple[str, ...], target: Any, *args: Any) -> None:
        result = self.graph.create_node("call_function", target, args, name=target._opname)
        for i, name in enumerate(names):
            self.call(name, operator.getitem, result, i)

    def finish(self, class_name: str, output: Any) -> GraphModule:
        self.graph.output(output)
        self.graph.eliminate_dead_code()
        gm = GraphModule(torch.nn.Module(), self.graph, class_name)
        gm.graph.lint()
        notify("lower", "after", gm.graph, class_name)
        return gm

    def weights(self) -> None:
        """The operands of projections, as far as they are given."""
        self.operands(*SOURCES_OPERANDS[1:])
        self.inputs(*(f"s{number}" for number in "132" if self.is_packed(number)))

    def is_packed(self, number: str) -> bool:
        """Whether a projection's weight is."""
        return self.request.format_of(number) != DENSE

    def is_adapted(self, number: str) -> bool:
        """Whether a projection has a low-rank addition."""
        return f"a{number}" in self.request.given

    def layout(self, number: str) -> Layout:
        """Of a projection's weight."""
        return self.spec.layout2 if number == "2" else self.spec.layout1

    @property
    def rows(self) -> tuple[Any, ...]:
        """How rows are gathered from tokens."""
        return self.node["v"], self.node["offs"], self.node["top_k"]

    @property
    def own_rows(self) -> tuple[Any, ...]:
        """Rows in expert order."""
        return None, self.node["offs"], 1

    def product(
        self, name: str, x: Any, number: str, rows: tuple[Any, ...], added: tuple[Any, ...], back: bool
    ) -> Node:
        """x times a projection's weight, or ``back`` through it; added: a second product's rows and weight."""
        n, packed, layout = self.node, self.is_packed(number), self.layout(number)
        weight = (n[f"w{number}"], *((n[f"s{number}"], self.request.format_of(number)) if packed else ()))
        bias, read = (None, flip(layout)) if back else (n[f"b{number}"], layout)
        return self.call(name, PROJECTION[packed, bool(added)], x, *weight, bias, *rows, read, *added)

    def narrow(self, x: Any, number: str, rows: tuple[Any, ...]) -> None:
        """u of a projection, if it has an addition."""
        if self.is_adapted(number):
            self.call(f"u{number}", projection.narrowed, x, self.node[f"a{number}"], *rows)

    def added(self, number: str) -> tuple[Any, ...]:
        """What is added to a projection."""
        if not self.is_adapted(number):
            return ()
        u, c, layout = self.node[f"u{number}"], self.node[f"c{number}"], self.layout(number)
        left = self.call(f"c{number}_left", projection.left, u, c, self.request.alpha_of(number), layout)
        return u, left

    def added_gradient(self, number: str, t: Node | None) -> tuple[Any, ...]:
        """What is added to the gradient of a projection's rows."""
        if t is None:
            return ()
        return t, self.call(f"a{number}_right", projection.right, t, self.node[f"a{number}"], self.layout(number))

    def project(self, name: str, x: Any, number: str, rows: tuple[Any, ...]) -> Node:
        """The result of a projection."""
        return self.product(name, x, number, rows, self.added(number), back=False)

    def first_projection(self) -> Node:
        """h, of one weight or of gate and up."""
        x = self.node["x"]
        if self.spec.glu != "split":
            return self.project("h", x, "1", self.rows)
        gate, up = self.project("gate", x, "1", self.rows), self.project("up", x, "3", self.rows)
        return self.call("h", torch.ops.aten.cat.default, [gate, up], 1)


class _ForwardBuilder(_Builder):
    def build(self) -> GraphModule:
        n, spec = self.node, self.spec
        self.inputs("x", "top_k_index")
        self.weights()
        experts = self.call("num_experts", "size", n["w1"], 0)
        self.call("top_k", "size", n["top_k_index"], 1)
        self.call_tuple(("v", "inv", "offs"), hexa.reindex.default, n["top_k_index"], experts)
        for number in "13":
            self.narrow(n["x"], number, self.rows)
        h = self.first_projection()
        self.call("a", hexa.activate.default, h, spec.activation, spec.glu, list(spec.params))
        self.narrow(n["a"], "2", self.own_rows)
        self.project("y_rows", n["a"], "2", self.own_rows)
        y = self.call("y", hexa.combine.default, n["y_rows"], n["top_k_weights"], n["inv"], n["offs"], n["top_k"])
        if not self.request.training:
            return self.finish("MoeFfnForward", y)
        return self.finish("MoeFfnForward", (y, *(n[name] for name in self.request.kept)))


class _BackwardBuilder(_Builder):
    def build(self) -> GraphModule:
        n, spec, grads = self.node, self.spec, self.request.grads
        self.inputs("dy", *(("x",) if self.request.keeps_x else ()), *self.request.kept)
        self.weights()
        self.inputs("top_k", *(buffer_name(name) for name in OPERANDS if name in self.request.added))
        if spec.recompute_h:
            self.first_projection()
        self.second_projection_backward()
        if grads & {"x", "w1", "b1", "w3", "b3", "a1", "c1", "a3", "c3"}:
            self.first_projection_backward()
        returned = grads - self.request.added
        return self.finish("MoeFfnBackward", tuple(n[f"d{name}"] for name in SOURCES_OPERANDS if name in returned))

    def buffer(self, name: str) -> Node | None:
        """The buffer that the gradient of an operand is added to, if there is one."""
        return self.node.get(buffer_name(name))

    def gradient(self, name: str, target: Any, adding: Any, *args: Any) -> None:
        """Emits the gradient of an operand by one operator, or by the operator that adds it to its buffer."""
        buffer = self.buffer(name)
        by = (target,) if buffer is None else (adding, buffer)
        self.call(f"d{name}", *by, *args)

    def second_projection_backward(self) -> None:
        n, spec, grads = self.node, self.spec, self.request.grads
        t = self.factor_gradients("2", n["dy"], self.rows, n["top_k_weights"], bool(grads - {"b2", "c2"}))
        if grads - {"b2", "c2"}:
            self.product("da", n["dy"], "2", self.rows, self.added_gradient("2", t), back=True)
            static = (spec.activation, spec.glu, list(spec.params))
            self.call_tuple(
                ("dh", "a_s", "dtop_k_weights"),
                hexa.activate_backward.default,
                *(n["da"], n["h"], n["top_k_weights"], n["v"], n["offs"], *static),
            )
        if "a2" in grads:
            self.call("da2", projection.a_gradient, n["a_s"], t, n["a2"], *self.own_rows)
        if "top_k_weights" in grads and n["b2"] is not None:
            self.add_bias_to_dweights(n["b2"])
        if "b2" in grads:
            self.gradient("b2", *SUM, n["dy"], *self.rows, n["top_k_weights"])
        if "w2" in grads:
            self.gradient("w2", *PRODUCT, n["a_s"], n["dy"], None, *self.rows, spec.layout2)

    def factor_gradients(
        self, number: str, g: Node | None, rows: tuple[Any, ...], weights: Node | None, back: bool
    ) -> Node | None:
        """dC of an addition if it is wanted, of the gradient g of its projection. Returns t if it is to go ``back`` through it."""
        if not self.is_adapted(number):
            return None
        c, scale = self.node[f"c{number}"], self.request.alpha_of(number)
        back = back or f"a{number}" in self.request.grads
        if f"c{number}" in self.request.grads:
            given = (self.node[f"u{number}"], g, c, scale, back, weights, *rows)
            both = self.graph.call_function(projection.c_gradient, given)
            t, _ = (self.call(name, operator.getitem, both, i) for i, name in enumerate((f"t{number}", f"dc{number}")))
            return t if back else None
        return self.call(f"t{number}", projection.narrowed_gradient, g, c, scale, *rows) if back else None

    def add_bias_to_dweights(self, b2: Node) -> None:
        """<dy, b2[e]> at every slot: an esmm whose weight has one output, put in slot order by a combine of one."""
        n = self.node
        column = self.call("b2_column", "unsqueeze", b2, 1)
        dots = self.call("b2_dots", hexa.esmm.default, n["dy"], column, None, *self.rows, "nk")
        slots = self.call("b2_slots", hexa.combine.default, dots, None, n["inv"], n["offs"], 1)
        shaped = self.call("b2_dweights", "view_as", slots, n["dtop_k_weights"])
        typed = self.call("b2_dweights_typed", "type_as", shaped, n["dtop_k_weights"])
        self.call("dtop_k_weights", torch.ops.aten.add.Tensor, n["dtop_k_weights"], typed)

    def first_projection_backward(self) -> None:
        n = self.node
        if self.spec.glu != "split":
            self.projection_backward("1", n["dh"], "dx_rows")
        else:
            halves = self.graph.call_function(torch.ops.aten.chunk.default, (n["dh"], 2, 1))
            gate, up = (self.call(name, operator.getitem, halves, i) for i, name in enumerate(("dgate", "dup")))
            self.projection_backward("1", gate, "dgate_rows")
            self.projection_backward("3", up, "dup_rows")
        if "x" not in self.request.grads:
            return
        if self.spec.glu == "split":
            self.call("dx_rows", torch.ops.aten.add.Tensor, n["dgate_rows"], n["dup_rows"])
        self.call("dx", hexa.combine.default, n["dx_rows"], None, n["inv"], n["offs"], n["top_k"])

    def projection_backward(self, number: str, g: Node | None, dx_rows: str) -> None:
        """One projection's dX rows, dW and db: by esfk if both dX and dW are wanted, else by an operator for each."""
        n, grads, layout, offs = self.node, self.request.grads, self.spec.layout1, self.node["offs"]
        weight, bias, factor = f"w{number}", f"b{number}", f"a{number}"
        into, into_bias, has_bias = self.buffer(weight), self.buffer(bias), bias in grads
        t = self.factor_gradients(number, g, self.own_rows, None, "x" in grads)
        if factor in grads:
            self.call(f"d{factor}", projection.a_gradient, n["x"], t, n[factor], *self.rows)
        if self.request.fused_backward and "x" in grads and weight in grads and t is None:
            args = (n["x"], g, n[weight], *self.rows, layout)
            alike = (into is None) == (into_bias is None)
            if into is None:
                results = (dx_rows, f"d{weight}", f"d{bias}") if alike else (dx_rows, f"d{weight}")
                self.call_tuple(results, hexa.esfk.default, *args, has_bias and alike)
            else:
                self.call(dx_rows, hexa.esfk_add.default, into, into_bias, *args)
            if has_bias and not alike:
                self.gradient(bias, *SUM, g, None, offs, 1, None)
            return
        if "x" in grads:
            self.product(dx_rows, g, number, self.own_rows, self.added_gradient(number, t), back=True)
        if weight in grads:
            self.gradient(weight, *PRODUCT, n["x"], g, n["v"], None, offs, n["top_k"], layout)
        if has_bias:
            self.gradient(bias, *SUM, g, None, offs, 1, None)


def buffer_name(operand: str) -> str:
    """The operand of a backward graph that an operand's gradient is added to."""
    return f"main_{operand}"
