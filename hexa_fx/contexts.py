"""Contexts in which something has another value, and after which it has its own again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")


@contextmanager
def set_to(variable: ContextVar[T], value: T) -> Iterator[None]:
    """A context in which a variable of this thread has a value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def attributes_set(owner: Any, **values: Any) -> Iterator[None]:
    """A context in which attributes of an object or a class have other values, or values where it has none of its own."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in values:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)


@contextmanager
def items_set(places: Iterable[tuple[MutableMapping[str, Any], str, Any]]) -> Iterator[None]:
    """A context in which other values lie under keys, or values where there are none: the mapping, the key and the value."""
    put = [(holder, key, value, key in holder, holder.get(key)) for holder, key, value in places]
    try:
        for holder, key, value, _, _ in put:
            holder[key] = value
        yield
    finally:
        for holder, key, _, there, before in reversed(put):
            if there:
                holder[key] = before
            else:
                holder.pop(key, None)
