"""Example inputs whose tokens can be told apart, in place of ones whose tokens cannot.

Zeros, ones, a repeated sentence and a single token are what people try first. Equal tokens all go to the same experts, and which
row went where cannot be seen. What a block does is a function of its inputs alone, so it is recorded on others of the same kind:
random tokens of the example's scale, with random routings where the block is given its routing. Masks, positions and
whatever else it is given stay as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hexa_fx.capture.observe import Observation
from hexa_fx.passes.detect.tags import expert_groups
from hexa_fx.passes.fresh_inputs import FreshInputs

FEW = 4
"""Fewer tokens than this may show too little of the block."""

_ENOUGH = 16
_SAME = 1e-5
_LOOKED_AT = 512


def examples(observation: Observation) -> Iterator[Observation]:
    """The observation and, where its tokens are alike or few, others like it with fresh tokens; the most telling one first.

    Args:
        observation: with at most as many tokens as the block is to be recorded on.
    """
    rows = _rows(observation)
    if rows is None or not len(rows):
        yield observation
        return
    alike = number_alike(rows)
    few = len(rows) < FEW
    if alike or few:
        fresh = list(_with_fresh_tokens(observation, few))
        yield from [*fresh, observation] if few or 2 * alike >= len(rows) else [observation, *fresh]
    else:
        yield observation


def mostly_alike(observation: Observation) -> bool:
    """Whether half of the tokens or more are equal to other tokens."""
    rows = _rows(observation)
    return rows is not None and len(rows) > 0 and 2 * number_alike(rows) >= len(rows)


def number_alike(rows: torch.Tensor) -> int:
    """How many rows (R, D) have the direction of an earlier one, but for rounding."""
    scaled = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-30)
    near = torch.cdist(scaled, scaled) <= _SAME
    return int(near.tril(-1).any(1).sum())


def _rows(observation: Observation) -> torch.Tensor | None:
    """The rows (R, D) of the first matrix of floats, else all integers as (R, 1) when the block looks them up."""
    leaves = pytree.tree_leaves((observation.args, observation.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.numel() and not leaf.is_complex()]
    matrices = [leaf for leaf in tensors if leaf.dim() >= 2 and leaf.is_floating_point()]
    if matrices:
        rows = matrices[0].detach().reshape(-1, matrices[0].shape[-1])
    elif _vocabulary(observation.module) is not None and tensors and tensors[0].dtype != torch.bool:
        ids = tensors[0].detach().reshape(-1, 1)
        rows = torch.cat([ids, torch.ones_like(ids)], 1)
    else:
        return None
    return rows[:: max(1, len(rows) // _LOOKED_AT)].double()


def _with_fresh_tokens(observation: Observation, few: bool) -> Iterator[Observation]:
    """In the example's shape, and with enough tokens to reach the experts; that first where there are few."""
    experts = number_of_experts(observation.module)
    inputs = FreshInputs(observation.args, observation.kwargs, experts, seed=13)
    enough = (2, max(_ENOUGH, experts or 0) // 2)
    for size in (enough, None) if few else (None, enough):
        made = inputs.with_fresh_tokens(size, _vocabulary(observation.module))
        if made is not None:
            yield replace(observation, args=made[0], kwargs=made[1])


def number_of_experts(block: nn.Module) -> int | None:
    """The most frequent length of lists of like parameters and of stacked ones; None without any."""
    parameters = dict(block.named_parameters(remove_duplicate=False))
    lengths = [len(names) for names in expert_groups(parameters).members.values()]
    lengths += [parameter.shape[0] for parameter in parameters.values() if parameter.dim() >= 3]
    return max(Counter(lengths).items(), key=lambda item: item[::-1])[0] if lengths else None


def _vocabulary(block: nn.Module) -> int | None:
    """Rows of the smallest embedding: what integers that are looked up stay below."""
    return min((m.num_embeddings for m in block.modules() if isinstance(m, nn.Embedding)), default=None)
