"""Lists, deques and dicts that a run puts results into, and whether it does anything else with them.

While the block runs, a stand-in lies where the code reaches each of them, and notes what is done to it. It is of a class of its
own, so that no code in C can look into it unseen. What the code only adds to can be added to by a rewritten block as well;
what it reads may decide how it goes on.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from hexa_fx.capture.access_log import KINDS, AccessPath
from hexa_fx.capture.recorder import Recorder
from hexa_fx.capture.stored import UNKNOWN, lifted
from hexa_fx.ir import Container, ContainerItem, PythonRead
from hexa_fx.isolation.contents import contents

_CHANGES = frozenset(
    "insert remove pop clear sort reverse appendleft extendleft popleft rotate popitem setdefault "
    "__setitem__ __delitem__ __imul__".split()
)
_PLAIN_KEYS = (str, int, bool, type(None))


@dataclass(frozen=True)
class Access:
    """One thing that the code does to a list, deque or dict.

    Args:
        number: its place among all of them.
        owner: number of the list; it may be reached in several ways.
        place: where a result is put, by the way that the code reached it.
        scope: path of the module whose code does it.
        problem: what is done, in words, if it is anything but putting a result there.
        changes: whether the contents may be others afterwards.
        value: the result, with nodes for tensors.
        own: whether it is a mere look at what the run itself has put there.
    """

    number: int
    owner: int
    place: ContainerItem
    scope: str
    problem: str = ""
    changes: bool = True
    value: Any = None
    own: bool = False

    def __str__(self) -> str:
        return str(self.place)


@dataclass
class Collecting:
    """Notes what a run does to the containers at the end of ``access_paths``.

    Args:
        access_paths: to be taken while nothing runs.
        registered: ids of parameters and buffers; a list of such holds no results.
    """

    access_paths: list[AccessPath]
    registered: set[int]
    scope: Callable[[], str] = lambda: ""
    lost: bool = False
    """Whether something changed one of them that is not at the end of a path."""
    _noted: list[Access] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._real = {id(access.value): access.value for access in self.access_paths}
        self._numbers = {identity: number for number, identity in enumerate(self._real)}
        self._known = {identity: copy.copy(value) for identity, value in self._real.items()}
        self._full = {identity for identity, value in self._real.items() if self._holds_results(value)}

    @contextmanager
    def stand_ins(self) -> Iterator[None]:
        """A context in which the code meets stand-ins."""
        put = [(access, _STAND_INS[type(access.value)](self, access)) for access in self.access_paths]
        for access, stand_in in put:
            access.parent[access.key] = stand_in
        try:
            yield
        finally:
            for access, stand_in in put:
                if access.parent.get(access.key) is stand_in:
                    access.parent[access.key] = access.value
            for value in self._real.values():
                self._look(value)

    def holds(self, value: Any) -> bool:
        """Whether ``value`` is one of the containers."""
        return id(value) in self._real

    def _look(self, value: Any) -> None:
        self.lost |= not _same(self._known[id(value)], value)

    def note(
        self,
        access: AccessPath,
        act: Callable[[], Any],
        problem: str = "",
        changes: bool = True,
        key: Any = None,
        value: Any = None,
        own: bool = False,
    ) -> Any:
        """Does ``act`` and notes it, even if it raises an error: that is an answer too."""
        self._look(access.value)
        place, owner = ContainerItem(access.container, key), self._numbers[id(access.value)]
        self._noted.append(Access(len(self._noted), owner, place, self.scope(), problem, changes, value, own))
        try:
            return act()
        finally:
            self._known[id(access.value)] = copy.copy(access.value)

    def has_put(self, access: AccessPath, key: Any) -> bool:
        """Whether the run itself has put what lies under a key of a dict, by the same way, and done nothing else to it since."""
        owner = self._numbers[id(access.value)]
        changes = [noted for noted in self._noted if noted.owner == owner and noted.changes]
        last = max((number for number, noted in enumerate(changes) if noted.problem), default=-1)
        put = [noted.place for noted in changes[last + 1 :] if noted.place.container == access.container]
        return any(place.key == key and type(place.key) is type(key) for place in put)

    def accesses(self, recorder: Recorder) -> tuple[Access, ...]:
        """Everything that was done, with nodes for tensors. Mere reads count only where tensors lie or come to lie.

        What is read from others is watched like any setting (`hexa_fx.runtime.attribute_guards`).
        """
        told = self._full_owners() | self._changed_owners()
        return tuple(_lifted(access, recorder) for access in self._noted if access.owner in told)

    def explains(self, found: PythonRead) -> bool:
        """Whether a value counts as read from an object only because of what nobody reads, or is noted here."""
        read = {access.owner for access in self._noted if access.problem} - self._changed_owners()
        return any(
            (access.container.is_global, access.container.root) == (found.is_global, found.root)
            and access.container.steps == found.steps[: len(access.container.steps)]
            and self._numbers[id(access.value)] not in read
            for access in self.access_paths
        )

    def _holds_results(self, value: Any) -> bool:
        leaves = tree_leaves([item for _, item in contents(value)])
        return any(isinstance(leaf, torch.Tensor) and id(leaf) not in self.registered for leaf in leaves)

    def _full_owners(self) -> set[int]:
        return {self._numbers[identity] for identity in self._full}

    def _changed_owners(self) -> set[int]:
        return {access.owner for access in self._noted if access.changes}


def puts(accesses: Iterable[Access]) -> list[Any]:
    """The results that are put somewhere."""
    return [access.value for access in accesses if not access.problem and not access.own]


def _lifted(access: Access, recorder: Recorder) -> Access:
    if access.problem or access.own:
        return replace(access, value=None)
    value = lifted(access.value, recorder)
    if value is not UNKNOWN:
        return replace(access, value=value)
    problem = f"puts something other than tensors into {access}, of which a graph holds one value"
    return replace(access, problem=problem, value=None)


def _same(one: Any, two: Any) -> bool:
    first, second = contents(one), contents(two)
    keys = [key for key, _ in first] == [key for key, _ in second]
    return len(first) == len(second) and keys and all(a is b for (_, a), (_, b) in zip(first, second))


# -- stand-ins ---------------------------------------------------------------------------------------------------------


class _StandInContainer:
    """For a list, deque or dict; subclasses have the methods."""

    __slots__ = ("access", "collecting")

    def __init__(self, collecting: Collecting, access: AccessPath) -> None:
        self.collecting, self.access = collecting, access

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.access.value, name)
        return self.collecting.note(self.access, lambda: found, _reading(self.access.container), changes=False)


def without_stand_in(value: Any) -> Any:
    """The list, deque or dict that a stand-in stands for; anything else as it is."""
    return value.access.value if issubclass(type(value), _StandInContainer) else value


def _reading(container: Container) -> str:
    return f"reads {container}, where earlier calls may have left other things"


def _noting(name: str) -> Callable[..., Any]:
    """The method of that name, noted as a reason for a refusal."""
    changes = name in _CHANGES

    def method(self: _StandInContainer, *args: Any, **kwargs: Any) -> Any:
        container, act = self.access.container, getattr(self.access.value, name)
        problem = f"changes {container} in place by {name}" if changes else _reading(container)
        return self.collecting.note(self.access, lambda: act(*args, **kwargs), problem, changes)

    return method


def _append(self: _StandInContainer, item: Any) -> None:
    self.collecting.note(self.access, functools.partial(self.access.value.append, item), value=item)


def _extend(self: _StandInContainer, items: Iterable[Any]) -> None:
    for item in list(items):
        _append(self, item)


def _add_onto(self: _StandInContainer, items: Iterable[Any]) -> _StandInContainer:
    _extend(self, items)
    return self


def _looking(name: str) -> Callable[..., Any]:
    """The method of a dict of that name, which looks a key up: no reason for a refusal where the run itself has put it."""
    noting = _noting(name)

    def method(self: _StandInContainer, key: Any, *default: Any) -> Any:
        if not self.collecting.has_put(self.access, key):
            return noting(self, key, *default)
        act = functools.partial(getattr(self.access.value, name), key, *default)
        return self.collecting.note(self.access, act, changes=False, key=key, own=True)

    return method


def _set(self: _StandInContainer, key: Any, value: Any) -> None:
    plain = type(key) in _PLAIN_KEYS
    problem = (
        "" if plain else f"puts a result into {self.access.container} by a key that is neither text nor a fixed number"
    )
    act = functools.partial(self.access.value.__setitem__, key, value)
    self.collecting.note(self.access, act, problem, key=key if plain else None, value=value)


def _update(self: _StandInContainer, *args: Any, **kwargs: Any) -> None:
    for key, value in dict(*args, **kwargs).items():
        _set(self, key, value)


def _update_onto(self: _StandInContainer, other: Any) -> _StandInContainer:
    _update(self, other)
    return self


_SEQUENCE = {"append": _append, "extend": _extend, "__iadd__": _add_onto}
_MAPPING = {"__setitem__": _set, "update": _update, "__ior__": _update_onto}
_MAPPING |= {name: _looking(name) for name in ("__getitem__", "get", "__contains__")}
_OWN = frozenset(
    "__new__ __init__ __class__ __getattribute__ __setattr__ __delattr__ __dir__ __init_subclass__ __subclasshook__ "
    "__class_getitem__ __sizeof__".split()
)


def _stand_in_for(kind: type) -> type[_StandInContainer]:
    members: dict[str, Any] = {
        name: _noting(name) for name in dir(kind) if name not in _OWN and callable(getattr(kind, name))
    }
    members |= _MAPPING if kind is dict else _SEQUENCE
    return type("StandIn", (_StandInContainer,), {**members, "__slots__": (), "__class__": property(lambda self: kind)})


_STAND_INS = {kind: _stand_in_for(kind) for kind in KINDS}
