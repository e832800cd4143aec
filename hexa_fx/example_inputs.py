"""What a user gives as an example of a call, and the arguments that it stands for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch

from hexa_fx.errors import InputError


class Call(NamedTuple):
    """Arguments of a call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


ExampleInputs: TypeAlias = torch.Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]


def call_arguments(example_inputs: ExampleInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of the call that ``example_inputs`` stands for.

    Raises:
        InputError: it is text, or something that yields examples, such as a data loader.
    """
    if isinstance(example_inputs, torch.utils.data.DataLoader | Iterator):
        raise InputError(
            f"example_inputs is a {type(example_inputs).__name__}; expected what the model is called with once, such as "
            "next(iter(loader))"
        )
    if isinstance(example_inputs, str):
        raise InputError(
            f"example_inputs is {example_inputs!r}; expected a tensor, a tuple of positional arguments, or a mapping of keywords"
        )
    if isinstance(example_inputs, Call):
        return example_inputs
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    return (example_inputs,), {}
