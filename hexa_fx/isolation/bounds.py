"""What names in code lead to outside of a block, as one condition: by the very objects that hold it."""

from __future__ import annotations

import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hexa_fx.ir import PythonRead
from hexa_fx.isolation.lookup import CALLED
from hexa_fx.isolation.read_values import IsA, Keys, Moved, alike, movable
from hexa_fx.isolation.torch_state import gradients_state


def name_of(holder: Any) -> str:
    """What an object is called in a sentence."""
    named = isinstance(holder, (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType))
    return str(holder.__name__ if named else type(holder).__name__)


@dataclass(frozen=True)
class Bound:
    """What lies at a key of an object that is no part of the block: a Python module, a class, a function, or what these hold.

    Args:
        holder: the object, or `Moved` in its place.
        key: see `hexa_fx.isolation.lookup.place`.
        value: what lay there; an object has to lie there itself.
        noted: what `snapshot` makes of it.
    """

    holder: Any
    key: Any
    value: Any
    noted: Any

    def found(self) -> Any:
        """The holder; `MISSING` if it is not known in this process."""
        return self.holder.found() if isinstance(self.holder, Moved) else self.holder

    def is_as(self, now: Any) -> bool:
        """Whether what lies there now is what did."""
        if isinstance(now, types.MethodType):  # of a class, bound anew each time
            return bool(now == self.value)
        if isinstance(self.noted, (IsA, Keys)) and now is not self.value:
            return False
        return alike(now, self.noted)

    def __str__(self) -> str:
        above = self.holder.name if isinstance(self.holder, Moved) else name_of(self.holder)
        return f"torch.{above}()" if self.key == CALLED else f"{above}.{self.key}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Bound:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        holder = self.holder if isinstance(self.holder, Moved) else Moved.of(self.holder)
        return Bound, (holder, self.key, None, movable(self.noted))


@dataclass(frozen=True)
class Code:
    """What the names in the code that ran lead to outside of the block."""

    bounds: tuple[Bound, ...]


def gradients_asked(reads: Iterable[PythonRead]) -> Any:
    """What code was told that asks whether gradients are on, as `gradients_state` gives it; None if none does."""
    bounds = (bound for read in reads if isinstance(read.value, Code) for bound in read.value.bounds)
    return next((bound.noted for bound in bounds if bound.key == CALLED and bound.found() is gradients_state), None)


def values_of(read: PythonRead) -> list[Any]:
    """What was read, each for itself."""
    return [bound.noted for bound in read.value.bounds] if isinstance(read.value, Code) else [read.value]
