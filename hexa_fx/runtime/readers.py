"""What a rewritten block reads in place of listed experts' parameters."""

from __future__ import annotations

from torch import nn

from hexa_fx import registry
from hexa_fx.errors import InputError
from hexa_fx.formats.quantized_weight import QuantizedWeight
from hexa_fx.ir import PackedWeight, RewrittenBlock
from hexa_fx.runtime.listed_experts import ListedExperts
from hexa_fx.runtime.paths import WeightReader, first_parameter
from hexa_fx.sources import linear4bit


def packed_names(rewritten: RewrittenBlock | None) -> tuple[str, ...]:
    """The attributes under which a rewritten forward reads stacked weights."""
    return () if rewritten is None else tuple(weight.name for weight in rewritten.packed)


def readers(block: nn.Module, *blocks: RewrittenBlock | None) -> dict[str, WeightReader]:
    """The readers of all stacked weights of a block's rewritten forwards, by attribute; those that are there stay.

    Raises:
        InputError: the block has such an attribute, or the forwards read different weights under one name.
    """
    weights: dict[str, PackedWeight] = {}
    for weight in (weight for rewritten in blocks if rewritten for weight in rewritten.packed):
        if weights.setdefault(weight.name, weight) != weight:
            raise InputError(f"two forms of the block read different weights as {weight.name!r}; please report this")
        there = vars(block).get(weight.name)
        if isinstance(there, WeightReader) and there.weight != weight:
            raise InputError(f"the block was rewritten before so that {weight.name!r} is another weight")
        if not isinstance(there, WeightReader) and hasattr(block, weight.name):
            raise InputError(
                f"{type(block).__name__} already has an attribute {weight.name!r}, which hexa_fx needs; rename it"
            )
    made = {name: reader_of(block, weight) for name, weight in weights.items()}
    return {name: now for name, now in made.items() if type(vars(block).get(name)) is not type(now)}


def reader_of(block: nn.Module, weight: PackedWeight) -> WeightReader:
    """The reader of a stacked weight, as its parameters are now."""
    if isinstance(first_parameter(block, weight), QuantizedWeight):
        return registry.packed().StackedParts(block, weight)  # type: ignore[no-any-return]
    if reads_codes(block, weight):
        return registry.packed().StackedCodes(block, weight)  # type: ignore[no-any-return]
    return ListedExperts(block, weight)


def reads_codes(block: nn.Module, weight: PackedWeight) -> bool:
    """Whether a weight is one of 4-bit parameters."""
    return linear4bit.is_four_bit(first_parameter(block, weight))
