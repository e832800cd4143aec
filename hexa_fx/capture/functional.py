"""Functions that recorded graphs call where torch.fx has no expression for what happened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def set_item(tensor: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    """``tensor[index] = value`` as an expression that returns the written tensor, so that later reads depend on the write."""
    tensor[index] = value
    return tensor


def after(tensor: torch.Tensor, _write: Any) -> torch.Tensor:
    """Returns ``tensor`` unchanged. Orders a read after a write through another alias of the same memory."""
    return tensor


def row_dropout(rows: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Stands for a dropout that draws random numbers, in a run in which it drops nothing."""
    return rows.clone()


class WithoutAutocast:
    """A call with autocast off, as a target of a graph.

    Args:
        target: a function, or the name of a method.
        device: the kind of device.
    """

    def __init__(self, target: Callable[..., Any] | str, device: str) -> None:
        self.target, self.device = target, device
        name = target if isinstance(target, str) else getattr(target, "__name__", "call")
        self.__name__ = self.__qualname__ = f"{name}_without_autocast"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device, enabled=False):
            if isinstance(self.target, str):
                return getattr(args[0], self.target)(*args[1:], **kwargs)
            return self.target(*args, **kwargs)


class Applied:
    """``function.apply`` as a target of a graph: unlike the bound method it has an import path, so it can be written as code.

    Args:
        function: a user's `torch.autograd.Function`.
    """

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        self.function = function
        self.__name__ = self.__qualname__ = f"apply_{function.__name__}"

    def __call__(self, *args: Any) -> Any:
        return self.function.apply(*args)
