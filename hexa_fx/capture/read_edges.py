"""What a recorded run read from Python, by what holds it."""

from __future__ import annotations

import itertools
import types
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hexa_fx.capture.ran_code import is_ours
from hexa_fx.ir import Container, PythonRead, SourceLocation
from hexa_fx.isolation.module_tree import named_modules
from hexa_fx.isolation.read_values import Bound, Code, Unreadable, name_of

_DEEPEST = 12


@dataclass
class Edge:
    """A read: what lay at ``key`` of ``holder`` the first time.

    Args:
        scopes: paths of the modules whose code read it.
        inside: whether the holder cannot note reads, so that all it holds counts as read with it.
        own: whether the run itself had set it by then, so that it is nothing that was there before.
    """

    holder: Any
    key: Any
    value: Any
    noted: Any
    scopes: set[str] = field(default_factory=set)
    location: SourceLocation | None = None
    inside: bool = False
    own: bool = False


def _is_of_python(edge: Edge) -> bool:
    """Whether Python itself put it there: what abstract classes cache, and the names in the code that it makes for named tuples."""
    named = edge.holder.get("__name__") if type(edge.holder) is dict else ""
    return bool(edge.key == "_abc_impl" or str(named).startswith("namedtuple_"))


class ReadEdges:
    """The reads of one run of a block."""

    def __init__(self, block: nn.Module) -> None:
        self.modules = {id(module): path for path, module in reversed(named_modules(block))}
        self._of: dict[int, dict[Any, Edge]] = {}

    def __iter__(self) -> Iterator[Edge]:
        return itertools.chain.from_iterable(edges.values() for edges in self._of.values())

    def of(self, holder: Any) -> dict[Any, Edge]:
        """What was read of an object, by name or place; more can be added."""
        return self._of.setdefault(id(holder), {})

    def hold(self, holder: Any, name: str, value: Any, scopes: frozenset[str]) -> None:
        """Notes an attribute as read before it was set, so that ``value`` lying there is a condition."""
        edge = self.of(holder).setdefault(name, Edge(holder, name, value, value))
        if edge.own:
            edge.value = edge.noted = value
            edge.own = False
        edge.scopes |= scopes

    def forget(self, value: Any) -> None:
        """Takes back that ``value`` was read, and what it held."""
        self._of.pop(id(value), None)
        for edges in self._of.values():
            for key in [key for key, edge in edges.items() if edge.value is value]:
                del edges[key]

    def handed(
        self, settings: Mapping[tuple[int, str], Collection[str]], tensors: bool = False
    ) -> Iterator[tuple[str, str]]:
        """Of what the run set to something other than tensors, or to these too, before it was read: who set and who read it."""
        for edge in self:
            if edge.own and (tensors or not isinstance(edge.value, torch.Tensor)):
                yield from itertools.product(settings.get((id(edge.holder), edge.key), ()), edge.scopes)

    def values(self) -> Iterator[PythonRead]:
        """Everything that was read: of the block's modules by every way to it, and of what is no part of the block all in one."""
        found: dict[Any, PythonRead] = {}
        seen: set[int] = set()
        for identity, path in self.modules.items():
            for edge, steps, by in self._walk((), identity, frozenset(), ()):
                found[path, steps] = PythonRead(path, steps, edge.noted, False, by, edge.location)
                seen.add(id(edge.holder))
        yield from found.values()
        code: dict[tuple[int, Any], tuple[Edge, frozenset[str]]] = {}
        for identity in self._roots():
            for edge, _, by in self._walk((), identity, frozenset(), ()):
                if id(edge.holder) not in seen and not _is_of_python(edge):
                    known = code.get((id(edge.holder), edge.key), (edge, frozenset[str]()))[1]
                    code[id(edge.holder), edge.key] = edge, known | by
        of: dict[frozenset[str], list[Bound]] = {}
        for edge, by in code.values():
            if isinstance(edge.noted, Unreadable):
                yield PythonRead(name_of(edge.holder), (edge.key,), edge.noted, True, by, edge.location)
            else:
                of.setdefault(by, []).append(Bound(edge.holder, edge.key, edge.value, edge.noted))
        for by, several in of.items():
            yield PythonRead("", ("code",), Code(tuple(several)), True, by)

    def _roots(self) -> list[int]:
        """Ids of what is no part of the block and was read, those first to which nothing led that was read."""
        led = {id(edge.value) for edge in self}
        return sorted((number for number in self._of if number not in self.modules), key=led.__contains__)

    def ways(self, wanted: Collection[int]) -> dict[int, list[Container]]:
        """The ways in which the code came to the objects with these ids, the shortest first."""
        found: dict[int, list[Container]] = {}
        roots = [(False, path, identity) for identity, path in self.modules.items()]
        holders = (next(iter(edges.values())).holder for edges in self._of.values() if edges)
        roots += [(True, each.__name__, id(each)) for each in holders if isinstance(each, types.ModuleType)]
        for is_global, root, identity in roots if wanted else ():
            for edge, steps, _ in self._walk((), identity, frozenset(), ()):
                if id(edge.value) in wanted:
                    way = Container(root, steps, type(edge.value), is_global)
                    found.setdefault(id(edge.value), []).append(way)
        return {identity: sorted(ways, key=lambda way: len(way.steps)) for identity, ways in found.items()}

    def _walk(
        self, steps: tuple[Any, ...], holder: int, scopes: frozenset[str], above: tuple[int, ...]
    ) -> Iterator[tuple[Edge, tuple[Any, ...], frozenset[str]]]:
        """What was read of the object with an id, and of what lies there: each with the steps to it, and whose code it is."""
        for edge in list(self._of.get(holder, {}).values()):
            if edge.own or is_ours(edge.value):
                continue
            by, path = frozenset(edge.scopes) | (scopes if edge.inside else frozenset()), (*steps, edge.key)
            yield edge, path, by
            is_root = id(edge.value) in self.modules or isinstance(edge.value, types.ModuleType)
            if not is_root and id(edge.value) not in above and len(path) < _DEEPEST:
                yield from self._walk(path, id(edge.value), by, (*above, holder))
