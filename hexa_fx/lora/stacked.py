"""Low-rank additions of many linear layers, stacked as one addition to the weight that the layers' weights are stacked as."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional as F

from hexa_fx.formats.adapted_weight import AdaptedWeight
from hexa_fx.ir import PackedWeight
from hexa_fx.ops.listed import Listed, dense
from hexa_fx.ops.sources import row_norms
from hexa_fx.runtime.guards import GuardMiss
from hexa_fx.runtime.listed_experts import ListedExperts
from hexa_fx.torch_private import without_autocast


class Low(NamedTuple):
    """An adapter of one layer: ``scale * B(A(x))``, and of DoRA a module with the norms that rows of the sum are to have.

    path: of PEFT's module.
    scale: see `is_scale`.
    """

    path: str
    name: str
    a: nn.Linear
    b: nn.Linear
    scale: Any
    norms: Any = None


def is_scale(value: Any) -> bool:
    """Whether a product is multiplied by a number, or by a tensor of one, as PEFT has it in models whose adapters it exchanges."""
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.dim() == 0)


class AdaptedReader:
    """A stacked weight that is read with additions."""

    def __init__(self, weight: Callable[..., Any], additions: Sequence[Addition]) -> None:
        self.weight, self.additions = weight, additions

    def __call__(self) -> AdaptedWeight:
        base = self.weight()
        with (
            nullcontext() if is_compiling() else without_autocast()
        ):  # which refuses the other 16-bit dtype in torch.cat
            return self._added_to(base)

    def _added_to(self, base: Any) -> AdaptedWeight:
        if any(addition.norms is not None for addition in self.additions):
            return self._normed(base)
        if len(self.additions) == 1:
            a, c, scale = self.additions[0].factors()
            return AdaptedWeight(base, c, a, scale)
        factors = [addition.factors() for addition in self.additions]
        wide = torch.cat([c if scale == 1 else c * scale for _, c, scale in factors], 2)
        return AdaptedWeight(base, wide, torch.cat([a for a, _, _ in factors], 1))

    def _normed(self, base: Any) -> AdaptedWeight:
        """What is active, one after the other: DoRA scales the rows of all before it. Norms that these have get no gradient."""
        left, right, row_scale = list[Tensor](), list[Tensor](), None
        for addition in self.additions:
            a, c, scale = addition.factors()
            left, right = [*left, c * scale], [*right, a]
            if addition.norms is not None:
                now = row_norms(base, a, left[-1])[:, addition.above : base.shape[1] - addition.below]
                own = F.pad(addition.norms(now) / now, (addition.above, addition.below), value=1.0)
                left = [each * own[..., None] for each in left]
                row_scale = own if row_scale is None else row_scale * own
        return AdaptedWeight(base, torch.cat(left, 2), torch.cat(right, 1), row_scale=row_scale)


class Addition(NamedTuple):
    """An adapter on one part of a stacked weight.

    Args:
        a, b: give (E, r, K) and (E, rows of the part, r).
        scale: what their product is multiplied by.
        above, below: rows of the other parts.
        norms: gives of (E, rows) norms that rows of the sum have those that they are to have; None: these.
    """

    a: Callable[[], Tensor | Listed]
    b: Callable[[], Tensor | Listed]
    scale: float
    above: int
    below: int
    norms: Callable[[Tensor], Tensor] | None = None

    def factors(self) -> tuple[Tensor, Tensor, float]:
        """(E, r, K), (E, N, r) and what their product is multiplied by."""
        b = dense(self.b())
        return dense(self.a()), F.pad(b, (0, 0, self.above, self.below)) if self.above or self.below else b, self.scale


def additions(block: nn.Module, parts: Sequence[Sequence[Sequence[Low]]], rows: Sequence[int]) -> Iterator[Addition]:
    """One for each part of a stacked weight and each adapter on it.

    Args:
        block: what paths start from.
        parts: adapters of every expert, of each part (one, or gate and up).
        rows: of each part of an expert's weight.
    """
    for place, part in enumerate(parts):
        around = sum(rows[:place]), sum(rows[place + 1 :])
        names = list(dict.fromkeys(low.name for layer in part for low in layer))
        orders = {tuple(low.name for low in layer) for layer in part}
        if any(sorted(order, key=names.index) != [*order] for order in orders) and _has_norms(part):
            raise GuardMiss(
                "adapters are active in another order on some experts, and with DoRA that makes a difference"
            )
        for name in names:
            low = [next((low for low in layer if low.name == name), None) for layer in part]
            addition = _addition(block, name, low, around)
            yield addition._replace(norms=partial(_norms, low)) if _has_norms([[*filter(None, low)]]) else addition


def _has_norms(layers: Sequence[Sequence[Low]]) -> bool:
    return any(low.norms is not None for layer in layers for low in layer)


def _norms(low: Sequence[Low | None], now: Tensor) -> Tensor:
    """(E, rows) that rows are to have; of experts without the adapter what they have."""
    rows = zip(low, now, strict=True)
    return torch.stack([has if each is None or each.norms is None else each.norms.weight.to(has) for each, has in rows])


def _addition(block: nn.Module, name: str, low: Sequence[Low | None], around: tuple[int, int]) -> Addition:
    given = [each for each in low if each is not None and not isinstance(each.scale, Tensor)]
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


def _stacked(block: nn.Module, paths: Sequence[str]) -> ListedExperts:
    return ListedExperts(block, PackedWeight(paths[0], (tuple(paths),)))


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
