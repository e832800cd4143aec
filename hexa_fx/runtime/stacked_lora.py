"""Low-rank additions of many linear layers, stacked as one addition to the weight that the layers' weights are stacked as."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional as F

from hexa_fx.ir import PackedWeight
from hexa_fx.ops.adapted_weight import AdaptedWeight
from hexa_fx.runtime.packing import PackedExperts


class Low(NamedTuple):
    """An adapter of one layer: ``scale * B(A(x))``. path: of PEFT's module."""

    path: str
    name: str
    a: nn.Linear
    b: nn.Linear
    scale: float


class AdaptedReader:
    """A stacked weight that is read with additions."""

    def __init__(self, weight: Callable[..., Any], additions: Sequence[Addition]) -> None:
        self.weight, self.additions = weight, additions

    def __call__(self, *args: Any) -> AdaptedWeight:
        base = self.weight(*args)
        if len(self.additions) == 1:
            a, c, scale = self.additions[0].factors()
            return AdaptedWeight(base, c, a, scale)
        factors = [addition.factors() for addition in self.additions]
        wide = torch.cat([c if scale == 1 else c * scale for _, c, scale in factors], 2)
        return AdaptedWeight(base, wide, torch.cat([a for a, _, _ in factors], 1))


class Addition(NamedTuple):
    """An adapter on one part of a stacked weight.

    Args:
        a, b: give (E, r, K) and (E, rows of the part, r).
        scale: what their product is multiplied by.
        above, below: rows of the other parts.
    """

    a: Callable[[], Tensor]
    b: Callable[[], Tensor]
    scale: float
    above: int
    below: int

    def factors(self) -> tuple[Tensor, Tensor, float]:
        """(E, r, K), (E, N, r) and what their product is multiplied by."""
        b = self.b()
        return self.a(), F.pad(b, (0, 0, self.above, self.below)) if self.above or self.below else b, self.scale


def additions(block: nn.Module, parts: Sequence[Sequence[Sequence[Low]]], rows: Sequence[int]) -> Iterator[Addition]:
    """One for each part of a stacked weight and each adapter on it.

    Args:
        block: what paths start from.
        parts: adapters of every expert, of each part (one, or gate and up).
        rows: of each part of an expert's weight.
    """
    for place, part in enumerate(parts):
        around = sum(rows[:place]), sum(rows[place + 1 :])
        for name in dict.fromkeys(low.name for layer in part for low in layer):
            low = [next((low for low in layer if low.name == name), None) for layer in part]
            yield _addition(block, name, low, around)


def _addition(block: nn.Module, name: str, low: Sequence[Low | None], around: tuple[int, int]) -> Addition:
    given = [each for each in low if each is not None]
    kinds = {(each.scale, each.a.weight.shape, each.b.weight.shape, each.a.weight.dtype) for each in given}
    alike = len(given) == len(low) and len(kinds) == 1
    if alike and is_compiling():
        stacks = (
            (lambda: torch.stack([each.a.weight for each in given])),
            lambda: torch.stack([each.b.weight for each in given]),
        )
        return Addition(*stacks, given[0].scale, *around)
    if alike and len({id(each.a.weight) for each in given}) == len(given):
        a, b = (
            _stacked(block, [f"{each.path}.{factor}.{name}.weight" for each in given])
            for factor in ("lora_A", "lora_B")
        )
        return Addition(a, b, given[0].scale, *around)
    return Addition(lambda: _padded_a(low), lambda: _padded_b(low), 1.0, *around)


def _stacked(block: nn.Module, paths: Sequence[str]) -> PackedExperts:
    return PackedExperts(block, PackedWeight(paths[0], (tuple(paths),)))


def _padded_a(low: Sequence[Low | None]) -> Tensor:
    """(E, r, K) of adapters of several ranks, with zeros for experts that have none."""
    weights = [None if each is None else each.a.weight for each in low]
    like = next(weight for weight in weights if weight is not None)
    rank = max(len(weight) for weight in weights if weight is not None)
    none = like.new_zeros(rank, like.shape[1])
    return torch.stack([none if weight is None else F.pad(weight, (0, 0, 0, rank - len(weight))) for weight in weights])


def _padded_b(low: Sequence[Low | None]) -> Tensor:
    """(E, N, r), multiplied by the scale of each."""
    weights = [None if each is None else each.b.weight * each.scale for each in low]
    like = next(weight for weight in weights if weight is not None)
    rank = max(weight.shape[1] for weight in weights if weight is not None)
    none = like.new_zeros(like.shape[0], rank)
    return torch.stack([none if weight is None else F.pad(weight, (0, rank - weight.shape[1])) for weight in weights])
