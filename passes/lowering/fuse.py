"""Folds the activation, and its gradient, into the epilogue of the preceding product."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from hexa_fx.ops import library
from hexa_fx.ops.projection import side_by_side
from hexa_fx.ops.table import ActivateBackward, Esmm
from hexa_fx.ops.table_variants import EsmmPacked
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
    # of gate and up one may have an addition
    target = _fused("esmm_act", max((p.target for p in projections), key=_PRODUCTS.index))  # type: ignore[arg-type]
    records = [_record(p) for p in projections]
    o = records[0]
    keep_h = any(user is not activate for user in h.users)
    given = {"activation": activation, "glu": glu, "params": params, "keep_h": keep_h}
    if not isinstance(o, EsmmPacked):
        for number, each in zip("13", records):
            given |= {f"w{number}": each.weight, f"b{number}": each.bias}
    if len(records) == 2 and target is hexa.esmm_act_low_rank.default:
        of_each = [getattr(each, name, None) for each in records for name in ("u", "c")]
        with gm.graph.inserting_before(h):
            both = gm.graph.call_function(side_by_side, (o.layout, o.weight, *of_each))
            given |= {
                name: gm.graph.call_function(operator.getitem, (both, n)) for n, name in enumerate(("u", "c", "c3"))
            }
    args = tuple(o.to(library.record_of(target._opname), **given))
    with gm.graph.inserting_before(h):
        fused = gm.graph.create_node("call_function", target, args, name="h_a")
    for node, position in ((activate, 1), (h, 0)):
        node.target, node.args = operator.getitem, (fused, position)
    for dead in (h, *(p for p in projections if p is not h)):
        if not dead.users:
            gm.graph.erase_node(dead)
    return True


def _fuse_backward(gm: GraphModule, gradient: Node) -> bool:
    o: Any = ActivateBackward._make(gradient.args)
    da = o.da
    if not isinstance(da, Node) or da.target not in _PRODUCTS or len(da.users) != 1:
        return False
    product = _record(da)
    if product.bias is not None or product.v is None or (product.v, product.offs) != (o.v, o.offs):
        return False
    gradient.target = target = _fused("esmm_act_backward", da.target)
    given = {**o._asdict(), **product._asdict(), "dy": product.x}
    gradient.args = tuple(map(given.get, library.record_of(target._opname)._fields))
    gm.graph.erase_node(da)
    return True


_ENDS = {
    hexa.esmm.default: "",
    hexa.esmm_low_rank.default: "_low_rank",
    hexa.esmm_packed.default: "_packed",
    hexa.esmm_packed_low_rank.default: "_packed",
}
"""By product, how names end of what is fused with one."""
_PRODUCTS = tuple(_ENDS)
_DENSE = _PRODUCTS[:2]


def _fused(name: str, product: Any) -> Any:
    """The operator that is a product and more."""
    return library.overload(f"{name}{_ENDS[product]}")


def _projections(h: Node, split: bool) -> tuple[Node, ...]:
    """The one or two products that h consists of; empty if it is something else, or if they have other users. Of two, none is
    packed.
    """
    if not split:
        return (h,) if h.target in _PRODUCTS else ()
    if h.target is not torch.ops.aten.cat.default:
        return ()
    gate, up = h.all_input_nodes
    if not all(n.target in _DENSE and len(n.users) == 1 for n in (gate, up)):
        return ()
    one, other = (_record(n).to(Esmm, weight=None, bias=None) for n in (gate, up))
    return (gate, up) if tuple(one) == tuple(other) else ()


def _record(product: Node) -> Any:
    """The operands of an operator's node."""
    return library.record_of(product.target._opname)._make(product.args)  # type: ignore[union-attr]
