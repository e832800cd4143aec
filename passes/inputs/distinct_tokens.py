"""Replaces example inputs whose tokens cannot be told apart by ones whose tokens can.

People first try zeros, ones, a repeated sentence or a single token; an untrained model may give NaN. Equal tokens all go to the
same experts, so that one cannot see which row went where. Since a block is a function of its inputs, it is recorded on others of
the same kind instead: random tokens of the example's scale, with random routings if the inputs contain a routing. Masks, positions
and everything else stay as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hexa_fx.capture.observe import Observation
from hexa_fx.passes.detect.combine import APART, NO_SUM
from hexa_fx.passes.detect.steps import ONE_RAN
from hexa_fx.passes.detect.tags import expert_groups
from hexa_fx.passes.inputs.fresh_inputs import FreshInputs
from hexa_fx.torch_private import _ConvNd

FEW = 4
"""Fewer tokens than this may show too little of the block."""

_ENOUGH = 16
_FOR_ALL = 16
"""Sequences of two tokens for each expert, so that every one gets some."""
_SAME = 1e-5
_NOTHING = 1e-6
"""Of the largest row: what experts make of less is lost in rounding."""
_LOOKED_AT = 512


def examples(observation: Observation) -> Iterator[Observation]:
    """The observation, or if its tokens are alike or few others like it with fresh tokens; the most telling one first.

    Sequences of one token do not show whether something is computed for each token or for each sequence: then others are next.
    """
    rows = _rows(observation)
    if rows is None or not len(rows):
        yield observation
        return
    few = len(rows) < FEW
    if few or number_alike(rows):
        yield from [*_with_fresh_tokens(observation, few), observation]
        return
    yield observation
    matrix = _matrix(observation)
    if matrix is not None and matrix.dim() > 2 and matrix.shape[-2] == 1:
        yield from _with_fresh_tokens(observation, few=True)


def after_refusal(reason: str, observation: Observation, differs: bool = False) -> Iterator[Observation]:
    """Others with enough tokens to reach more than one expert, if the ``reason`` is that one alone ran, or all of them, if what was
    found ``differs`` from the block: code may do something for experts that got no tokens. Or without masked tokens, be it by ones
    or by zeros: those that are set to zero are alike. In another each token is a sequence of its own: what holds for a whole
    sequence lies beside its tokens in equal rows, which tell nothing apart.
    """
    if reason == NO_SUM and any(map(_is_mask, _tensors(observation))):
        yield from (_with_masks(observation, number) for number in (1, 0))
    if reason == ONE_RAN:
        yield from islice(_with_fresh_tokens(observation, few=True), 1)
    matrix, experts = _matrix(observation), number_of_experts(observation.module) or 0
    if matrix is None:
        return
    if reason == APART and any(_is_of_sequences(t, matrix) for t in _tensors(observation)):
        size = max(_ENOUGH, experts), 1
    elif differs and min(t.shape[:-1].numel() for t in _matrices(observation)) < _FOR_ALL * experts:
        size = _FOR_ALL * experts, 2  # what may choose experts: tokens, or something given for a sequence
    else:
        return
    for known in (experts or None, None):  # numbers that look like a routing may be of tasks, of which there are fewer
        inputs = FreshInputs(observation.args, observation.kwargs, known, seed=13)
        args, kwargs = inputs.at(*size, matrix.dtype)
        yield replace(observation, args=args, kwargs=kwargs)
        if not inputs.given_routing:
            return


def _is_mask(tensor: torch.Tensor) -> bool:
    ones = tensor == 1
    return bool(ones.any()) and not bool(ones.all()) and bool((ones | (tensor == 0)).all())


def _with_masks(observation: Observation, number: int) -> Observation:
    """The same with masks of one number, whose other number may be of what is masked."""

    def filled(tensor: torch.Tensor) -> torch.Tensor:
        return torch.full_like(tensor, number) if _is_mask(tensor) else tensor

    args, kwargs = pytree.tree_map_only(torch.Tensor, filled, (observation.args, observation.kwargs))
    return replace(observation, args=args, kwargs=kwargs)


def _is_of_sequences(tensor: torch.Tensor, tokens: torch.Tensor) -> bool:
    """Whether a tensor may hold a row of floats for each sequence of ``tokens``, (B, S, D)."""
    floats = tensor.is_floating_point() and 2 <= tensor.dim() <= tokens.dim() and tokens.dim() > 2
    return floats and tensor.shape[0] == tokens.shape[0] and tensor.shape[:-1].numel() < tokens.shape[:-1].numel()


def mostly_alike(observation: Observation) -> bool:
    """Whether at least half of the tokens equal other tokens."""
    rows = _rows(observation)
    return rows is not None and len(rows) > 0 and 2 * number_alike(rows) >= len(rows)


def all_differ(observation: Observation) -> bool:
    """Whether no two tokens are alike, so that a refusal is the code's own."""
    rows = _rows(observation)
    return rows is None or not number_alike(rows)


def number_alike(rows: torch.Tensor) -> int:
    """How many rows (R, D) have the direction of an earlier one, up to rounding, are next to zero, as padding is, or not finite."""
    size = rows.norm(dim=1, keepdim=True)
    scaled = rows / size.clamp(min=1e-30)
    near = torch.cdist(scaled, scaled) <= _SAME
    shows = size.isfinite() & (size > _NOTHING * size.nan_to_num(0, 0, 0).max())
    return int((near.tril(-1).any(1) | ~shows[:, 0]).sum())


def has_no_tokens(observation: Observation) -> bool:
    """Whether the first matrix of floats that the block is given has no rows."""
    first = _matrix(observation)
    return first is not None and first.numel() == 0


def _rows(observation: Observation) -> torch.Tensor | None:
    """The rows (R, D) of the first matrix of floats, or the series of (B, L, 1); else, if the block looks integers up, these."""
    tensors, matrix = [t for t in _tensors(observation) if t.numel()], _matrix(observation)
    if matrix is not None:
        is_series = matrix.dim() > 2 and matrix.shape[-1] == 1  # rows of one number all have its direction
        rows = matrix.detach().reshape(-1, matrix.shape[-2 if is_series else -1])
    elif _vocabulary(observation.module) is not None and tensors and tensors[0].dtype != torch.bool:
        ids = tensors[0].detach().reshape(-1, 1)
        rows = torch.cat([ids, torch.ones_like(ids)], 1)
    else:
        return None
    return rows[:: max(1, len(rows) // _LOOKED_AT)].double()


def _tensors(observation: Observation) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves((observation.args, observation.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_complex()]


def _matrices(observation: Observation) -> list[torch.Tensor]:
    return [leaf for leaf in _tensors(observation) if leaf.dim() >= 2 and leaf.is_floating_point()]


def _matrix(observation: Observation) -> torch.Tensor | None:
    """The first matrix of floats, the very one that the block is given."""
    return next(iter(_matrices(observation)), None)


def _with_fresh_tokens(observation: Observation, few: bool) -> Iterator[Observation]:
    """Inputs in the example's shape, and with enough tokens to reach the experts; the latter first if there are few."""
    experts = number_of_experts(observation.module)
    inputs = FreshInputs(observation.args, observation.kwargs, experts, seed=13)
    enough = (2, max(_ENOUGH, experts or 0) // 2)
    for size in (enough, None) if few else (None, enough):
        made = inputs.with_fresh_tokens(size, _vocabulary(observation.module))
        if made is not None:
            yield replace(observation, args=made[0], kwargs=made[1])


def number_of_experts(block: nn.Module) -> int | None:
    """The most frequent length of lists of like-shaped parameters and of stacked ones, filters aside; None if there are none."""
    parameters = dict(block.named_parameters(remove_duplicate=False))
    lengths = [len(names) for names in expert_groups(parameters).members.values()]
    owners = (module for module in block.modules() if not isinstance(module, _ConvNd))
    lengths += [own.shape[0] for module in owners for own in module.parameters(recurse=False) if own.dim() >= 3]
    return max(Counter(lengths).items(), key=lambda item: item[::-1])[0] if lengths else None


def _vocabulary(block: nn.Module) -> int | None:
    """Rows of the smallest embedding: the bound of integers that are looked up."""
    return min((m.num_embeddings for m in block.modules() if isinstance(m, nn.Embedding)), default=None)
