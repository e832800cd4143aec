"""The second projection of experts: that its products are those of one matrix an expert, and what bias they add."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hexa_fx.capture.replay import Replay
from hexa_fx.passes.detect.projections import feature_size, in_batches
from hexa_fx.passes.detect.rows import DIFFERENT_WAYS, Instance, joined
from hexa_fx.passes.detect.stacks import Stack, WeightTable
from hexa_fx.passes.detect.tags import ALL
from hexa_fx.passes.detect.verdict import Refuse


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
        data = replay.value(instance.second.data).reshape(-1, stack.matrices.shape[2])
        if len(product) != len(data) or len(data) != len(instance.expert):
            return False
        if len(data):
            off.append(product - _expected(instance, data, stack))
            scales.append(product.abs().amax())
            real.append(instance.token >= 0)  # the expert of a padding row is arbitrary
            sizes.append(len(data))
    if not off:
        return True
    scale = torch.stack(scales).clamp(min=1e-12).repeat_interleave(torch.tensor(sizes, device=off[0].device))
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
            constant = constant.reshape(-1, feature_size(contraction.node))[instance.token >= 0]
            vectors = None if contraction.bias is None else weights.vectors(contraction.bias)
            expected = torch.zeros_like(constant) if vectors is None else vectors[instance.expert[instance.token >= 0]]
            if not torch.allclose(constant, expected, rtol=1e-5, atol=1e-6):
                raise Refuse("an expert product adds something that is not the expert's bias", contraction.node)
