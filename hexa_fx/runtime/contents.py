"""What lists, dicts and objects contain, to see whether code changed them in place and to put it back.

Modules hold them beside their parameters (``self.losses.append(loss)``), and code reaches them by global names.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hexa_fx.runtime.held import MODULE_STATE, PLAIN, is_object

_DEEPEST = 4
_MOST = 4096


@dataclass(frozen=True)
class Holder:
    """A list, dict, set, deque, class or object, and the way there in words."""

    label: str
    value: Any


class Contents:
    """The contents of ``holders`` as they are now."""

    def __init__(self, holders: Iterable[Holder]) -> None:
        self._before = [(holder, contents(holder.value)) for holder in holders]

    def changed(self) -> list[tuple[Holder, list[Any]]]:
        """Holders that contain something else now, and what is new in them."""
        found = []
        for holder, before in self._before:
            now = contents(holder.value)
            if not _same(before, now):
                old = {id(value) for _, value in before}
                found.append((holder, [value for _, value in now if id(value) not in old]))
        return found

    def items(self) -> Iterator[Any]:
        """What the holders contained then."""
        for _, before in self._before:
            yield from (value for _, value in before)

    def restore(self, wanted: Callable[[Holder], bool] = lambda holder: True) -> None:
        """Puts back what is not as it was."""
        for holder, before in self._before:
            if wanted(holder) and not _same(before, contents(holder.value)):
                _put_back(holder.value, before)


def held_by_modules(module: nn.Module) -> Iterator[Holder]:
    """What the module and those in it hold besides tensors and modules, and what is inside it; each once."""
    seen: set[int] = set()
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            if name not in MODULE_STATE and is_object(value):
                yield from _inside(f"{path or 'self'}.{name}", value, seen)


def _inside(name: str, value: Any, seen: set[int]) -> Iterator[Holder]:
    left: deque[tuple[int, str, Any]] = deque([(1, name, value)])
    while left and len(seen) < _MOST:
        depth, label, holder = left.popleft()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        if not isinstance(holder, (tuple, frozenset)):
            yield Holder(label, holder)
        if depth < _DEEPEST:
            left.extend((depth + 1, _step(label, key), item) for key, item in contents(holder) if is_object(item))


def _step(label: str, key: Any) -> str:
    return f"{label}.{key}" if isinstance(key, str) else f"{label}[{key}]"


def contents(holder: Any) -> list[tuple[Any, Any]]:
    """Keys and values. A class's and an object's are attributes.

    Methods of the user's own kind of dict or list are not called: they may compute what they give.
    """
    if isinstance(holder, dict):
        return list(dict.items(holder))
    if isinstance(holder, list):
        return list(enumerate(list.__iter__(holder)))
    if isinstance(holder, (tuple, deque)):
        return list(enumerate(holder))
    if isinstance(holder, (set, frozenset)):
        return [(id(item), item) for item in holder]
    return list(getattr(holder, "__dict__", {}).items())


def _same(before: list[tuple[Any, Any]], now: list[tuple[Any, Any]]) -> bool:
    if len(before) != len(now):
        return False
    return all(a is b or (_plain(a) and type(a) is type(b) and a == b) for (_, a), (_, b) in zip(before, now))


def _plain(value: Any) -> bool:
    return isinstance(value, PLAIN) and not isinstance(value, torch.Tensor)


def _put_back(holder: Any, before: list[tuple[Any, Any]]) -> None:
    if isinstance(holder, list):
        holder[:] = [value for _, value in before]
    elif isinstance(holder, (deque, set)):
        holder.clear()
        (holder.extend if isinstance(holder, deque) else holder.update)(value for _, value in before)
    elif isinstance(holder, type):
        _put_attributes_back(holder, dict(before))
    else:
        content, old = holder if isinstance(holder, dict) else vars(holder), dict(before)
        for key in [key for key in dict.keys(content) if key not in old]:
            dict.__delitem__(content, key)
        dict.update(content, old)


def _put_attributes_back(cls: type, before: dict[str, Any]) -> None:
    for name in vars(cls).keys() - before.keys():
        delattr(cls, name)
    for name, value in before.items():
        if vars(cls).get(name) is not value and not isinstance(value, types.GetSetDescriptorType):
            setattr(cls, name, value)
