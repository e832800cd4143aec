"""What an expert computes between and after its two projections, found by experiment.

The recorded products are replaced by random numbers over a wide range, and the run is repeated from there. What arrives at the
second projection must be a known activation of them, row by row. Any operation that mixes rows, draws random numbers or differs
between experts breaks the equality, so none needs a rule of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product

import torch
from torch.fx import Node

from hexa_fx.capture import record_of
from hexa_fx.capture.replay import Replay
from hexa_fx.operations import operation
from hexa_fx.ops.activations import ACTIVATIONS
from hexa_fx.passes.detect.graph import ancestors, is_tensor, literals
from hexa_fx.passes.detect.projections import Contraction, Instance, feature_size
from hexa_fx.passes.detect.rows import Rows
from hexa_fx.passes.detect.rules import refuse_randomness
from hexa_fx.passes.detect.stacks import Form, Part, Stack, WeightTable, slice_of
from hexa_fx.passes.detect.tags import Tag
from hexa_fx.passes.detect.verdict import Refuse

_TOLERANCE = 1e-7


Halves = tuple[Part, Part] | None
"""Where gate and up lie in the result of one product; None if these are products of their own, or there is no up."""

_IN_ONE: tuple[Halves, ...] = (("first", "second"), ("even", "odd"), ("second", "first"), ("odd", "even"))


@dataclass(frozen=True)
class Hypothesis:
    activation: str
    params: tuple[float, ...]
    halves: Halves


def hypotheses(instance: Instance, segment: Sequence[Node]) -> Iterator[Hypothesis]:
    """Every activation, with every layout of gate and up in the result of the first projection."""
    width, sizes = feature_size(instance.second.data), [feature_size(first.node) for first in instance.first]
    # Of another width, one of two is no half of a gated pair: FiLM's scale, a gate per row.
    layouts: tuple[Halves, ...] = ()
    if sizes in ([width], [width, width]):
        layouts = (None,)
    elif sizes == [2 * width]:
        layouts = _IN_ONE
    for halves in layouts:
        for activation in ACTIVATIONS.values():
            if activation.pair and sizes == [width]:
                continue
            for params in activation.choices([number for number in literals(segment) if number > 0]):
                yield Hypothesis(activation.name, params, halves)


def activate(hypothesis: Hypothesis, inputs: list[torch.Tensor]) -> torch.Tensor:
    activation = ACTIVATIONS[hypothesis.activation]
    if hypothesis.halves is not None:
        inputs = [inputs[0][:, slice_of(half, inputs[0].shape[1] // 2)] for half in hypothesis.halves]
    if activation.pair:
        return activation.forward(*inputs, *hypothesis.params)
    value = activation.forward(inputs[0])
    value = value if isinstance(value, torch.Tensor) else value[0]
    return value if len(inputs) == 1 else value * inputs[1]


def row_factor(observed: torch.Tensor, expected: torch.Tensor) -> torch.Tensor | None:
    """m (R,) with ``observed == m[:, None] * expected``, or None."""
    if observed.shape[0] == 0:
        return observed.new_zeros(0)
    column = expected.abs().argmax(1, keepdim=True)
    factor = observed.gather(1, column) / expected.gather(1, column)
    scale = observed.abs().amax(1, keepdim=True).clamp(min=1e-6)
    if not bool(((observed - factor * expected).abs() <= _TOLERANCE * scale).all()):
        return None
    factor = factor[:, 0]
    return torch.where((factor - 1).abs() < 1e-9, torch.ones_like(factor), factor)


def second_projection(
    instances: Sequence[Instance], rows: Rows, replay: Replay, weights: WeightTable
) -> tuple[Stack, str | None]:
    """The reading of the second weight, and the base of a bias inside the call."""
    column = [instance.second for instance in instances]
    second, given = column[0], [c.data for c in column]
    product = rows.of([c.node for c in column], [replay.linear_part(c.node, c.data)[0] for c in column])
    data = rows.of(given, map(replay.value, given))
    for stack in weights.matrices(second.base, feature_size(second.node), feature_size(second.data)):
        if len(product) == len(data) == len(rows.expert) and _is_product(product, data, rows, stack):
            for each in zip(*(instance.products for instance in instances)):
                _check_inner_bias(each, rows, replay, weights)
            return stack, second.bias
    raise Refuse("the second projection is not a product with one matrix an expert", second.node)


def _is_product(product: torch.Tensor, data: torch.Tensor, rows: Rows, stack: Stack) -> bool:
    """Whether every row is that of ``data`` times its expert's matrix; the expert of a padding row is arbitrary."""
    expected = torch.empty_like(product)
    for expert in rows.expert.unique().tolist():
        chosen = rows.expert == expert
        expected[chosen] = data[chosen] @ stack.matrices[expert].T
    near = (product - expected).abs() <= 1e-5 * product.abs().amax(1, keepdim=True)
    return bool((near.all(1) | ~rows.real).all())


def _check_inner_bias(column: Sequence[Contraction], rows: Rows, replay: Replay, weights: WeightTable) -> None:
    base, constants = column[0].bias, [replay.linear_part(c.node, c.data)[1] for c in column]
    if base is None and all(constant is None for constant in constants):
        return
    known = [constant for constant in constants if constant is not None]
    vectors = None if base is None else weights.vectors(base)
    if len(known) == len(column) and all(c.bias == base for c in column):
        constant = rows.of([c.node for c in column], known)[rows.real]
        expected = torch.zeros_like(constant) if vectors is None else vectors[rows.expert[rows.real]]
        if torch.allclose(constant, expected, rtol=1e-5, atol=0.0):
            return
    raise Refuse("an expert product adds something that is not the expert's bias", column[0].node)


@dataclass(frozen=True)
class ExpertBody:
    """``y = act(x W1 + b1) W2 + b2``, with every weight named.

    Args:
        gate: the first projection, or its gate. up: the other first projection, or the other half of the one product's weight.
        gate_bias, up_bias, down_bias: bases of the biases, or None.
        activation, params: see `hexa_fx.ops.activations`.
        between: the factor (R,) that every row is multiplied by between the projections.
        gain: base of a vector (I,) an expert that the activations are multiplied by, or None.
    """

    gate: Stack
    up: Stack | None
    down: Stack
    gate_bias: str | None
    up_bias: str | None
    down_bias: str | None
    activation: str
    params: tuple[float, ...]
    between: torch.Tensor
    gain: str | None = None

    @property
    def hidden_size(self) -> int:
        return self.gate.matrices.shape[2]

    @property
    def intermediate_size(self) -> int:
        return self.down.matrices.shape[2]

    @property
    def form(self) -> Form:
        """How the user stores the weights."""
        return self.gate.form


def identify_body(
    instances: Sequence[Instance], rows: Rows, replay: Replay, weights: WeightTable, down_bias: str | None
) -> ExpertBody:
    """Identifies the expert function. ``down_bias`` is the base of a bias that is added after the second product, if any."""
    first, experts = instances[0].first, len(rows.readings[0].matrices)
    between = instances[0].between
    segment = [node for node in first[0].node.graph.nodes if node in between]
    refuse_randomness(segment)
    # The probe must reach far enough to hit every clamp in the code.
    reach = max([20.0, *(2 * abs(value) for value in literals(segment) if abs(value) < 1e6)])
    hidden, activated = _experiment(instances, rows, replay, reach)
    later_biases = bias_bases(segment, weights.tags, experts)
    orders = permutations(range(len(first)))
    for order, (added, gain) in product(orders, _ways_to_read(later_biases, first)):
        ordered = [first[i] for i in order]
        # those inside the product calls are replaced along with the products; those added later are part of the experiment
        biases = [*added, *[None] * (len(first) - len(added))] if added else [c.bias for c in ordered]
        values = _bias_values(biases, weights, experts, first[0].node)
        shifts = [value if c.bias is None else None for c, value in zip(ordered, values)]
        (gains,) = _bias_values([gain], weights, experts, first[0].node)
        for hypothesis in hypotheses(instances[0], segment):
            factors = _explain(hypothesis, [hidden[i] for i in order], activated, rows, shifts, gains)
            if factors is None:
                continue
            down, inner_bias = second_projection(instances, rows, replay, weights)
            readings = [rows.readings[i] for i in order]
            if hypothesis.halves is not None:
                readings, biases = [*map(readings[0].half, hypothesis.halves)], 2 * biases
            return ExpertBody(
                gate=readings[0],
                up=readings[1] if len(readings) > 1 else None,
                down=down,
                gate_bias=biases[0],
                up_bias=biases[1] if len(biases) > 1 else None,
                down_bias=inner_bias or down_bias,
                activation=hypothesis.activation,
                params=hypothesis.params,
                between=factors,
                gain=gain,
            )
    names = ", ".join(dict.fromkeys(operation(node) for node in segment)) or "nothing"
    raise Refuse(
        f"no known activation is what experts compute between their projections ({names})", instances[0].second.data
    )


def _experiment(
    instances: Sequence[Instance], rows: Rows, replay: Replay, reach: float
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Rows of normally distributed numbers put in for each first product, some that reach the end of the range, and what arrives at
    the second."""
    generator = torch.Generator().manual_seed(11)
    replace: dict[Node, torch.Tensor] = {}
    columns = [[c.node for c in column] for column in zip(*(instance.first for instance in instances))]
    for nodes in columns:
        recorded, width = [*map(replay.value, nodes)], feature_size(nodes[0])
        sizes = [value.numel() // width for value in recorded]
        noise, wide, spread = (
            make(sum(sizes), width, generator=generator, dtype=torch.float64, device="cpu")
            for make in (torch.randn, torch.rand, torch.rand)
        )
        values = torch.where(wide < 0.3, (spread - 0.5) * 2 * reach, 2 * noise)
        some = sorted({0, min(1, width - 1), width // 2, min(width // 2 + 1, width - 1)})
        values[:, some] = values[:, some].abs() + 0.5  # no activation makes the whole row zero
        if 1 < width == len(some):  # else a ReLU would do nothing to narrow rows
            every_other = torch.arange(0, len(values), 2, device=values.device)
            values[every_other, every_other // 2 % width] *= -1
        parts = values.to(recorded[0].device).split(sizes)
        replace |= {node: part.reshape(value.shape) for node, part, value in zip(nodes, parts, recorded)}
    given = [instance.second.data for instance in instances]
    answers = replay.run(replace, given)
    hidden = [rows.of(nodes, [replace[node] for node in nodes]) for nodes in columns]
    return hidden, rows.of(given, [answers[node] for node in given])


def bias_bases(nodes: Iterable[Node], tags: Mapping[Node, Tag], experts: int) -> list[str]:
    """Expert parameters that enter at ``nodes``, in order: one expert's, gathered ones, or a stack broadcast over rows."""
    weights = (operand for node in nodes for operand in node.all_input_nodes if tags[operand].weight)
    entering = (weight for weight in weights if tags[weight].experts or _is_of_all(weight, experts))
    return list(dict.fromkeys(base for weight in entering for base in tags[weight].bases))


def _is_of_all(weight: Node, experts: int) -> bool:
    """Whether it is a stack with a part for each expert, or made of one, as some experts' parts are."""
    values = (record_of(node).value for node in ancestors([weight]) if is_tensor(node))
    return any(value.dim() >= 2 and value.shape[0] == experts for value in values)


def _ways_to_read(later: list[str], first: Sequence[Contraction]) -> list[tuple[list[str | None], str | None]]:
    """Expert parameters between the projections as (biases, gain), likeliest first."""
    inside = any(contraction.bias is not None for contraction in first)
    ways: list[tuple[list[str | None], str | None]] = []
    if len(later) <= len(first) and not (later and inside):
        each = [*later, *[None] * (len(first) - len(later))] if later else []
        # the up projection may come first, or have the only one
        ways += [([*added], None) for added in permutations(each)]
    if later and (inside or len(later) - 1 <= len(first)) and (len(later) == 1 or not inside):
        ways += [([*added], later[-1]) for added in permutations(later[:-1])]
    if not ways:
        raise Refuse(
            f"between their projections the experts compute with {len(later)} parameters ({', '.join(later)}); biases of the first "
            "projections and one vector after the activation can be rewritten",
            first[0].node,
        )
    return ways


def _bias_values(biases: list[str | None], weights: WeightTable, experts: int, node: Node) -> list[torch.Tensor | None]:
    values = [None if base is None else weights.vectors(base) for base in biases]
    if any(base is not None and value is None for base, value in zip(biases, values)):
        raise Refuse("an expert parameter between the projections is not a bias vector", node)
    if any(value is not None and len(value) != experts for value in values):
        raise Refuse("only some of the experts have a bias between the projections", node)
    return values


def _explain(
    hypothesis: Hypothesis,
    hidden: Sequence[torch.Tensor],
    activated: torch.Tensor,
    rows: Rows,
    shifts: Sequence[torch.Tensor | None],
    gains: torch.Tensor | None,
) -> torch.Tensor | None:
    """The row factors under which the hypothesis gives what was observed, or None."""
    inputs = [h if shift is None else h + shift[rows.expert] for h, shift in zip(hidden, shifts)]
    expected = activate(hypothesis, inputs)
    if gains is not None and gains.shape[1:] != expected.shape[1:]:
        return None
    expected = expected if gains is None else expected * gains[rows.expert]
    if expected.shape != activated.shape:
        return None
    found = row_factor(activated[rows.real], expected[rows.real])  # whose bias a padding row gets is arbitrary
    return None if found is None else torch.ones_like(rows.scale).masked_scatter(rows.real, found)
