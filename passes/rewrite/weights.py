"""Expert weights as nodes of the rewritten graph, which reads the user's own parameters."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass, field

import torch
import torch.fx
from torch.fx import Node

from hexa_fx import operations as ops
from hexa_fx.capture import CapturedBlock, record_of
from hexa_fx.ir import Glu, PackedWeight
from hexa_fx.passes.detect.body import ExpertBody
from hexa_fx.passes.detect.graph import descendants
from hexa_fx.passes.detect.stacks import Part, Stack, packed_shape, slice_of
from hexa_fx.passes.detect.tags import expert_groups
from hexa_fx.passes.detect.verdict import Refuse

_Weights = tuple[dict[str, Node | None], Glu]
"""Weights of `hexa::moe_ffn` by their names there, and how gate and up lie in them."""
_TOGETHER: dict[tuple[Part, Part], Glu] = {("first", "second"): "concat", ("even", "odd"): "interleaved"}
"""How operators take gate and up in one weight, by where they lie there."""


@dataclass
class WeightEmitter:
    """Adds the nodes that read a region's expert weights to a graph.

    Args:
        suffix: of the names of packed storage, for a block's second region and further ones.
        packed: collects what is read as one weight of many parameters.
    """

    graph: torch.fx.Graph
    captured: CapturedBlock
    suffix: str = ""
    packed: list[PackedWeight] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._groups = expert_groups(self.captured.named_tensors()).members
        self._by_base: dict[str, Node] = {}

    def matrices(self, base: str, experts: int) -> Node:
        """(E, ., .) of one base, read once."""
        if base not in self._by_base:
            self._by_base[base] = self._read(_name_of(base), [base], experts)
        return self._by_base[base]

    def vectors(self, base: str) -> Node:
        """(E, C) of one base, a bias or a scale; (E,) if it is one number per expert. Read once."""
        if base not in self._by_base:
            if self._dims(base) == 1 and base in self._groups:
                numbers = [self.graph.get_attr(name) for name in self._groups[base]]
                self._by_base[base] = self.graph.call_function(torch.stack, (numbers,))
            else:
                self._by_base[base] = self._rows(_name_of(base), [base])
        return self._by_base[base]

    def emit(self, body: ExpertBody) -> _Weights:
        """Of a whole layer; w3 where up is a tensor of its own."""
        weights, glu = self._first(body)
        number = len(body.down.matrices)
        down = self._read("hexa_w2", [body.down.base], number)
        if len(body.gate.matrices) > number:  # storage of experts that have no second projection
            for name in ("w1", "w3"):
                if (node := weights.get(name)) is not None:
                    weights[name] = self._cut(node, 0, slice(None, number))
        if body.gain is not None:  # act(h) * g @ W2 is act(h) @ (g * W2)
            dim = 1 if body.down.layout == "nk" else 2
            gain = self.graph.call_method("unsqueeze", (self._bias("hexa_gain", body.gain), dim))
            down = self.graph.call_function(operator.mul, (down, gain))
        return {**weights, "w2": down, "b2": self._bias("hexa_b2", body.down_bias)}, glu

    def _first(self, body: ExpertBody) -> _Weights:
        gate, up, experts = body.gate, body.up, len(body.gate.matrices)
        if up is None:
            w1, b1 = self._read("hexa_w1", [gate.base], experts), self._bias("hexa_b1", body.gate_bias)
            return {"w1": w1, "b1": b1}, "none"
        if gate.base == up.base:
            return self._of_one(body, gate, up)
        # Two lists of matrices like those of nn.Linear become one tensor with gate above up.
        alike = gate.form == up.form == "listed" and gate.layout == up.layout == "nk"
        if alike and (body.gate_bias is None) == (body.up_bias is None):
            w1 = self._read("hexa_w1", [gate.base, up.base], experts)
            return {"w1": w1, "b1": self._bias("hexa_b1", body.gate_bias, body.up_bias)}, "concat"
        w1, w3 = self._read("hexa_w1", [gate.base], experts), self._read("hexa_w3", [up.base], experts)
        return {"w1": w1, "w3": w3, **self._biases(body)}, "split"

    def _biases(self, body: ExpertBody) -> dict[str, Node | None]:
        return {"b1": self._bias("hexa_b1", body.gate_bias), "b3": self._bias("hexa_b3", body.up_bias)}

    def _of_one(self, body: ExpertBody, gate: Stack, up: Stack) -> _Weights:
        """Gate and up in one weight: as operators take it, or as two views."""
        whole, together = self._read("hexa_w1", [gate.base], len(gate.matrices)), _TOGETHER.get((gate.part, up.part))
        is_one = body.gate_bias == body.up_bias
        if is_one and together is not None:
            return {"w1": whole, "b1": self._bias("hexa_b1", body.gate_bias)}, together
        size, dim = gate.matrices.shape[1], 1 if gate.layout == "nk" else 2
        cut = {name: slice_of(stack.part, size) for name, stack in (("1", gate), ("3", up))}
        weights: dict[str, Node | None] = {f"w{name}": self._cut(whole, dim, piece) for name, piece in cut.items()}
        if not is_one or body.gate_bias is None:
            return weights | self._biases(body), "split"
        both = self._rows("hexa_b1", [body.gate_bias])
        return weights | {f"b{name}": self._cut(both, 1, piece) for name, piece in cut.items()}, "split"

    def _cut(self, node: Node, dim: int, piece: slice) -> Node:
        index = (*[slice(None)] * dim, piece)
        return self.graph.call_function(operator.getitem, (node, index))

    def _bias(self, name: str, *bases: str | None) -> Node | None:
        """(E, C) of one base or of several side by side; None of None."""
        known = [base for base in bases if base is not None]
        return self._rows(name, known) if known else None

    def _rows(self, name: str, bases: list[str]) -> Node:
        node = self._read(name, bases, 0)
        return node if self._dims(bases[0]) <= 2 else self.graph.call_method("flatten", (node, 1))

    def is_in(self, base: str, dtype: torch.dtype) -> bool:
        """Whether the code has experts' parameters in this dtype, or their own holds no number that this one does not."""
        roots = self.captured.graph.find_nodes(op="get_attr", target=self._groups.get(base, (base,))[0])
        read = descendants(
            roots, lambda n: not (n in roots or ops.views(n) or ops.casts(n) or ops.kind(n) == "getitem")
        )
        casts = {record_of(node).value.dtype for node in read if ops.casts(node)}
        return dtype in casts or torch.promote_types(self.first_of(base).dtype, dtype) == dtype

    def _dims(self, base: str) -> int:
        """Of all experts' parameters, stacked."""
        return self.first_of(base).dim() + (base in self._groups)

    def first_of(self, base: str) -> torch.Tensor:
        """The first expert's parameter, or that of all of them, as it is now."""
        return self.captured.tensor_of(self._groups.get(base, (base,))[0])

    def _read(self, name: str, bases: list[str], experts: int) -> Node:
        """One tensor for ``bases``: the user's own if it is stacked, packed storage if there is one parameter per expert."""
        if bases[0] in self._groups:
            paths = [path for base in bases for path in self._groups[base]]
            if len({self.captured.tensor_of(path).dtype for path in paths}) > 1:
                raise Refuse(f"{paths[0]} and others like it, which are read as one weight, have different dtypes")
            name += self.suffix
            self.packed.append(PackedWeight(name, tuple(self._groups[base] for base in bases)))
            return self.graph.call_module(name)
        node = self.graph.get_attr(bases[0])
        stored = self.captured.tensor_of(bases[0])
        shape = packed_shape(self.captured, bases[0]) if stored.dim() == 2 and experts else None
        if shape is None:
            return node
        if shape[2:] == stored.shape[1:]:  # which can be cut into slices of experts
            return self.graph.call_method("unflatten", (node, 0, (shape[0], -1)))
        return self.graph.call_method("reshape", (node, *shape))


def _name_of(base: str) -> str:
    """An attribute name for packed storage: the path with the expert's number left open."""
    return "hexa_" + re.sub(r"\W+", "_", base.replace("{}", "each"))
