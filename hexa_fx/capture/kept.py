"""What a block's run leaves in lists, dicts and objects that were there before it, and that it comes to.

The reader of the run (`hexa_fx.capture.python_reads`) tells of everything that the code comes to, before the code can change it: so
it is saved then, compared whenever one module's code hands over to another's, and put back in the end. What is only added to a list
or set in a dict, and attributes that are set on objects, are results that a rewritten block leaves as well. Whatever else changes
is a reason for a refusal.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import nn

from hexa_fx.capture.ran_code import RanCode
from hexa_fx.capture.read_edges import ReadEdges
from hexa_fx.capture.recorder import Recorder
from hexa_fx.capture.stored import UNKNOWN, Settings, StoredValue, is_kept_constant, lifted
from hexa_fx.capture.symint import SYMBOLIC
from hexa_fx.ir import ContainerItem, ObjectAttribute
from hexa_fx.isolation.contents import contents, is_as, put_back, same, taken
from hexa_fx.isolation.held_objects import MISSING, is_collection, is_object

_KINDS = (list, deque, dict)
"""Of containers that results are put into; subclasses may do something else when something is added."""
_PLAIN_KEYS = (str, int, bool, type(None))
_MOST = 4096
Taken: TypeAlias = tuple[tuple[Any, ...], tuple[Any, ...]]
"""Keys and values."""


@dataclass(frozen=True)
class Access:
    """One thing that the code does to a list, deque or dict that it puts results into.

    Args:
        number: its place among all of them.
        owner: number of the list, among those of the run.
        place: where a result is put.
        scope: path of the module whose code does it.
        problem: what is done, in words, if it is anything but putting a result there.
        value: the result, with nodes for tensors.
    """

    number: int
    owner: int
    place: ContainerItem
    scope: str
    problem: str = ""
    value: Any = None

    def __str__(self) -> str:
        return str(self.place)


@dataclass(frozen=True)
class ChangedInPlace:
    """A list, dict or object, of a module or global, that the code of ``scopes`` (paths of modules) changed otherwise."""

    label: str
    scopes: frozenset[str]


@dataclass
class _Met:
    """Something that the code came to: its contents at first and when they were last looked at, and what was done to it by whom."""

    value: Any
    before: Taken
    last: Taken
    changed: set[str] = field(default_factory=set)
    added: list[tuple[int, str, Any, Any]] = field(default_factory=list)
    """Number, scope, key and value of what was only added."""
    otherwise: bool = False


class Kept:
    """The lists, dicts and objects that the code of a run comes to and that were there before it, each as it was."""

    def __init__(self) -> None:
        self.note: Callable[[Any, str], None] = lambda holder, name: None
        self._met: dict[int, _Met] = {}
        self._made: set[int] = set()
        self._told: set[int] = set()
        self._count = 0

    def meet(self, holder: Any, value: Any, own: bool, outside: bool) -> None:
        """Saves what ``value``, found in ``holder``, contains, unless the run itself put it there (``own``).

        Args:
            outside: whether it is a module that is not one of the block's.
        """
        if own or id(holder) in self._made:
            self._made.add(id(value))
        elif (outside or is_object(value)) and not isinstance(value, (tuple, frozenset)) and id(value) not in self._met:
            found = taken(value)
            if len(found[0]) <= _MOST:
                self._met[id(value)] = _Met(value, found, found)

    def noting(self, cls: type) -> dict[str, Callable[..., None]]:
        """Methods for a class that note what is set in an object and what is removed from it."""
        plain_set: Callable[..., None] = cls.__setattr__
        plain_delete: Callable[..., None] = cls.__delattr__

        def __setattr__(holder: Any, name: str, value: Any) -> None:
            plain_set(holder, name, value)
            if id(holder) in self._met and name in dict(contents(holder)):  # else a property took it
                self.note(holder, name)

        def __delattr__(holder: Any, name: str) -> None:
            if id(holder) in self._met and name in dict(contents(holder)):
                self.note(holder, name)
            plain_delete(holder, name)

        return {"__setattr__": __setattr__, "__delattr__": __delattr__}

    def leave(self, scope: str) -> None:
        """Looks what the code of a module changed, before another one's goes on."""
        for met in self._met.values():
            if same(met.value, *met.last):
                continue
            added = _added(met.value, *met.last)
            met.changed.add(scope)
            met.otherwise |= added is None
            for key, value in added or ():
                met.added.append((self._count, scope, key, value))
                self._count += 1
            met.last = taken(met.value)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context at whose end everything is as it was."""
        try:
            yield
        finally:
            for met in self._met.values():
                if not same(met.value, *met.before):
                    put_back(met.value, list(zip(*met.before)))

    # -- after the run --------------------------------------------------------------------------------------------------

    def accesses(self, edges: ReadEdges, ran: RanCode, recorder: Recorder) -> Iterator[Access]:
        """What is put into lists, deques and dicts, in order. That these are read for it alone is no condition."""
        filled = [met for met in self._met.values() if type(met.value) in _KINDS and met.added and not met.otherwise]
        ways = edges.ways({id(met.value) for met in filled})
        found: list[Access] = []
        for owner, met in enumerate(filled):
            if id(met.value) not in ways or not _has_results([value for *_, value in met.added]):
                continue
            container = ways[id(met.value)][0]
            for place, scope, key, value in met.added:
                found.append(_lifted(Access(place, owner, ContainerItem(container, key), scope), value, recorder))
            said = f"reads {container}, where earlier calls may have left other things"
            for scope in edges.readers(met.value):
                if not ran.only_adds(scope, str(container.steps[-1])):
                    found.append(Access(self._count, owner, ContainerItem(container), scope, said))
            edges.forget(met.value)
            self._told.add(id(met.value))
        return iter(sorted(found, key=lambda access: access.number))

    def stored(self, edges: ReadEdges, settings: Settings, recorder: Recorder) -> Iterator[StoredValue]:
        """What was set in objects all of whose changes are known. What lies there as before becomes a condition."""
        objects = {identity: met for identity, met in self._met.items() if not is_collection(met.value)}
        ways = edges.ways(objects)
        for identity, met in objects.items():
            before, now = dict(zip(*met.before)), dict(contents(met.value))
            names = settings.names(identity)
            if identity not in ways or not _is_known(now, before, names):
                continue
            self._told.add(identity)
            for name in names:
                scopes = frozenset(settings.scopes[identity, name])
                old, new = before.get(name, MISSING), now.get(name, MISSING)
                if new is MISSING or is_kept_constant(new, old):
                    edges.hold(met.value, name, new, scopes)
                    continue
                value, found = lifted(new, recorder), tuple(ways[identity])
                if value is not UNKNOWN or of_the_run(new) or not all(way.is_global for way in found):
                    yield StoredValue(ObjectAttribute(found, name), value, scopes)  # of globals, the rest is a cache

    def changed(self, edges: ReadEdges) -> Iterator[ChangedInPlace]:
        """What changed otherwise: of globals, and what no read leads to, only what results came into; the rest are caches."""
        changed = {identity: met for identity, met in self._met.items() if met.changed and identity not in self._told}
        ways = edges.ways(changed)
        for identity, met in changed.items():
            found, old = ways.get(identity, []), {*map(id, met.before[1])}
            new = [value for value in met.last[1] if id(value) not in old]
            if (found and not found[0].is_global) or _has_results(new):
                label = str(found[0]) if found else f"a {type(met.value).__name__}"
                yield ChangedInPlace(label, frozenset(met.changed))


def _lifted(access: Access, value: Any, recorder: Recorder) -> Access:
    key, container = access.place.key, access.place.container
    if container.kind is dict and type(key) not in _PLAIN_KEYS:
        problem = f"puts a result into {container} by a key that is neither text nor a fixed number"
        return replace(access, place=ContainerItem(container), problem=problem)
    found = lifted(value, recorder)
    if found is not UNKNOWN:
        return replace(access, value=found)
    return replace(access, problem=f"puts something other than tensors into {access}, of which a graph holds one value")


def puts(accesses: Iterable[Access]) -> list[Any]:
    """The results that are put somewhere."""
    return [access.value for access in accesses if not access.problem]


def _added(holder: Any, keys: tuple[Any, ...], values: tuple[Any, ...]) -> list[tuple[Any, Any]] | None:
    """Keys and values that are only added: at the end of a list, or under a key. None if something else was done."""
    if type(holder) is dict:
        old = dict(zip(keys, values))
        gone = old.keys() - holder.keys()
        return None if gone else [(key, value) for key, value in holder.items() if old.get(key, MISSING) is not value]
    if type(holder) not in _KINDS:
        return None
    dropped = range(len(values) + 1) if type(holder) is deque and holder.maxlen is not None else (0,)
    for number in dropped:
        kept = values[number:]
        if len(kept) <= len(holder) and all(map(operator.is_, kept, holder)):
            return [(None, value) for value in list(holder)[len(kept) :]]
    return None


def _is_known(now: Mapping[Any, Any], before: Mapping[Any, Any], names: Iterable[str]) -> bool:
    """Whether nothing but ``names`` is another one now, and nothing is gone."""
    known = set(names)
    return now.keys() >= before.keys() and all(
        name in known or (name in before and is_as(value, before[name])) for name, value in now.items()
    )


def _has_results(new: Iterable[Any]) -> bool:
    return any(map(of_the_run, new))


def of_the_run(value: Any) -> bool:
    """Whether a value is a tensor, a number read from one, or a short list or dict of such."""
    if isinstance(value, (list, tuple)):
        return any(map(of_the_run, value[:16]))
    if type(value) is dict:
        return any(map(of_the_run, list(value.values())[:16]))
    return isinstance(value, (torch.Tensor, *SYMBOLIC)) and not isinstance(value, nn.Parameter)
