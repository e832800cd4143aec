"""What a recorded run read from Python, by what holds it."""

from __future__ import annotations

import itertools
import types
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hexa_fx.capture.access_log import KINDS
from hexa_fx.capture.ran_code import is_ours
from hexa_fx.ir import PythonRead, SourceLocation
from hexa_fx.isolation.held_objects import is_collection, items
from hexa_fx.isolation.module_tree import named_modules
from hexa_fx.isolation.read_values import Keys

_DEEPEST = 12


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

    def is_read_once(self, module: nn.Module, name: str, scopes: frozenset[str]) -> bool:
        """Whether nobody but the code of ``scopes`` read an attribute, and only once."""
        edge = self.get(module, name)
        return edge is not None and edge.times == 1 and not edge.own and edge.scopes == scopes

    def collections(self) -> Iterator[Any]:
        """Lists, deques and dicts that were read and are empty or hold objects, but no other lists."""
        for edge in self:
            held = list(items(edge.value).values()) if isinstance(edge.noted, Keys) else []
            if is_collection(edge.value) and (held or not edge.value) and not any(type(item) in KINDS for item in held):
                yield edge.value

    def handed(self, settings: Mapping[tuple[int, str], Collection[str]]) -> Iterator[tuple[str, str]]:
        """Of attributes that the run itself set to what is no tensor, before they were read: who set one, and who read it.

        Args:
            settings: who set an attribute, by the module's id and name.
        """
        for edge in self:
            if edge.own and not isinstance(edge.value, torch.Tensor):
                yield from itertools.product(settings.get((id(edge.holder), edge.key), ()), edge.scopes)

    def values(self) -> Collection[PythonRead]:
        """Everything that was read, by every way to it from a module or a Python module."""
        found: dict[Any, PythonRead] = {}
        for identity, edges in self._of.items():
            holder = next(iter(edges.values())).holder
            if identity in self.modules:
                self._walk(found, (False, self.modules[identity]), (), holder, frozenset(), ())
            elif isinstance(holder, types.ModuleType):
                self._walk(found, (True, holder.__name__), (), holder, frozenset(), ())
        return found.values()

    def _walk(
        self,
        found: dict[Any, PythonRead],
        root: tuple[bool, str],
        steps: tuple[Any, ...],
        holder: Any,
        scopes: frozenset[str],
        above: tuple[int, ...],
    ) -> None:
        for edge in self._of.get(id(holder), {}).values():
            if edge.own or is_ours(edge.value):
                continue
            by, path = frozenset(edge.scopes) | (scopes if edge.inside else frozenset()), (*steps, edge.key)
            found[root, path] = PythonRead(root[1], path, edge.noted, root[0], by, edge.location)
            is_root = id(edge.value) in self.modules or isinstance(edge.value, types.ModuleType)
            if not is_root and id(edge.value) not in above and len(path) < _DEEPEST:
                self._walk(found, root, path, edge.value, by, (*above, id(holder)))
