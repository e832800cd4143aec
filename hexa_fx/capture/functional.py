"""Functions that recorded graphs call where torch.fx has no expression for what happened."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
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


class Applied:
    """``function.apply`` as a target of a graph: unlike the bound method it has an import path, so it can be written as code."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        self.function = function
        self.__name__ = self.__qualname__ = f"apply_{function.__name__}"

    def __call__(self, *args: Any) -> Any:
        return self.function.apply(*args)


class OfItems:
    """Makes a mapping of a class of its own whose keys are no names, as a target of a graph; a ``defaultdict``'s factory too."""

    def __init__(self, like: dict[Any, Any]) -> None:
        self.kind: Callable[..., dict[Any, Any]] = type(like)
        self.before = (like.default_factory,) if isinstance(like, defaultdict) else ()
        self.__name__ = self.__qualname__ = f"items_of_{type(like).__name__}"

    def __call__(self, items: Mapping[Any, Any]) -> dict[Any, Any]:
        return self.kind(*self.before, items)
