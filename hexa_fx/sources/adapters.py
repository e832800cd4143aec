"""Low-rank adapters on parameters of a block, which its rewritten forward reads as factors and not as a sum.

Adapters are active while something around the block says so. The block's own code knows nothing about them, so where it runs, they
are put into its parameters in the adapter library's own way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hexa_fx.formats.adapted_weight import AdaptedWeight


@dataclass(frozen=True)
class Adapter:
    """An adapter that is active on a parameter.

    Args:
        left, right: (E, P, r) and (E, r, Q), of which the product is added to the parameter (E, P, Q).
        scale: what it is multiplied by before.
        in_place: a context in which the parameter itself reads as the sum.
    """

    left: Tensor
    right: Tensor
    scale: float
    in_place: Callable[[], AbstractContextManager[Any]]


class Adapters:
    """The adapters that are active on a block, by the name of the parameter. Copies and pickles of it are empty."""

    def __init__(self) -> None:
        self._active: dict[str, Adapter] = {}

    def __bool__(self) -> bool:
        return len(self._active) > 0

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()

    @contextmanager
    def active(self, name: str, adapter: Adapter) -> Iterator[None]:
        """A context in which an adapter is active."""
        before = self._active.get(name)
        self._active = {**self._active, name: adapter}
        try:
            yield
        finally:
            self._active = {key: value for key, value in self._active.items() if key != name}
            if before is not None:
                self._active[name] = before

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A context in which the parameters themselves read as the sums, and nothing else is active."""
        active, self._active = self._active, {}
        try:
            with ExitStack() as stack:
                for adapter in active.values():
                    stack.enter_context(adapter.in_place())
                yield
        finally:
            self._active = active

    def seen_from(self, module: nn.Module) -> Any:
        """``module`` as a rewritten graph reads it: with adapted weights in place of parameters."""
        weights = {n: AdaptedWeight(getattr(module, n), a.left, a.right, a.scale) for n, a in self._active.items()}
        return View(module, weights)


class View:
    """A module of which some attributes are replaced."""

    def __init__(self, module: nn.Module, replaced: dict[str, Any]) -> None:
        self._module, self._replaced = module, replaced

    def __getattr__(self, name: str) -> Any:
        return self._replaced[name] if name in self._replaced else getattr(self._module, name)
