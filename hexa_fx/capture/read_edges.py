"""What a recorded run read from Python, by what holds it."""

from __future__ import annotations

import inspect
import itertools
import operator
import os
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from hexa_fx.capture.access_log import KINDS
from hexa_fx.capture.code_reads import ANYTHING, ITEMS
from hexa_fx.capture.ran_code import is_ours
from hexa_fx.ir import Container, PythonRead, SourceLocation
from hexa_fx.isolation.held_objects import is_collection, is_object, items
from hexa_fx.isolation.module_tree import named_modules
from hexa_fx.isolation.read_values import Keys

_DEEPEST = 12
_OWN_CLASS = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_SETTERS = frozenset(
    map(id, (setattr, delattr, vars, operator.setitem, operator.delitem, operator.iadd, operator.ior, operator.imul))
)
"""Functions in C that change what they are given, by whatever name code has them."""
_CALLED = frozenset({"forward", "__class__", "__call__", "__mro__"})
"""What is read of a module where it is called."""


@dataclass
class Edge:
    """A read: what lay at ``key`` of ``holder`` the first time.

    Args:
        scopes: paths of the modules whose code read it.
        inside: whether the holder cannot note reads, so that all it holds counts as read with it.
        own: whether the run itself had set it by then, so that it is nothing that was there before.
        times: how often it was read.
    """

    holder: Any
    key: Any
    value: Any
    noted: Any
    scopes: set[str] = field(default_factory=set)
    location: SourceLocation | None = None
    inside: bool = False
    own: bool = False
    times: int = 0


_Walked: TypeAlias = tuple[tuple[bool, str], tuple[Any, ...], Edge, frozenset[str]]
"""Whether the root is a Python module and its path or name, the steps from there, the read at their end, and whose code it is."""


class ReadEdges:
    """The reads of one run.

    Args:
        block: the module that runs.
    """

    def __init__(self, block: nn.Module) -> None:
        self.modules = {id(module): path for path, module in reversed(named_modules(block))}
        self._of: dict[int, dict[Any, Edge]] = {}

    def __iter__(self) -> Iterator[Edge]:
        return itertools.chain.from_iterable(edges.values() for edges in self._of.values())

    def of(self, holder: Any) -> dict[Any, Edge]:
        """What was read of an object, by name or place; more can be added."""
        return self._of.setdefault(id(holder), {})

    def get(self, holder: Any, key: Any) -> Edge | None:
        """The read of ``key`` of an object, if there was one."""
        return self._of.get(id(holder), {}).get(key)

    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors that were read, which are neither parameters nor buffers."""
        return (edge.value for edge in self if isinstance(edge.value, torch.Tensor))

    def is_held(self, value: Any) -> bool:
        """Whether ``value`` was read, and the run itself had not put it there."""
        return any(edge.value is value and not edge.own for edge in self)

    def is_read_once(self, holder: Any, name: str, scopes: frozenset[str]) -> bool:
        """Whether nobody but the code of ``scopes`` read an attribute, and only once."""
        edge = self.get(holder, name)
        return edge is not None and edge.times == 1 and not edge.own and edge.scopes == scopes

    def hold(self, holder: Any, name: str, value: Any, scopes: frozenset[str]) -> None:
        """Notes an attribute as read before it was set, so that ``value`` lying there is a condition."""
        edge = self.of(holder).setdefault(name, Edge(holder, name, value, value))
        if edge.own:
            edge.value = edge.noted = value
            edge.own = False
        edge.scopes |= scopes

    def collections(self) -> Iterator[Any]:
        """Lists, deques and dicts that were read and are empty or hold objects, but no other lists."""
        for edge in self:
            held = list(items(edge.value).values()) if isinstance(edge.noted, Keys) else []
            if is_collection(edge.value) and (held or not edge.value) and not any(type(item) in KINDS for item in held):
                yield edge.value

    def handed(
        self, settings: Mapping[tuple[int, str], Collection[str]], putting: Callable[[str], Collection[str]]
    ) -> Iterator[tuple[str, str]]:
        """Of what the run may have set to something other than tensors, before it was read: who set it, and who read it.

        Args:
            settings: who set an attribute, by the module's id and name.
            putting: who sets what goes by a name (`hexa_fx.capture.code_reads.CodeReads.puts`), of which nothing else tells.
        """
        read = dict[tuple[int, str], set[str]]()
        for edge in self:
            if edge.own and not isinstance(edge.value, torch.Tensor):
                yield from itertools.product(settings.get((id(edge.holder), edge.key), ()), edge.scopes)
                read.setdefault((id(edge.value), ITEMS), set()).update(edge.scopes if _takes_items(edge.value) else ())
        walked = [(edge, by) for _, _, edge, by in self._walked()]
        yield from self._handed_by_text(walked, putting)
        for edge, by in walked:
            if edge.key == "__dict__":
                by = frozenset().union(by, *(other.scopes for other in self.of(edge.holder).values()))
            if _takes_items(edge.value) or edge.key == "__dict__":
                read.setdefault((id(edge.value), ITEMS), set()).update(by)
            elif isinstance(edge.holder, os._Environ):  # which tells of no reads to those who set something there
                yield from itertools.product(putting(ITEMS), by)
            elif isinstance(edge.key, str) and not _tells(edge.holder, edge.key):
                read.setdefault((id(edge.holder), edge.key), set()).update(by)
        for (_, name), scopes in read.items():
            setting = putting(name)
            yield from itertools.product(scopes.intersection(setting) if name == ITEMS else setting, scopes)

    def _handed_by_text(
        self, walked: Iterable[tuple[Edge, frozenset[str]]], putting: Callable[[str], Collection[str]]
    ) -> Iterator[tuple[str, str]]:
        """Of what may have been set by other means than ``holder.name = value``, which leave no name: anything in what the code of
        those came to who have such means."""
        setting = frozenset(putting(ANYTHING)).union(*(edge.scopes for edge in self if id(edge.value) in _SETTERS))
        reached: dict[int, set[str]] = {module: {path} & setting for module, path in self.modules.items()}
        changeable = [
            (e, by) for e, by in walked if setting and e.key not in _CALLED and not isinstance(e.holder, tuple)
        ]
        for edge, by in changeable:
            for value in (edge.value, type(edge.value)) if is_object(edge.value) else (edge.value,):
                reached.setdefault(id(value), set()).update(by & setting)
        for edge, by in changeable:
            yield from itertools.product(reached.get(id(edge.holder), ()), by)

    def values(self) -> Collection[PythonRead]:
        """Everything that was read, by every way to it from a module or a Python module."""
        found: dict[Any, PythonRead] = {}
        for (is_global, root), path, edge, by in self._walked():
            found[is_global, root, path] = PythonRead(root, path, edge.noted, is_global, by, edge.location)
        return found.values()

    def ways(self, wanted: Collection[int]) -> dict[int, list[Container]]:
        """The ways in which the code came to the objects with these ids, the shortest first."""
        found: dict[int, list[Container]] = {}
        for (is_global, root), path, edge, _ in self._walked() if wanted else ():
            if id(edge.value) in wanted:
                found.setdefault(id(edge.value), []).append(Container(root, path, type(edge.value), is_global))
        return {identity: sorted(ways, key=lambda way: len(way.steps)) for identity, ways in found.items()}

    def _walked(self) -> Iterator[_Walked]:
        for identity, edges in self._of.items():
            holder = next(iter(edges.values())).holder
            if identity in self.modules:
                yield from self._walk((False, self.modules[identity]), (), holder, frozenset(), ())
            elif isinstance(holder, types.ModuleType):
                yield from self._walk((True, holder.__name__), (), holder, frozenset(), ())

    def _walk(
        self,
        root: tuple[bool, str],
        steps: tuple[Any, ...],
        holder: Any,
        scopes: frozenset[str],
        above: tuple[int, ...],
    ) -> Iterator[_Walked]:
        for edge in self._of.get(id(holder), {}).values():
            if edge.own or is_ours(edge.value):
                continue
            by, path = frozenset(edge.scopes) | (scopes if edge.inside else frozenset()), (*steps, edge.key)
            yield root, path, edge, by
            is_root = id(edge.value) in self.modules or isinstance(edge.value, types.ModuleType)
            if not is_root and id(edge.value) not in above and len(path) < _DEEPEST:
                yield from self._walk(root, path, edge.value, by, (*above, id(holder)))


def _takes_items(value: Any) -> bool:
    """Whether something can be put into it without a trace."""
    changes = is_collection(value) and not isinstance(value, (tuple, frozenset))
    return changes or isinstance(value, bytearray) or type(value).__module__ == "numpy"


def _tells(holder: Any, name: str) -> bool:
    """Whether its class tells when ``name`` is set in it: C code tells nobody."""
    if isinstance(holder, (type, torch.Tensor, types.ModuleType, types.SimpleNamespace)):
        return False
    in_class = inspect.getattr_static(type(holder), name, None)
    own_class = bool(type(holder).__flags__ & _OWN_CLASS) and not isinstance(in_class, types.GetSetDescriptorType)
    return isinstance(holder, nn.Module) or own_class
