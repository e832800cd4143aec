"""Says what each node does in a mixture of experts, and which nodes of different stages correspond.

Nodes of different stages that share a key correspond. ``n:``, ``c:``, ``w:``, ``t:`` and ``l:`` keys name one thing (a kept
node, a submodule's call, a weight, a routing tensor, a node of the operators' graphs). ``r:`` keys name a part of the region,
such as the up projection.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
import torch.fx

from hexa_fx import operations as ops
from hexa_fx.capture import CapturedBlock, record_of
from hexa_fx.capture.records import nodes_by_call
from hexa_fx.inspection.view import NodeView, Role
from hexa_fx.ir import RewrittenBlock
from hexa_fx.operations import operation
from hexa_fx.passes.detect import MoEMatch
from hexa_fx.passes.detect.body import ExpertBody
from hexa_fx.passes.detect.graph import ancestors
from hexa_fx.passes.detect.steps import FreeBody, OfExpert, Product
from hexa_fx.passes.detect.tags import expert_groups
from hexa_fx.passes.example_values import MOE_FFN

Mark = tuple[Role, tuple[str, ...]]
REGION: tuple[Role, ...] = ("dispatch", "up", "act", "down", "combine")
"""Parts of a region, in order."""

_ROUTING = ("x", "top_k_index", "top_k_weights")


def weight_names(match: MoEMatch) -> dict[str, str]:
    """Operand of `hexa::moe_ffn` by parameter path; for experts of an unusual form, every parameter is ``expert``."""
    members = expert_groups(match.captured.named_tensors()).members
    return {
        name: operand for base, operand in _operands(match.body).items() for name in members.get(base, (base,)) if base
    }


def _operands(body: ExpertBody | FreeBody) -> dict[str, str]:
    if isinstance(body, FreeBody):
        products = [role for role in body.steps.values() if isinstance(role, Product)]
        found = {base: "expert" for role in products for base in (role.base, role.bias) if base}
        found.update({role.base: "expert" for role in body.steps.values() if isinstance(role, OfExpert)})
        if len(products) > 1:
            found[products[-1].base] = "w2"
        return found
    bases = [(body.gate.base, "w1"), (body.up.base if body.up else None, "w3"), (body.down.base, "w2")]
    biases = [(body.gate_bias, "b1"), (body.up_bias, "b3"), (body.down_bias, "b2")]
    return {base: operand for base, operand in reversed(bases + biases) if base is not None}


def mark_captured(match: MoEMatch, rewritten: RewrittenBlock) -> dict[str, Mark]:
    """Role and keys of every node of the recorded graph, by name."""
    captured, weights = match.captured, weight_names(match)
    kept = {node.meta["from"] for node in rewritten.graph.nodes if "from" in node.meta}
    calls = _called(captured, rewritten)
    routing = _routing_nodes(match)
    before_routing = ancestors(n for names in routing.values() for n in names)
    region = ancestors([match.output])
    parts = _Parts(weights)
    marks: dict[str, Mark] = {}
    for node in captured.graph.nodes:
        part = parts.of(node) if node in region else None
        keys = [f"t:{name}" for name, nodes in routing.items() if node in nodes]
        if node.op == "get_attr" and str(node.target) in weights:
            marks[node.name] = "weight", (f"w:{weights[str(node.target)]}",)
            continue
        if node.op == "placeholder":
            marks[node.name] = "input", (*keys, f"n:{node.name}")
            continue
        if node in calls:
            keys.append(f"c:{calls[node]}")
        if node.name in kept:
            keys.append(f"n:{node.name}")
        inside = part is not None and node.name not in kept and node not in calls
        if inside and part is not None and (part != "dispatch" or node not in before_routing):
            marks[node.name] = part, (f"r:{part}", *keys)
            continue
        marks[node.name] = ("router" if node in before_routing else "other"), tuple(keys)
    marks[match.output.name] = "combine", tuple(dict.fromkeys((*marks[match.output.name][1], "r:combine")))
    return marks


def _routing_nodes(match: MoEMatch) -> dict[str, tuple[torch.fx.Node, ...]]:
    routing = match.routing
    factors = tuple(node for source in (*routing.after, *routing.before) for node in source.nodes)
    return {"x": (match.source,), "top_k_index": routing.index.nodes, "top_k_weights": factors}


def _called(captured: CapturedBlock, rewritten: RewrittenBlock) -> dict[torch.fx.Node, str]:
    """Recorded nodes inside submodule calls that stayed calls."""
    stayed = {str(n.target) for n in rewritten.graph.find_nodes(op="call_module")}
    inside = nodes_by_call(captured.graph)
    return {node: call.path for call in captured.calls if call.path in stayed for node in inside[call.number]}


class _Parts:
    """Sorts the nodes of a region, given in execution order, by the projections they stand between."""

    def __init__(self, weights: Mapping[str, str]) -> None:
        self._weights = weights
        self._operand: dict[torch.fx.Node, str] = {}
        self._after: dict[torch.fx.Node, Role] = {}

    def of(self, node: torch.fx.Node) -> Role:
        inputs = node.all_input_nodes
        operands = [self._operand[n] for n in inputs if n in self._operand]
        if node.op == "get_attr" and str(node.target) in self._weights:
            self._operand[node] = self._weights[str(node.target)]
            return "weight"
        data = [n for n in inputs if n not in self._operand and _holds_floats(n)]
        if operands and not data and _holds_floats(node):  # a view, a slice, a stack of weights
            self._operand[node] = operands[0]
            return "weight"
        if operands and ops.contracts(node):
            part: Role = "down" if "w2" in operands else "up"
        else:
            part = self._carried(inputs)
        self._after[node] = part
        return part

    def _carried(self, inputs: Iterable[torch.fx.Node]) -> Role:
        parts = {self._after.get(n, "dispatch") for n in inputs}
        if parts & {"down", "combine"}:
            return "combine"
        return "act" if parts & {"up", "act"} else "dispatch"


def _holds_floats(node: torch.fx.Node) -> bool:
    value = record_of(node).value
    values = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(v, torch.Tensor) and v.is_floating_point() for v in values)


def mark_rewritten(match: MoEMatch, rewritten: RewrittenBlock, marks: Mapping[str, Mark]) -> dict[str, Mark]:
    """Role and keys of every node of the rewritten graph, by name. ``marks`` are those of the recorded graph."""
    weights = weight_names(match)
    packed = {weight.name: {weights.get(part[0], "expert") for part in weight.parts} for weight in rewritten.packed}
    found: dict[str, Mark] = {}
    for node in rewritten.graph.nodes:
        found[node.name] = _mark_new(node, weights, packed, marks)
    node = next((n for n in rewritten.graph.nodes if n.target is torch.ops.hexa.moe_ffn.default), None)
    if node is not None:
        for name, argument in zip(MOE_FFN, node.args):
            if isinstance(argument, torch.fx.Node):
                role, keys = found[argument.name]
                key = f"t:{name}" if name in _ROUTING else f"w:{name}"
                found[argument.name] = role, tuple(dict.fromkeys((*keys, key)))
    return found


def _mark_new(
    node: torch.fx.Node, weights: Mapping[str, str], packed: Mapping[str, set[str]], marks: Mapping[str, Mark]
) -> Mark:
    target = str(node.target)
    if node.op == "placeholder":
        return "input", (f"n:{node.name}",)
    if node.op == "call_module" and target in packed:
        return "weight", tuple(f"w:{name}" for name in sorted(packed[target]))
    if node.op == "get_attr" and target in weights:
        return "weight", (f"w:{weights[target]}",)
    if node.op == "call_module":
        return "router", (f"c:{target}",)
    if "from" in node.meta:
        role, keys = marks.get(node.meta["from"], ("other", ()))
        return role, tuple(dict.fromkeys((*keys, f"n:{node.meta['from']}")))
    if node.target is torch.ops.hexa.moe_ffn.default:
        return "region", tuple(f"r:{part}" for part in REGION)
    part = _OF_OPERATOR.get(operation(node))
    if part is not None:
        return part, (f"r:{part}",)
    if (
        node.op != "output"
        and node.all_input_nodes
        and all(_is_weight(n, weights, packed) for n in node.all_input_nodes)
    ):
        return "weight", ()
    return "other", ()


def _is_weight(node: torch.fx.Node, weights: Mapping[str, str], packed: Mapping[str, set[str]]) -> bool:
    return (node.op == "get_attr" and str(node.target) in weights) or (
        node.op == "call_module" and str(node.target) in packed
    )


_NUMBERED = re.compile(r"_\d+$")
_OF_OPERATOR: dict[str, Role] = {
    "reindex": "dispatch",
    "esmm": "up",
    "activate": "act",
    "combine": "combine",
    "route": "dispatch",
    "route_and_reindex": "dispatch",
    "routed": "dispatch",
}

_OF_NAME: dict[str, Role] = {
    **dict.fromkeys(("num_experts", "top_k", "v", "inv", "offs", "tiling", "routing"), "dispatch"),
    **dict.fromkeys(("gate", "up", "h", "h_a", "dx_rows", "dgate_rows", "dup_rows", "dw1", "dw3", "db1", "db3"), "up"),
    **dict.fromkeys(("a", "dh", "a_s", "dgate", "dup", "part"), "act"),
    **dict.fromkeys(("y_rows", "da", "dw2", "db2", "b2_column", "b2_dots", "b2_slots"), "down"),
    **dict.fromkeys(("y", "dx", "dtop_k_weights", "b2_dweights", "b2_dweights_typed"), "combine"),
}
_OF_KERNEL: dict[str, Role] = {
    "reindex": "dispatch",
    "esmm_act": "up",
    "esfk": "up",
    "activate": "act",
    "activate_backward": "act",
    "esmm_act_backward": "act",
    "combine": "combine",
}


def mark_operators(node: NodeView, joined: Mapping[str, tuple[str, ...]]) -> Mark:
    """Role and keys of a node of the operators' graphs. ``joined``: nodes of the stage before that it replaced."""
    name = node.name
    if node.kind == "input":
        if name in _ROUTING:
            return "input", (f"t:{name}", f"l:{name}")
        if name in MOE_FFN:
            return "weight", (f"w:{name}", f"l:{name}")
        return "input", (f"l:{name}",)
    names = tuple(dict.fromkeys((_NUMBERED.sub("", name), *joined.get(name, ()))))
    keys = tuple(f"l:{n}" for n in names)
    bare = node.op.removeprefix("hexa.")
    role = _OF_NAME.get(name) or _OF_KERNEL.get(bare) or "other"
    parts = dict.fromkeys(_OF_NAME[n] for n in names if n in _OF_NAME) or dict.fromkeys([role])
    if node.kind == "output" or role == "other":
        return role, keys
    return role, (*keys, *(f"r:{part}" for part in parts))
