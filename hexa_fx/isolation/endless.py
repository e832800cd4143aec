"""Ends runs of the user's code that do not end by themselves: a loop may wait for numbers that made-up inputs never reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode

MOST_CALLS = 200_000
"""Of torch's functions in one run: what a loop over thousands of tokens, one by one, stays below."""


class Endless(RuntimeError):
    """A run of a block's own code was ended."""


def end_after(calls: int) -> None:
    """Raises `Endless` once code has made more calls than it may."""
    if calls > MOST_CALLS:
        raise Endless(
            f"its own code had not ended after {MOST_CALLS} calls of torch, as in a loop that waits for numbers"
        )


class Bounded(TorchFunctionMode):
    """A mode under which code may call torch's functions so often, and no more: then it raises `Endless`."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._calls += 1
        end_after(self._calls)
        return func(*args, **(kwargs or {}))
