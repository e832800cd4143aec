"""Attributes that a block's run sets on objects that are no modules, such as a token dispatcher: notes them as results.

The reader of the run (`hexa_fx.capture.python_reads`) says which objects the code comes to. Their classes tell of what is set by
name. Whatever else changes in an object (by its ``__dict__``, or by ``del``) is none of this, and stays a reason for a refusal.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hexa_fx.capture.captured import ChangedInPlace
from hexa_fx.capture.read_edges import ReadEdges
from hexa_fx.capture.recorder import Recorder
from hexa_fx.capture.side_effects import of_the_run
from hexa_fx.capture.stored import UNKNOWN, Settings, StepOf, StoredValue, is_kept_constant, lifted
from hexa_fx.ir import Container, Counter, ObjectAttribute
from hexa_fx.isolation.contents import contents, is_as, put_back
from hexa_fx.isolation.held_objects import MISSING, is_collection, is_object

_OWN_CLASS = 1 << 9  # Py_TPFLAGS_HEAPTYPE


class MetObjects:
    """The objects that the code of a run comes to and that were there before it, each as it was."""

    def __init__(self) -> None:
        self.note: Callable[[Any, str], None] = lambda holder, name: None
        self._before: dict[int, tuple[Any, dict[Any, Any]]] = {}
        self._made: set[int] = set()
        self._left: set[int] = set()

    def meet(self, holder: Any, value: Any, own: bool) -> None:
        """Saves what ``value``, found in ``holder``, contains, unless the run itself put it there (``own``)."""
        if own or id(holder) in self._made:
            self._made.add(id(value))
        elif isinstance(value, os._Environ):
            return  # what it holds as attributes is `environment_reads`' until the run is over
        elif is_object(value) and not is_collection(value) and type(value).__flags__ & _OWN_CLASS:
            self._before[id(value)] = value, dict(contents(value))

    def noting(self, cls: type) -> dict[str, Callable[..., None]]:
        """Methods for a class that note what is set in an object and what is removed from it."""
        plain_set: Callable[..., None] = cls.__setattr__
        plain_delete: Callable[..., None] = cls.__delattr__

        def __setattr__(holder: Any, name: str, value: Any) -> None:
            plain_set(holder, name, value)
            if id(holder) in self._before and name in dict(contents(holder)):  # else a property took it
                self.note(holder, name)

        def __delattr__(holder: Any, name: str) -> None:
            if id(holder) in self._before and name in dict(contents(holder)):
                self.note(holder, name)
            plain_delete(holder, name)

        return {"__setattr__": __setattr__, "__delattr__": __delattr__}

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context at whose end the objects are as they were, but for those that somebody else has to see."""
        try:
            yield
        finally:
            for identity, (holder, before) in self._before.items():
                if identity not in self._left and not _same(dict(contents(holder)), before):
                    put_back(holder, list(before.items()))

    def stored(
        self, edges: ReadEdges, settings: Settings, recorder: Recorder, step_of: StepOf
    ) -> Iterator[StoredValue]:
        """What was set in objects all of whose changes are known. What lies there as before becomes a condition."""
        ways = edges.ways(self._before)
        for identity, (holder, before) in self._before.items():
            now, names = dict(contents(holder)), settings.names(identity)
            if identity in ways and _is_known(now, before, names):
                way = tuple(ways[identity])
                for name in names:
                    scopes = frozenset(settings.scopes[identity, name])
                    found = _Setting(holder, name, before.get(name, MISSING), now.get(name, MISSING), scopes)
                    yield from _stored(found, way, edges, recorder, step_of)
            elif not _same(now, before):
                self._left.add(identity)

    def changed(self, edges: ReadEdges, is_watched: Callable[[Any], bool]) -> Iterator[ChangedInPlace]:
        """Objects that changed otherwise, of those that nobody else watches. They count if results came into them."""
        ways = edges.ways(self._left)
        for identity in sorted(self._left):
            holder, before = self._before[identity]
            if is_watched(holder):
                continue
            self._left.discard(identity)
            new = (value for name, value in contents(holder) if before.get(name, MISSING) is not value)
            if any(map(of_the_run, new)):
                where = str(ways[identity][0]) if identity in ways else f"a {type(holder).__name__}"
                yield ChangedInPlace(where, False, frozenset({""}))


@dataclass(frozen=True)
class _Setting:
    """``name`` of ``holder`` before and after a run in which the code of ``scopes`` set it."""

    holder: Any
    name: str
    before: Any
    now: Any
    scopes: frozenset[str]


def _stored(
    found: _Setting, ways: tuple[Container, ...], edges: ReadEdges, recorder: Recorder, step_of: StepOf
) -> Iterator[StoredValue]:
    if found.now is MISSING or is_kept_constant(found.now, found.before):
        edges.hold(found.holder, found.name, found.now, found.scopes)
        return
    place = ObjectAttribute(ways, found.name)
    step = step_of(found.holder, found.name, found.before, found.now, found.scopes)
    if step is not None:
        yield StoredValue(Counter(place, *step), None, found.scopes)
        return
    value = lifted(found.now, recorder)
    if value is not UNKNOWN or of_the_run(found.now) or not all(way.is_global for way in ways):
        yield StoredValue(place, value, found.scopes)  # of globals, what is no result counts as a cache


def _is_known(now: Mapping[Any, Any], before: Mapping[Any, Any], names: Iterable[str]) -> bool:
    """Whether nothing but ``names`` is another one now, and nothing is gone."""
    known = set(names)
    return now.keys() >= before.keys() and all(
        name in known or (name in before and is_as(value, before[name])) for name, value in now.items()
    )


def _same(now: Mapping[Any, Any], before: Mapping[Any, Any]) -> bool:
    return now.keys() == before.keys() and all(is_as(value, before[name]) for name, value in now.items())
