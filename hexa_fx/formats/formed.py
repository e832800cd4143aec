"""Stand-ins for weights: operators that know them read what they hold, everything else gets the tensor that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hexa_fx.formats import format_of


class Formed:
    """A weight that is formed where something asks for it that does not know the class, a dataclass."""

    def dense(self) -> Tensor:
        """The tensor that it stands for."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*map(_formed, args), **{name: _formed(value) for name, value in (kwargs or {}).items()})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in type(self).__dataclass_fields__:  # type: ignore[attr-defined]  # of one that is being made
            raise AttributeError(name)
        return getattr(self.dense(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.dense()[index]


def _formed(value: Any) -> Any:
    if isinstance(value, Formed):
        return value.dense()
    return type(value)(map(_formed, value)) if type(value) in (list, tuple) else value


@dataclass(frozen=True, eq=False)
class PackedStack(Formed):
    """A `QuantizedWeight` (E, ., .) that is made while a compiler traces, which cannot look into one.

    Args: as those of `hexa_fx.formats.quantized_weight.QuantizedWeight`.
    """

    packed: Tensor
    scales: tuple[Tensor, ...]
    format: str
    dtype: torch.dtype
    transposed: bool = False

    def dense(self) -> Tensor:
        read = format_of(self.format).expert
        matrices = torch.stack([read(self.packed, self.scales, n, self.dtype) for n in range(self.packed.shape[0])])
        return matrices.transpose(1, 2) if self.transposed else matrices
