"""Lowers a canonical node's expert to a forward graph and a backward graph of expert-specific operators.

The graphs are those of docs/operators.md, node for node; `hexa_fx.passes.lowering.pipelines` says what a device makes of them.
Lowering omits what is not there (a bias, a frozen weight's gradient) and fuses nothing.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx import Graph, GraphModule, Node

from hexa_fx.errors import InputError
from hexa_fx.ir import FfnSpec
from hexa_fx.observers import notify
from hexa_fx.ops.activations import check_activation
from hexa_fx.ops.program import FfnRequest
from hexa_fx.ops.rows import flip
from hexa_fx.ops.table_layers import OPERANDS, PARAMETERS

hexa = torch.ops.hexa
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


def lower(
    spec: FfnSpec,
    *,
    top_k_weights: bool = True,
    b1: bool = False,
    b3: bool = False,
    b2: bool = False,
    grads: tuple[str, ...] | None = None,
    training: bool = True,
) -> Lowered:
    """The forward and backward graphs of an expert.

    Args:
        spec: the expert.
        top_k_weights, b1, b3, b2: which optional operands there are. W3 is there when glu is ``split``.
        grads: names of `OPERANDS` that need a gradient; None means every given one.
        training: the forward graph also returns what backward needs.

    Raises:
        InputError: the activation is unknown, or the gradient of a missing operand is asked for.
    """
    optional = {"top_k_weights": top_k_weights, "b1": b1, "b3": b3, "b2": b2, "w3": spec.glu == "split"}
    given = frozenset(n for n in OPERANDS if optional.get(n, True))
    wanted = given if grads is None else frozenset(grads)
    request = FfnRequest(spec, given, wanted, training)
    return Lowered(lower_forward(request), lower_backward(request))


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
        node = self.graph.create_node("call_function", target, args, name=name)
        self.node[name] = node
        return node

    def method(self, name: str, target: str, *args: Any) -> Node:
        node = self.graph.create_node("call_method", target, args, name=name)
        self.node[name] = node
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

    def first_projection(self) -> Node:
        """h, of one weight or of gate and up."""
        n, spec = self.node, self.spec
        rows = (n["v"], n["offs"], n["top_k"], spec.layout1)
        if spec.glu != "split":
            return self.call("h", hexa.esmm.default, n["x"], n["w1"], n["b1"], *rows)
        gate = self.call("gate", hexa.esmm.default, n["x"], n["w1"], n["b1"], *rows)
        up = self.call("up", hexa.esmm.default, n["x"], n["w3"], n["b3"], *rows)
        return self.call("h", torch.ops.aten.cat.default, [gate, up], 1)


class _ForwardBuilder(_Builder):
    def build(self) -> GraphModule:
        n, spec = self.node, self.spec
        self.inputs("x", "top_k_index")
        self.operands("top_k_weights", *PARAMETERS)
        experts = self.method("num_experts", "size", n["w1"], 0)
        self.method("top_k", "size", n["top_k_index"], 1)
        self.call_tuple(("v", "inv", "offs"), hexa.reindex.default, n["top_k_index"], experts)
        h = self.first_projection()
        self.call("a", hexa.activate.default, h, spec.activation, spec.glu, list(spec.params))
        self.call("y_rows", hexa.esmm.default, n["a"], n["w2"], n["b2"], None, n["offs"], 1, spec.layout2)
        y = self.call("y", hexa.combine.default, n["y_rows"], n["top_k_weights"], n["inv"], n["offs"], n["top_k"])
        if not self.request.training:
            return self.finish("MoeFfnForward", y)
        routing = (n["v"], n["inv"], n["offs"])
        return self.finish("MoeFfnForward", (y, *routing) if spec.recompute_h else (y, h, *routing))


class _BackwardBuilder(_Builder):
    def build(self) -> GraphModule:
        n, spec, grads = self.node, self.spec, self.request.grads
        self.inputs("dy", *backward_saved(self.request), "v", "inv", "offs")
        self.operands("top_k_weights", *PARAMETERS)
        self.inputs("top_k", *(buffer_name(name) for name in OPERANDS if name in self.request.added))
        if spec.recompute_h:
            self.first_projection()
        self.second_projection_backward()
        if grads & {"x", "w1", "b1", "w3", "b3"}:
            self.first_projection_backward()
        returned = grads - self.request.added
        return self.finish("MoeFfnBackward", tuple(n[f"d{name}"] for name in OPERANDS if name in returned))

    def buffer(self, name: str) -> Node | None:
        """The buffer that the gradient of an operand is added to, if there is one."""
        return self.node.get(buffer_name(name))

    def gradient(self, name: str, target: Any, adding: Any, *args: Any) -> None:
        """Emits the gradient of an operand by one operator, or by the operator that adds it to its buffer."""
        buffer = self.buffer(name)
        if buffer is None:
            self.call(f"d{name}", target, *args)
        else:
            self.call(f"d{name}", adding, buffer, *args)

    def second_projection_backward(self) -> None:
        n, spec, grads = self.node, self.spec, self.request.grads
        routing = (n["v"], n["offs"], n["top_k"])
        if grads - {"b2"}:
            self.call("da", hexa.esmm.default, n["dy"], n["w2"], None, *routing, flip(spec.layout2))
            static = (spec.activation, spec.glu, list(spec.params))
            self.call_tuple(
                ("dh", "a_s", "dtop_k_weights"),
                hexa.activate_backward.default,
                *(n["da"], n["h"], n["top_k_weights"], n["v"], n["offs"], *static),
            )
        if "top_k_weights" in grads and n["b2"] is not None:
            self.add_bias_to_dweights(n["b2"])
        if "b2" in grads:
            self.gradient("b2", *SUM, n["dy"], *routing, n["top_k_weights"])
        if "w2" in grads:
            self.gradient("w2", *PRODUCT, n["a_s"], n["dy"], None, *routing, spec.layout2)

    def add_bias_to_dweights(self, b2: Node) -> None:
        """<dy, b2[e]> at every slot: an esmm whose weight has one output, put in slot order by a combine of one."""
        n = self.node
        column = self.method("b2_column", "unsqueeze", b2, 1)
        dots = self.call("b2_dots", hexa.esmm.default, n["dy"], column, None, n["v"], n["offs"], n["top_k"], "nk")
        slots = self.call("b2_slots", hexa.combine.default, dots, None, n["inv"], n["offs"], 1)
        shaped = self.method("b2_dweights", "view_as", slots, n["dtop_k_weights"])
        typed = self.method("b2_dweights_typed", "type_as", shaped, n["dtop_k_weights"])
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

    def projection_backward(self, which: str, g: Node | None, dx_rows: str) -> None:
        """One projection's dX rows, dW and db: by esfk if both dX and dW are wanted, else by an operator for each."""
        n, grads, layout = self.node, self.request.grads, self.spec.layout1
        weight, bias, offs = f"w{which}", f"b{which}", n["offs"]
        into, into_bias, has_bias = self.buffer(weight), self.buffer(bias), bias in grads
        if self.request.fused_backward and "x" in grads and weight in grads:
            args = (n["x"], g, n[weight], n["v"], offs, n["top_k"], layout)
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
            self.call(dx_rows, hexa.esmm.default, g, n[weight], None, None, offs, 1, flip(layout))
        if weight in grads:
            self.gradient(weight, *PRODUCT, n["x"], g, n["v"], None, offs, n["top_k"], layout)
        if has_bias:
            self.gradient(bias, *SUM, g, None, offs, 1, None)


def buffer_name(operand: str) -> str:
    """The operand of a backward graph that an operand's gradient is added to."""
    return f"main_{operand}"


def backward_saved(request: FfnRequest) -> tuple[str, ...]:
    """Which of x and h the backward graph reads, and therefore have to be saved."""
    recompute = request.spec.recompute_h
    needs_x = recompute or bool(request.grads & {"w1", "w3"})
    return (*(("x",) if needs_x else ()), *(() if recompute else ("h",)))
