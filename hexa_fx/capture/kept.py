"""What a block's run leaves: attributes that it sets on modules, and what it does to lists, dicts and objects that were there.

The reader of the run (`hexa_fx.capture.python_reads`) tells of everything that the code comes to, before the code can change it: so
it is saved then, compared whenever one module's code hands over to another's, and put back in the end. What is only added to a list
or set in a dict, and attributes that are set on modules and objects, are results that a rewritten block leaves as well. Whatever
else changes is a reason for a refusal.
"""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, TypeAlias

import torch
from torch import nn

from hexa_fx.capture.calls import user_location
from hexa_fx.capture.ran_code import RanCode
from hexa_fx.capture.read_edges import ReadEdges
from hexa_fx.capture.recorder import Recorder
from hexa_fx.capture.records import record_of
from hexa_fx.capture.symint import SYMBOLIC, SymbolicSize, plain
from hexa_fx.ir import ContainerItem, Destination, ModuleAttribute, ObjectAttribute, SourceLocation
from hexa_fx.isolation.contents import contents, is_as, is_result, put_back, same, taken
from hexa_fx.isolation.lookup import MISSING, MODULE_STATE, PLAIN, is_collection, is_object
from hexa_fx.isolation.module_state import ModuleSnapshot
from hexa_fx.isolation.module_tree import inside, named_modules

UNKNOWN = object()
"""Stands for a stored value that is neither a literal nor made of tensors of the run."""

_LITERAL = (bool, int, float, str, NoneType, torch.dtype, torch.device)


@dataclass(frozen=True)
class StoredValue:
    """A result that the run left: an attribute that it set on a module or an object, or what it put into a list, deque or dict.

    Args:
        place: where it lies.
        value: with nodes for tensors, or `UNKNOWN`.
        scopes: paths of the modules whose code left it there.
        location: where an attribute was set, if the value is unknown.
        problem: what is done to a list, deque or dict, in words, if it is anything but putting a result there.
    """

    place: Destination
    value: Any
    scopes: frozenset[str]
    location: SourceLocation | None = field(default=None, compare=False)
    problem: str = ""

    def __str__(self) -> str:
        return str(self.place)


@dataclass
class Settings:
    """Of every attribute that the run sets, by the module's id and name."""

    running: list[str]
    """Paths of the modules whose code runs, the innermost last."""
    scopes: dict[tuple[int, str], set[str]] = field(default_factory=dict)
    """Paths of the modules whose code set it."""
    locations: dict[tuple[int, str], SourceLocation | None] = field(default_factory=dict)
    """Where it was set first."""
    again: set[tuple[str, str]] = field(default_factory=set)
    """Paths of a module whose code set one, and of another whose code set it after that."""

    def has(self, module: Any, name: Any) -> bool:
        """Whether the run has set the attribute by now."""
        return (id(module), name) in self.scopes

    def names(self, identity: int) -> list[str]:
        """What was set of the module or object with that id."""
        return [name for owner, name in self.scopes if owner == identity]

    def note(self, holder: Any, name: str) -> None:
        """Notes that the code that runs sets ``name`` of ``holder``."""
        scopes = self.scopes.setdefault((id(holder), name), set())
        self.again.update((scope, self.running[-1]) for scope in scopes)
        scopes.add(self.running[-1])
        if (id(holder), name) not in self.locations:
            self.locations[id(holder), name] = user_location()


def stored_values(
    block: nn.Module,
    snapshot: ModuleSnapshot,
    settings: Settings,
    recorder: Recorder,
    hold: Callable[[Any, str, Any, frozenset[str]], None],
) -> Iterator[StoredValue]:
    """Attributes and buffers that are not what they were at ``snapshot``, or were set to a literal. ``hold`` is told of those that
    were set to another plain value that they had: a condition, as the rewritten block sets none."""
    for path, module in named_modules(block):
        own, before = module.__dict__, snapshot.before(module.__dict__)
        changed = [name for name, value in own.items() if name not in before or value is not before[name]]
        again = [name for name in settings.names(id(module)) if name in own.keys() - {*changed, *MODULE_STATE}]
        for name in again:
            if is_kept_constant(own[name], before[name]):
                hold(module, name, before[name], frozenset(settings.scopes[id(module), name]))
        now = {name: own[name] for name in (*changed, *(n for n in again if _is_literal(before[n])))}
        # buffers in whose place other tensors are, as after ``self.usage = 0.9 * self.usage + used``
        buffers, held = module._buffers, snapshot.before(module._buffers)
        now |= {name: buffers[name] for name in held if name in buffers and buffers[name] is not held[name]}
        for name, value in now.items():
            if recorder.asked.get(inside(path, name), MISSING) is value:  # the number that it was asked for
                continue
            scopes = frozenset(settings.scopes.get((id(module), name), {path}))
            found, location = lifted(value, recorder), settings.locations.get((id(module), name))
            yield StoredValue(ModuleAttribute(path, name), found, scopes, location if found is UNKNOWN else None)


def is_kept_constant(now: Any, before: Any) -> bool:
    """Whether an attribute that was set is a plain value as it was before, but none that could be set anew."""
    return isinstance(now, PLAIN) and type(now) not in _LITERAL and is_as(now, before)


def _is_literal(value: Any) -> bool:
    return all(map(_is_literal, value)) if type(value) is tuple else type(value) in _LITERAL


def lifted(value: Any, recorder: Recorder) -> Any:
    """A value that a rewritten forward can set too, with nodes: a tensor, a number or shape that the run got from one, a literal
    (what code makes of numbers of tensors as plain ones is a decision), or a tuple, list or dict of such. `UNKNOWN` for others.
    """
    if isinstance(value, SymbolicSize):
        return recorder.record_call(torch.Size, (recorder.lift(tuple(value)),), torch.Size(map(plain, value)))
    numbers = recorder.giver_of(value)
    if numbers is not None and numbers.target == "tolist":
        return _asked_again(numbers, recorder)
    if type(value) in (tuple, list):
        items = [lifted(item, recorder) for item in value]
        return UNKNOWN if UNKNOWN in items else type(value)(items)
    if type(value) is dict and all(isinstance(key, str) for key in value):
        held = {key: lifted(item, recorder) for key, item in value.items()}
        return UNKNOWN if UNKNOWN in held.values() else held
    if isinstance(value, (torch.Tensor, *SYMBOLIC)):
        return recorder.lift(value)
    return value if type(value) in _LITERAL else UNKNOWN


def _asked_again(numbers: torch.fx.Node, recorder: Recorder) -> Any:
    """A second call of ``tolist``: with the numbers of the first the code may have gone on, which keeping them does not."""
    (tensor,) = numbers.all_input_nodes
    later = itertools.takewhile(lambda node: node is not numbers, reversed(recorder.graph.nodes))
    if any(record_of(node).writes and record_of(node).storage == record_of(tensor).storage for node in later):
        return UNKNOWN
    again = recorder.add("call_method", "tolist", numbers.args, {}, record_of(numbers).value)
    record_of(again).scope, record_of(again).location = record_of(numbers).scope, record_of(numbers).location
    return again


_KINDS = (list, deque, dict)
"""Of containers that results are put into; subclasses may do something else when something is added."""
_PLAIN_KEYS = (str, int, bool, type(None))
_MOST = 4096
Taken: TypeAlias = tuple[Sequence[Any], tuple[Any, ...]]
"""Keys and values."""


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

    def __init__(self, settings: Settings) -> None:
        self.note = settings.note
        self._met: dict[int, _Met] = {}
        self._made: set[int] = set()
        self._told: set[int] = set()
        self._count = 0

    def meet(self, holder: Any, value: Any, own: bool, outside: bool) -> None:
        """Saves what ``value``, found in ``holder``, contains, unless the run itself put it there (``own``). ``outside``: whether
        it is a module that is not one of the block's."""
        if own or id(holder) in self._made:
            self._made.add(id(value))
        elif (outside or is_object(value)) and not isinstance(value, (tuple, frozenset)) and id(value) not in self._met:
            found = taken(value)
            if len(found[0]) <= _MOST:
                self._met[id(value)] = _Met(value, found, found)

    def noting(self, cls: type) -> Callable[..., None]:
        """A ``__setattr__`` for a class that notes what is set in a module or an object that was met."""
        plain_set: Callable[..., None] = cls.__setattr__

        def __setattr__(holder: Any, name: str, value: Any) -> None:
            plain_set(holder, name, value)
            is_met = id(holder) in self._met and name in dict(contents(holder))  # else a property took it
            if is_met or isinstance(holder, nn.Module):
                self.note(holder, name)

        return __setattr__

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

    def added(self, edges: ReadEdges, ran: RanCode, recorder: Recorder) -> list[StoredValue]:
        """What is put into lists, deques and dicts, in order. That these are read for it alone is no condition."""
        kept = [met for met in self._met.values() if type(met.value) in _KINDS and not met.otherwise]
        filled = [met for met in kept if met.added]
        ways = edges.ways({id(met.value) for met in filled})
        found: list[tuple[int, StoredValue]] = []
        for met in kept:  # code that adds to it in other calls alone, as in train mode, asks for nothing of it either
            came = [edge for edge in edges if edge.value is met.value and edge.scopes] if not met.added else []
            if came and all(ran.only_adds(scope, str(edge.key)) for edge in came for scope in edge.scopes):
                edges.forget(met.value)
        for met in filled:
            if id(met.value) not in ways or not any(of_the_run(value) for *_, value in met.added):
                continue
            container = ways[id(met.value)][0]
            for place, scope, key, value in met.added:
                found.append((place, _put(ContainerItem(container, key), value, scope, recorder)))
            said = f"reads {container}, where earlier calls may have left other things"
            for scope in set().union(*(edge.scopes for edge in edges if edge.value is met.value and not edge.own)):
                if not ran.only_adds(scope, str(container.steps[-1])):
                    otherwise = StoredValue(ContainerItem(container), UNKNOWN, frozenset({scope}), problem=said)
                    found.append((self._count, otherwise))
            edges.forget(met.value)
            self._told.add(id(met.value))
        return [item for _, item in sorted(found, key=operator.itemgetter(0))]

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
                value, found = lifted(new, recorder), ways[identity]
                told = value is not UNKNOWN or of_the_run(new)
                if told or not all(way.is_global for way in found):
                    yield StoredValue(ObjectAttribute(found[0], name), value, scopes)  # of globals, the rest is a cache

    def changed(self, edges: ReadEdges) -> Iterator[ChangedInPlace]:
        """What changed otherwise: of globals, and what no read leads to, only what results came into; the rest are caches."""
        changed = {identity: met for identity, met in self._met.items() if met.changed and identity not in self._told}
        ways = edges.ways(changed)
        for identity, met in changed.items():
            found, old = ways.get(identity, []), {*map(id, met.before[1])}
            new = [value for value in met.last[1] if id(value) not in old]
            if (found and not found[0].is_global) or any(map(of_the_run, new)):
                label = str(found[0]) if found else f"a {type(met.value).__name__}"
                yield ChangedInPlace(label, frozenset(met.changed))


def _put(place: ContainerItem, value: Any, scope: str, recorder: Recorder) -> StoredValue:
    container, by = place.container, frozenset({scope})
    if container.kind is dict and type(place.key) not in _PLAIN_KEYS:
        problem = f"puts a result into {container} by a key that is neither text nor a fixed number"
        return StoredValue(ContainerItem(container), UNKNOWN, by, problem=problem)
    found = lifted(value, recorder)
    problem = f"puts something other than tensors into {place}, of which a graph holds one value"
    return StoredValue(place, found, by, problem=problem if found is UNKNOWN else "")


def _added(holder: Any, keys: Sequence[Any], values: tuple[Any, ...]) -> list[tuple[Any, Any]] | None:
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


def of_the_run(value: Any) -> bool:
    """Whether a value is a tensor, a number read from one, or a short list or dict of such."""
    return is_result(value, (torch.Tensor, *SYMBOLIC))
