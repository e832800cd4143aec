"""Kinds of calls that were analysed and are left to a block's own code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from hexa_fx.ir import PythonRead
from hexa_fx.runtime.attribute_guards import AttributeGuards
from hexa_fx.runtime.call_kinds import call_kind, call_tokens
from hexa_fx.runtime.guards import GuardMiss, SizeMiss


class RefusedKind:
    """A kind of call, by what it is like and by what its code read, and why it runs the block's own code.

    Args:
        module: the block, which is not kept alive.
        args, kwargs: of the call.
        reason: why it is left.
        reads: what the code read from Python; if it reads something else, the kind is another.
        own_forward: the forward that the block's instance had of its own.
        enough: calls of more tokens than this say as much as any larger one. A smaller call says nothing of larger ones.
        missed: what the sizes of the call did not meet, if that is why it was analysed: it holds for calls of which that is said.
        calls: how many calls it holds for; None for all.
    """

    def __init__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        reason: str,
        reads: Sequence[PythonRead] = (),
        own_forward: Callable[..., Any] | None = None,
        enough: int = 0,
        missed: str = "",
        calls: int | None = None,
    ) -> None:
        self.kind, self.reason = call_kind(bool(module.training), args, kwargs), reason
        self.missed = missed
        tokens = call_tokens(args, kwargs)
        self.tokens = tokens if tokens < enough and not missed else None
        self.attributes = AttributeGuards(module, (), reads, (), own_forward)
        self._left, self.lasted = calls, calls

    @property
    def is_over(self) -> bool:
        """Whether it has held for as many calls as it should."""
        return self._left is not None and self._left <= 0

    def bind(self, module: nn.Module) -> None:
        """Watches ``module`` from now on."""
        self.attributes.bind(module)

    def holds(self, kind: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any], missed: str = "") -> bool:
        """Whether a call, of which ``kind`` is what it is like, is of this kind. Counts it if it is."""
        if self.is_over or self.missed not in ("", missed) or self.kind != kind:
            return False
        if self.tokens is not None and call_tokens(args, kwargs) > self.tokens:
            return False
        try:
            self.attributes.check()
        except GuardMiss:
            return False
        self._left = None if self._left is None else self._left - 1
        return True


def said_of_sizes(miss: GuardMiss | None) -> str:
    """What the sizes of a call did not meet, if that is why a specialisation does not take it."""
    return str(miss) if isinstance(miss, SizeMiss) else ""
