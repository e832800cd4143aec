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
from hexa_fx.passes.detect.projections import Contraction, feature_size, in_batches
from hexa_fx.passes.detect.row_order import segment_of
from hexa_fx.passes.detect.rows import DIFFERENT_WAYS, Instance, joined
from hexa_fx.passes.detect.rules import refuse_randomness
from hexa_fx.passes.detect.stacks import Form, Part, Stack, WeightTable, slice_of
from hexa_fx.passes.detect.tags import ALL, Tag
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
        return activation.forward(*inputs, hypothesis.params)
    value = activation.forward(inputs[0], hypothesis.params)
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


def second_projection(instances: list[Instance], replay: Replay, weights: WeightTable) -> tuple[Stack, str | None]:
    """The reading of the second weight, and the base of a bias inside the call."""
    second = instances[0].second
    for stack in weights.matrices(second.base, feature_size(second.node), feature_size(second.data)):
        if _are_products(instances, stack, replay):
            _check_inner_bias(instances, replay, weights)
            return stack, second.bias
    raise Refuse("the second projection is not a product with one matrix an expert", second.node)


def _are_products(instances: list[Instance], stack: Stack, replay: Replay) -> bool:
    for instance in instances:
        if instance.second.base != stack.base:
            raise Refuse(DIFFERENT_WAYS, instance.second.node)
    numbers = {instance.second: number for number, instance in enumerate(instances)}
    batches = in_batches([*numbers])
    return all(_are_near([instances[numbers[second]] for second in batch], stack, replay) for batch in batches)


def _are_near(instances: Sequence[Instance], stack: Stack, replay: Replay) -> bool:
    """Whether the second products of some instances are those of their experts' matrices, each by its own scale."""
    off, scales, real, sizes = [], [], [], []
    for instance in instances:
        product, _ = replay.linear_part(instance.second.node, instance.second.data)
        product = product.reshape(-1, stack.matrices.shape[1])
        given = instance.second.data
        data = instance.laid_out(given, replay.value(given).reshape(-1, stack.matrices.shape[2]))
        if len(product) != len(data) or len(data) != len(instance.expert):
            return False
        if len(data):
            off.append(product - _expected(instance, data, stack))
            scales.append(product.abs().amax())
            real.append(instance.token >= 0)  # the expert of a padding row is arbitrary
            sizes.append(len(data))
    if not off:
        return True
    scale = torch.stack(scales).repeat_interleave(torch.tensor(sizes, device=off[0].device))
    return bool(((joined(off).abs() <= 1e-5 * scale[:, None]).all(1) | ~joined(real)).all())


def _expected(instance: Instance, data: torch.Tensor, stack: Stack) -> torch.Tensor:
    if instance.second.expert != ALL:
        return data @ stack.matrices[instance.second.expert].T
    expected = data.new_empty(len(data), stack.matrices.shape[1])
    for expert in instance.expert.unique().tolist():
        chosen = instance.expert == expert
        expected[chosen] = data[chosen] @ stack.matrices[expert].T
    return expected


def _check_inner_bias(instances: list[Instance], replay: Replay, weights: WeightTable) -> None:
    for instance in instances:
        for contraction in (*instance.first, instance.second):
            _, constant = replay.linear_part(contraction.node, contraction.data)
            if constant is None and contraction.bias is None:
                continue
            if constant is None:
                raise Refuse("an expert product adds something that is not the expert's bias", contraction.node)
            constant = instance.laid_out(contraction.node, constant.reshape(-1, feature_size(contraction.node)))
            constant = constant[instance.token >= 0]
            vectors = None if contraction.bias is None else weights.vectors(contraction.bias)
            expected = torch.zeros_like(constant) if vectors is None else vectors[instance.expert[instance.token >= 0]]
            if not torch.allclose(constant, expected, rtol=1e-5, atol=0.0):
                raise Refuse("an expert product adds something that is not the expert's bias", contraction.node)


@dataclass(frozen=True)
class ExpertBody:
    """``y = act(x W1 + b1) W2 + b2``, with every weight named.

    Args:
        gate: the first projection, or its gate. up: the other first projection, or the other half of the one product's weight.
        gate_bias, up_bias, down_bias: bases of the biases, or None.
        activation, params: see `hexa_fx.ops.activations`.
        between: per instance, the factor (R,) every row is multiplied by between the projections.
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
    between: tuple[torch.Tensor, ...]
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


@dataclass(frozen=True)
class _Probe:
    """The experiment: pre-activations put in (one tensor a product of the instance), activations read at the second product."""

    hidden: list[list[torch.Tensor]]
    activated: list[torch.Tensor]


def identify_body(
    instances: list[Instance], tags: Mapping[Node, Tag], replay: Replay, weights: WeightTable, down_bias: str | None
) -> ExpertBody:
    """Identifies the expert function. ``down_bias`` is the base of a bias that is added after the second product, if any.

    Raises:
        Refuse: the experts compute something else; the sentence says what was seen.
    """
    segment = segment_of(instances[0].first, instances[0].second)
    refuse_randomness(segment)
    first = instances[0].first
    probe = _experiment(instances, replay, _range(segment))
    later_biases = bias_bases(segment, tags, instances[0].readings[0].matrices.shape[0])
    experts = len(instances[0].readings[0].matrices)
    orders = permutations(range(len(first)))
    for order, (added, gain) in product(orders, _ways_to_read(later_biases, first)):
        biases = _assign_biases([first[i] for i in order], added)
        values = _bias_values(biases, weights, experts, first[0].node)
        (gains,) = _bias_values([gain], weights, experts, first[0].node)
        for hypothesis in hypotheses(instances[0], segment):
            between = _explain(hypothesis, order, probe, instances, values, gains)
            if between is None:
                continue
            down, inner_bias = second_projection(instances, replay, weights)
            readings = [instances[0].readings[i] for i in order]
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
                between=between,
                gain=gain,
            )
    names = ", ".join(dict.fromkeys(operation(node) for node in segment)) or "nothing"
    raise Refuse(
        f"no known activation is what experts compute between their projections ({names})", instances[0].second.data
    )


def _range(segment: Sequence[Node]) -> float:
    """How far the probe must reach to hit every clamp in the code."""
    return max([20.0, *(2 * abs(value) for value in literals(segment) if abs(value) < 1e6)])


def _experiment(instances: list[Instance], replay: Replay, reach: float) -> _Probe:
    """Rows of normally distributed numbers, and some that reach the end of the range."""
    generator = torch.Generator().manual_seed(11)
    replace: dict[Node, torch.Tensor] = {}
    for batch in in_batches([contraction for instance in instances for contraction in instance.first]):
        recorded = [replay.value(contraction.node) for contraction in batch]
        width = feature_size(batch[0].node)
        rows = [value.numel() // width for value in recorded]
        noise, wide, spread = (
            make(sum(rows), width, generator=generator, dtype=torch.float64, device="cpu")
            for make in (torch.randn, torch.rand, torch.rand)
        )
        values = torch.where(wide < 0.3, (spread - 0.5) * 2 * reach, 2 * noise)
        some = sorted({0, min(1, width - 1), width // 2, min(width // 2 + 1, width - 1)})
        values[:, some] = values[:, some].abs() + 0.5  # no activation makes the whole row zero
        if 1 < width == len(some):  # else a ReLU would do nothing to narrow rows
            every_other = torch.arange(0, len(values), 2, device=values.device)
            values[every_other, every_other // 2 % width] *= -1
        parts = values.to(recorded[0].device).split(rows)
        replace |= {c.node: part.reshape(value.shape) for c, part, value in zip(batch, parts, recorded)}
    answers = replay.run(replace, [instance.second.data for instance in instances])
    hidden = [[_by_feature(replace[c.node], c.node) for c in instance.first] for instance in instances]
    return _Probe(hidden, [_by_feature(answers[i.second.data], i.second.data) for i in instances])


def _by_feature(value: torch.Tensor, node: Node) -> torch.Tensor:
    return value.reshape(-1, feature_size(node))


def bias_bases(nodes: Iterable[Node], tags: Mapping[Node, Tag], experts: int) -> list[str]:
    """Expert parameters that enter at ``nodes``, in order: one expert's, gathered ones, or a stack broadcast over rows."""
    found: dict[str, None] = {}
    for node in nodes:
        for operand in node.all_input_nodes:
            if tags[operand].weight and (tags[operand].experts or _is_of_all(operand, experts)):
                found.update(dict.fromkeys(tags[operand].bases))
    return list(found)


def _is_of_all(weight: Node, experts: int) -> bool:
    """Whether it is a stack with a part for each expert, or made of one, as some experts' parts are."""
    values = (record_of(node).value for node in ancestors([weight]) if is_tensor(node))
    return any(value.dim() >= 2 and value.shape[0] == experts for value in values)


def _assign_biases(ordered: Sequence[Contraction], later: list[str | None]) -> list[str | None]:
    """Biases inside the product calls are replaced along with the products; those added later are part of the experiment."""
    if not later:
        return [None if c.bias is None else c.bias for c in ordered]
    return [later[i] if i < len(later) else None for i in range(len(ordered))]


def _ways_to_read(later: list[str], first: Sequence[Contraction]) -> list[tuple[list[str | None], str | None]]:
    """Expert parameters between the projections as (biases, gain), likeliest first.

    Raises:
        Refuse: there are more of them than a body has places for.
    """
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
    order: Sequence[int],
    probe: _Probe,
    instances: list[Instance],
    biases: list[torch.Tensor | None],
    gains: torch.Tensor | None,
) -> tuple[torch.Tensor, ...] | None:
    """The row factors under which the hypothesis gives what was observed, or None."""
    factors: list[torch.Tensor] = []
    outside = [instances[0].first[i].bias is None for i in order]
    if any([instance.first[i].bias is None for i in order] != outside for instance in instances):
        return None
    numbers = {instance.second: number for number, instance in enumerate(instances)}
    for batch in in_batches([instance.second for instance in instances]):
        chosen = [numbers[second] for second in batch]
        inputs = [
            joined([instances[n].laid_out(instances[n].first[i].node, probe.hidden[n][i]) for n in chosen])
            for i in order
        ]
        activated = joined([instances[n].laid_out(instances[n].second.data, probe.activated[n]) for n in chosen])
        expert = joined([instances[number].expert for number in chosen])
        shifted = [
            h if bias is None or not added_later else h + bias[expert]
            for h, bias, added_later in zip(inputs, biases, outside)
        ]
        expected = activate(hypothesis, shifted)
        if gains is not None and gains.shape[1:] == expected.shape[1:]:
            expected = expected * gains[expert]
        elif gains is not None:
            return None
        if expected.shape != activated.shape:
            return None
        real = joined([instances[number].token for number in chosen]) >= 0  # whose bias a padding row gets is arbitrary
        found = row_factor(activated[real], expected[real])
        if found is None:
            return None
        factor = torch.ones(len(real), dtype=found.dtype, device=found.device)
        factor[real] = found
        factors += factor.split([len(instances[number].token) for number in chosen])
    return tuple(factors)
