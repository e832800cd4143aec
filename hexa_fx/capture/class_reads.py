"""Notes what a run reads of classes: by way of objects that it makes itself, by their own names, and of what lies in them.

``Config().scale`` leaves no read of an object that was there before, but of the class: its attribute, or the defaults of its
``__init__``. What special methods and functions of base classes are is noted here too, since Python does not ask objects for them.
"""

from __future__ import annotations

import enum
import functools
import gc
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hexa_fx.capture.ran_code import RanCode
from hexa_fx.capture.read_edges import ReadEdges
from hexa_fx.isolation.held_objects import PLAIN, is_object
from hexa_fx.isolation.lookup import InClass, getattr_plain
from hexa_fx.isolation.users_code import is_users

_NEVER = (torch.Tensor, torch.autograd.Function, type, BaseException)
"""Whose classes torch and Python look into by themselves."""

_BOUND = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
    property,
    staticmethod,
    classmethod,
    functools.cached_property,
    functools.partialmethod,
)
"""What makes a member of a class a function of its objects. If one runs, Python tells."""


class ClassReads:
    """The classes that the code of a run comes to, and their objects that no read leads to.

    Args:
        read: notes that a key of an object is read.
        patch: has a class note what is read of its objects.
        edges: all that was read.
        ran: the code that ran.
    """

    def __init__(self, read: Callable[..., Any], patch: Callable[[type], None], edges: ReadEdges, ran: RanCode) -> None:
        self._read, self._patch, self._edges, self._ran = read, patch, edges, ran
        self._classes: dict[int, type] = {}
        self._made: set[int] = set()  # an id may come back, but only of another one that is made
        self._strange: dict[int, tuple[Any, str, set[str]]] = {}

    def meet(self, value: Any) -> None:
        """Sees to it that reads of a class's objects are noted, and of what lies in it, if it is one of the user's."""
        cls = value if isinstance(value, type) else type(value) if isinstance(value, enum.Enum) else None
        if cls is None or id(cls) in self._classes or not is_users(cls.__module__) or issubclass(cls, _NEVER):
            return
        self._classes[id(cls)] = cls
        self._patch(cls)
        for base in (*cls.__mro__, *type(cls).__mro__):
            for member in list(vars(base).values()) if is_users(base.__module__) else ():
                if is_object(member):
                    self._patch(type(member))

    def is_new(self, holder: Any, name: str, scope: str) -> bool:
        """Notes a read of an object that no read has led to so far. Whether it was there before the run."""
        if id(holder) not in self._made and (not gc.is_tracked(holder) or _is_young(holder)):
            self._made.add(id(holder))
        if id(holder) not in self._made:
            self._strange.setdefault(id(holder), (holder, name, set()))[2].add(scope)
            return True
        cls = type(holder)
        if name not in getattr_plain(holder):
            for number, base in enumerate(cls.__mro__):
                if name in vars(base):
                    self._read_member(cls, number, name, {scope})
                    break
        return False

    def anchor(self, objects: Iterable[Any], found: set[int]) -> None:
        """Notes what classes gave without being asked by way of an object.

        Args:
            objects: whose classes count, beside those that were met.
            found: ids of everything that was read.
        """
        holders = {type(holder): holder for holder in objects}
        for cls in {**dict.fromkeys(self._classes.values()), **holders}:
            kinds = {cls: holders.get(cls)} | ({type(cls): cls} if is_users(type(cls).__module__) else {})
            for kind, holder in kinds.items():
                self._anchor(kind, holder, found)

    def _anchor(self, cls: type, holder: Any, found: set[int]) -> None:
        for number, base in enumerate(cls.__mro__):
            for name, member in list(vars(base).items()) if is_users(base.__module__) else ():
                scopes = self._scopes_of(name, member)
                unique = callable(member) or not isinstance(member, PLAIN)  # every 2 is the same object
                if not scopes or (unique and id(member) in found):
                    continue
                for scope in scopes if holder is not None else ():
                    self._read(holder, "__class__", scope)
                self._read_member(cls, number, name, scopes)

    def _scopes_of(self, name: str, member: Any) -> set[str]:
        """The modules whose code ran a member of a class, or read it."""
        if name == "__dataclass_fields__":  # which only functions of Python's own ask a class for
            ours = set(map(id, member.values()))
            return {scope for key, (_, _, by) in self._strange.items() if key in ours for scope in by}
        return self._ran.scopes_of(member) or (set() if isinstance(member, _BOUND) else self._ran.mention(name))

    def _read_member(self, cls: type, number: int, name: str, scopes: set[str]) -> None:
        base = cls.__mro__[number]
        if not is_users(base.__module__):
            return
        member = vars(base)[name]
        computes = hasattr(type(member), "__get__") and not isinstance(member, (*_BOUND, type))
        for scope in scopes:
            self._read(cls, "__mro__", scope)
            self._read(cls.__mro__, number, scope)
            self._read(base, InClass(name) if computes else name, scope)

    def hidden(self) -> Iterable[tuple[str, str, set[str]]]:
        """Objects that were there before and that nothing leads to: what was read of each, its type, and whose code it is."""
        for holder, _, scopes in self._strange.values():
            if isinstance(holder, enum.Enum):
                for scope in scopes:
                    self._read(type(holder), holder.name, scope)
        ways = self._edges.ways(self._strange)
        for identity, (holder, name, scopes) in self._strange.items():
            if identity not in ways and identity not in self._edges.modules:
                yield name, type(holder).__name__, scopes


def _is_young(holder: Any) -> bool:
    """Whether an object was made in this run: no garbage is collected meanwhile, so that all of these are of one generation."""
    return any(other is holder for other in gc.get_objects(generation=0))
