"""What a combine holds besides the weighted expert products."""

from __future__ import annotations

import torch

from hexa_fx.passes.detect.combine import Combine
from hexa_fx.passes.detect.routing import Pairs
from hexa_fx.passes.detect.stacks import WeightTable
from hexa_fx.passes.detect.verdict import Refuse


def explain_offset(
    pairs: Pairs, down_bias: str | None, combine: Combine, source: torch.Tensor, weights: WeightTable
) -> torch.Tensor | None:
    """What the combine holds without the products: the weighted biases, or the tokens themselves times a factor.

    Returns:
        None, or the factor (T,) with which identity ("zero-computation") experts add the token.
    """
    offset = combine.offset
    expected = torch.zeros_like(offset)
    if down_bias is not None and bool((offset != 0).any()):
        vectors = weights.vectors(down_bias)
        if vectors is None:
            raise Refuse("an expert parameter after the second projection is not a bias vector", combine.node)
        expected.index_add_(0, pairs.token, pairs.after[:, None] * vectors[pairs.expert])
    if torch.allclose(offset, expected, rtol=1e-6, atol=1e-6):
        return None
    x = source.reshape(-1, source.shape[-1])
    if x.shape == offset.shape:
        factor = (offset * x).sum(1) / (x * x).sum(1).clamp(min=1e-300)
        if torch.allclose(offset, factor[:, None] * x, rtol=1e-6, atol=1e-6):
            return factor
    raise Refuse("the combined output contains something besides the weighted expert outputs", combine.node)
