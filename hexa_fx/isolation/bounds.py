"""What names in code lead to outside of a block, as one condition: by the very objects that hold it."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hexa_fx.ir import PythonRead
from hexa_fx.isolation.held_objects import MISSING
from hexa_fx.isolation.lookup import CALLED, lookup
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
        holder: the object, or what finds it in another process.
        key: see `hexa_fx.isolation.lookup.place`.
        value: what lay there; an object has to lie there itself. `MISSING` in another process.
        noted: what `snapshot` makes of it.
    """

    holder: Any
    key: Any
    value: Any
    noted: Any

    def found(self) -> Any:
        """The holder; `MISSING` if it is not known in this process."""
        return self.holder.found() if isinstance(self.holder, (Moved, Reached)) else self.holder

    def is_as(self, now: Any) -> bool:
        """Whether what lies there now is what did."""
        if isinstance(now, types.MethodType):  # of a class, bound anew each time
            return bool(now == self.value)
        if isinstance(self.noted, (IsA, Keys)) and now is not self.value and self.value is not MISSING:
            return False
        return alike(now, self.noted)

    def __str__(self) -> str:
        if isinstance(self.holder, Reached):
            return f"{self.holder.via}.{self.key}"
        above = self.holder.name if isinstance(self.holder, Moved) else name_of(self.holder)
        return f"torch.{above}()" if self.key == CALLED else f"{above}.{self.key}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Bound:
        return self


@dataclass(frozen=True)
class Reached:
    """Stands in a pickle for an object without a name of its own: what lies where another condition looks."""

    via: Bound

    def found(self) -> Any:
        """The object; `MISSING` if it is not there."""
        return lookup(self.via.found(), self.via.key)


@dataclass(frozen=True)
class Code:
    """What the names in the code that ran lead to outside of the block."""

    bounds: tuple[Bound, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        of = {id(bound.value): bound for bound in self.bounds}
        return Code, (tuple(_moved(bound, of, frozenset()) for bound in self.bounds),)


def _moved(bound: Bound, of: Mapping[int, Bound], below: frozenset[int]) -> Bound:
    """A condition for another process. ``of``: conditions by what lies there; ``below``: those that this one is looked for."""
    holder = bound.holder
    if not isinstance(holder, (Moved, Reached)):
        named, via = Moved.of(holder), of.get(id(holder))
        reached = via is not None and named.found() is not holder and id(holder) not in below
        holder = Reached(_moved(via, of, below | {id(holder)})) if via is not None and reached else named
    return Bound(holder, bound.key, MISSING, movable(bound.noted))


def gradients_asked(reads: Iterable[PythonRead]) -> Any:
    """What code was told that asks whether gradients are on, as `gradients_state` gives it; None if none does."""
    bounds = (bound for read in reads if isinstance(read.value, Code) for bound in read.value.bounds)
    return next((bound.noted for bound in bounds if bound.key == CALLED and bound.found() is gradients_state), None)


def values_of(read: PythonRead) -> list[Any]:
    """What was read, each for itself."""
    return [bound.noted for bound in read.value.bounds] if isinstance(read.value, Code) else [read.value]
