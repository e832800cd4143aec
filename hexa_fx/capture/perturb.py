"""Puts random numbers in place of parameters whose elements are all equal, for the time of a recorded run.

New biases are zeros and new norm weights are ones. With them ``x + b`` and ``x * w`` equal ``x``, and the run would not show
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from hexa_fx.isolation.size import is_of_one_number


@contextmanager
def stirred_parameters(parameters: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """A context that yields the new values by name. Parameters keep their identity, and get their own memory back at the end."""
    generator = torch.Generator().manual_seed(2)
    plain = {id(p): p for p in parameters.values() if _is_plain(p)}
    before = {key: parameter.data for key, parameter in plain.items()}
    try:
        for parameter in plain.values():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data = parameter.data + noise.to(parameter.data) / 8
        yield {name: p.data for name, p in parameters.items() if id(p) in plain}
    finally:
        for key, parameter in plain.items():
            parameter.data = before[key]


def _is_plain(value: torch.Tensor) -> bool:
    if type(value) is not nn.Parameter or value.is_meta or not is_of_one_number(value):
        return False
    return value.numel() > 1 or float(value.detach().flatten()[0]) in (0.0, 1.0)
