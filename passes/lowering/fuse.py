"""Folds the activation, and its gradient, into the epilogue of the preceding product."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from hexa_fx.ops.table import ActivateBackward, Esmm, EsmmAct, EsmmActBackward
from hexa_fx.passes.lowering.graph_pass import GraphPass

hexa = torch.ops.hexa


@dataclass(frozen=True)
class FuseActivation(GraphPass):
    """``h = esmm(x, W1, b1); a = activate(h)`` becomes ``h, a = esmm_act(...)``.

    Gate and up of a ``split`` expert, two esmm and a concatenation, become one esmm_act too. h is kept only where
    something other than the activation reads it. ``activate_backward(esmm(dy, W2))`` becomes ``esmm_act_backward``.

    Args:
        gradients: fuse the gradients too. On CUDA that saves a kernel; elsewhere the two operators are as good.
    """

    gradients: bool = False

    name: ClassVar[str] = "fuse_activation"
    summary: ClassVar[str] = "activations go into the products before them"

    def apply(self, gm: GraphModule) -> int:
        """Fuses every activation that follows a projection, and every gradient of one."""
        forward = [n for n in gm.graph.nodes if n.target is hexa.activate.default]
        backward = [n for n in gm.graph.nodes if self.gradients and n.target is hexa.activate_backward.default]
        return sum(_fuse(gm, n) for n in forward) + sum(_fuse_backward(gm, n) for n in backward)


def _fuse(gm: GraphModule, activate: Node) -> bool:
    h, activation, glu, params = activate.args
    assert isinstance(h, Node)
    projections = _projections(h, glu == "split")
    if not projections:
        return False
    o, *up = (Esmm._make(projection.args) for projection in projections)
    weights = {"w1": o.weight, "b1": o.bias, "w3": up[0].weight if up else None, "b3": up[0].bias if up else None}
    keep_h = any(user is not activate for user in h.users)
    args = tuple(o.to(EsmmAct, activation=activation, glu=glu, params=params, keep_h=keep_h, **weights))
    with gm.graph.inserting_before(h):
        fused = gm.graph.create_node("call_function", hexa.esmm_act.default, args, name="h_a")
    for node, position in ((activate, 1), (h, 0)):
        node.target, node.args = operator.getitem, (fused, position)
    for dead in (h, *(p for p in projections if p is not h)):
        if not dead.users:
            gm.graph.erase_node(dead)
    return True


def _fuse_backward(gm: GraphModule, gradient: Node) -> bool:
    o: Any = ActivateBackward._make(gradient.args)
    da = o.da
    if not isinstance(da, Node) or da.target is not hexa.esmm.default or len(da.users) != 1:
        return False
    product = Esmm._make(da.args)
    if product.bias is not None or product.v is None or (product.v, product.offs) != (o.v, o.offs):
        return False
    gradient.target = hexa.esmm_act_backward.default
    more = {"dy": product.x, "weight": product.weight, "top_k": product.top_k, "layout": product.layout}
    gradient.args = tuple(o.to(EsmmActBackward, **more))
    gm.graph.erase_node(da)
    return True


def _projections(h: Node, split: bool) -> tuple[Node, ...]:
    """The one or two esmm that h consists of; empty if it is something else, or if they have other users."""
    if not split:
        return (h,) if h.target is hexa.esmm.default else ()
    if h.target is not torch.ops.aten.cat.default:
        return ()
    gate, up = h.all_input_nodes
    if not all(n.target is hexa.esmm.default and len(n.users) == 1 for n in (gate, up)):
        return ()
    one, other = (Esmm._make(n.args)._replace(weight=None, bias=None) for n in (gate, up))
    return (gate, up) if tuple(one) == tuple(other) else ()
