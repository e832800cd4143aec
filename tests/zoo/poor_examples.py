"""Examples on which tokens cannot be told apart: what people give first."""

from collections.abc import Callable
from typing import Any

import torch

from tests.zoo import families
from tests.zoo.variant import Variant

Call = tuple[tuple[Any, ...], dict[str, Any]]


def good(v: Variant, dtype: torch.dtype) -> Call:
    """The zoo's own: every token is another."""
    return v.inputs(2, 7, dtype, 0)


def zeros(v: Variant, dtype: torch.dtype) -> Call:
    """Every float 0."""
    return _floats(torch.zeros_like, good(v, dtype))


def ones(v: Variant, dtype: torch.dtype) -> Call:
    """Every float 1."""
    return _floats(torch.ones_like, good(v, dtype))


def repeated(v: Variant, dtype: torch.dtype) -> Call:
    """A batch of one sentence, or its tokens one after another and again."""
    return _floats(_twice, good(v, dtype))


def one(v: Variant, dtype: torch.dtype) -> Call:
    """A prompt of one token."""
    return v.inputs(1, 1, dtype, 0)


BY_NAME = {"good": good, "zeros": zeros, "ones": ones, "repeated": repeated, "one": one}


def ids(name: str) -> dict[str, torch.Tensor]:
    """The same for a whole language model: token ids, and labels."""
    if name == "one":
        return families.inputs(1, 1)
    batch = families.inputs(2, 7)
    if name == "zeros":
        return {"input_ids": torch.zeros_like(batch["input_ids"]), "labels": torch.full_like(batch["labels"], 3)}
    if name == "repeated":
        return {key: value[:1].repeat(3, 1) for key, value in batch.items()}
    return batch


def _twice(value: torch.Tensor) -> torch.Tensor:
    if value.dim() > 2:
        return value[:1].expand_as(value).clone()
    half = len(value) // 2
    return torch.cat([value[:half], value[:half], value[2 * half :]])


def _floats(change: Callable[[torch.Tensor], torch.Tensor], call: Call) -> Call:
    def changed(value: Any) -> Any:
        return change(value) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    args, kwargs = call
    return tuple(map(changed, args)), {name: changed(value) for name, value in kwargs.items()}
