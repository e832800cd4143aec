"""What rows have in common with others, such as their place among them, without asking the host."""

from __future__ import annotations

from typing import Literal

import torch

Order = Literal["by_token", "by_slot"]
"""Token after token, each with all its choices; all first choices, then all second ones."""


def rank_among_equals(keys: torch.Tensor) -> torch.Tensor:
    """For every element of ``keys`` (N,) integers, how many earlier ones are equal to it."""
    order = torch.argsort(keys, stable=True)
    ordered = keys[order]
    index = torch.arange(len(keys), device=keys.device)
    first = torch.cat((torch.ones_like(ordered[:1], dtype=torch.bool), ordered[1:] != ordered[:-1]))
    start = torch.cummax(torch.where(first, index, 0), 0).values
    return torch.empty_like(index).scatter(0, order, index - start)


def ranks_of_choices(ids: torch.Tensor, order: Order) -> torch.Tensor:
    """For every choice of a router, (T, k) integers, how many choices of the same expert come before it in ``order``, int64."""
    if order == "by_slot":
        return rank_among_equals(ids.t().reshape(-1)).reshape(ids.shape[1], ids.shape[0]).t()
    return rank_among_equals(ids.reshape(-1)).reshape(ids.shape)


def ids_of_marks(marks: torch.Tensor, none: int) -> torch.Tensor:
    """(T, E) that is zero but at the experts of every token, as ids (T, E) with ``none`` for the others."""
    return torch.arange(marks.shape[1], device=marks.device).where(marks != 0, none)


def repeated_in_groups(values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """For every one of ``tokens`` (..., D) the value of its group: ``values`` (G, ...) has one for each of G groups of equally many
    tokens, one after the other.
    """
    return values.repeat_interleave(tokens.shape[:-1].numel() // max(len(values), 1), 0)
