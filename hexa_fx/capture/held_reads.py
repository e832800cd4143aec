"""Finds the values that a run reads from objects held by modules, such as ``self.config.top_k``.

A recorded graph contains them as plain numbers. While the block runs, the classes of these objects note which attributes are
read. Built-in types (dicts, lists, ``SimpleNamespace``) cannot be made to, so everything they hold counts as read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hexa_fx.ir import HeldValue
from hexa_fx.isolation.held_objects import (
    MISSING,
    MODULE_STATE,
    Steps,
    frozen,
    is_collection,
    is_object,
    items,
    objects_in,
    step,
)
from hexa_fx.runtime.reads import read_by_forward

_OWN_CLASS, _CANNOT_CHANGE = 1 << 9, 1 << 8  # Py_TPFLAGS_HEAPTYPE, Py_TPFLAGS_IMMUTABLETYPE


class HeldReads:
    """The objects that a block's modules hold, and what a run reads of them.

    Args:
        block: the module that will run.
    """

    def __init__(self, block: nn.Module) -> None:
        self._ways = [
            (path, steps, value)
            for path, module in block.named_modules()
            for steps, value in objects_in(module, functools.partial(is_mentioned, module))
        ]
        self._objects = {id(value): value for _, _, value in self._ways}
        self._before = {i: dict(items(value)) for i, value in self._objects.items() if not _can_note(value)}
        self._whole = {i: frozen(value) for i, value in self._objects.items() if is_collection(value)}
        self._noted: dict[int, dict[str, Any]] = {}

    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors in these objects, which are neither parameters nor buffers."""
        for value in self._objects.values():
            yield from (item for item in items(value).values() if isinstance(item, torch.Tensor))

    @contextmanager
    def noted(self) -> Iterator[None]:
        """A context in which reads are noted, each with the value at the first read."""
        classes = {type(value): None for value in self._objects.values() if _can_note(value)}
        before = {cls: vars(cls).get("__getattribute__") for cls in classes}
        for cls in classes:
            type.__setattr__(cls, "__getattribute__", self._noting(cls.__getattribute__))
        try:
            yield
        finally:
            for cls, own in before.items():
                if own is None:
                    type.__delattr__(cls, "__getattribute__")
                else:
                    type.__setattr__(cls, "__getattribute__", own)

    def values(self) -> tuple[HeldValue, ...]:
        """What was read, once for every path from a module whose code mentions the object."""
        found: dict[tuple[str, Steps], HeldValue] = {}
        reached: dict[str, set[Steps]] = {}
        for path, steps, holder in self._ways:
            known = reached.setdefault(path, set())
            if len(steps) > 1 and steps not in known:
                continue
            whole = self._whole.get(id(holder), MISSING)
            if whole is not MISSING:
                found[path, steps] = HeldValue(path, steps, whole)
                continue
            if callable(holder):  # its class decides what it does
                found[path, (*steps, "__class__")] = HeldValue(path, (*steps, "__class__"), type(holder))
            for key, value in self._read(holder):
                plain = frozen(value)
                if plain is not MISSING or value is MISSING:
                    found[path, (*steps, key)] = HeldValue(path, (*steps, key), plain)
                elif is_object(value):
                    known.add((*steps, key))
        return tuple(found.values())

    def _read(self, holder: Any) -> Iterator[tuple[Any, Any]]:
        if _can_note(holder):
            for name, value in self._noted.get(id(holder), {}).items():
                if not isinstance(
                    getattr(type(holder), name, None), property
                ):  # the attributes it reads are noted themselves
                    yield name, step(holder, name) if value is MISSING else value
            return
        yield from self._before[id(holder)].items()

    def _noting(self, plain: Callable[..., Any]) -> Callable[[Any, str], Any]:
        objects, noted = self._objects, self._noted

        def __getattribute__(holder: Any, name: str) -> Any:
            value: Any = MISSING
            try:
                value = plain(holder, name)
                return value
            finally:
                if id(holder) in objects and not name.startswith("__"):
                    copy = frozen(value) if is_collection(value) else MISSING
                    noted.setdefault(id(holder), {}).setdefault(name, value if copy is MISSING else copy)

        return __getattribute__


def is_mentioned(module: nn.Module, name: str) -> bool:
    """Whether code of the module's forward mentions this attribute, as far as can be seen."""
    if name in MODULE_STATE:
        return False
    return "forward" in vars(module) or name in read_by_forward(type(module))  # type: ignore[arg-type]


def _can_note(value: Any) -> bool:
    flags = type(value).__flags__
    return bool(flags & _OWN_CLASS and not flags & _CANNOT_CHANGE) and not is_collection(value)
