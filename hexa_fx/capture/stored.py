"""Attributes that a block's run sets on modules: notes them as results. Those of other objects are in `set_objects`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import torch
from torch import nn

from hexa_fx.capture.calls import user_location
from hexa_fx.capture.recorder import Recorder
from hexa_fx.capture.records import record_of
from hexa_fx.capture.symint import SYMBOLIC, SymbolicSize, plain
from hexa_fx.contexts import attributes_set
from hexa_fx.ir import ModuleAttribute, ObjectAttribute, SourceLocation
from hexa_fx.isolation.contents import is_as
from hexa_fx.isolation.held_objects import MODULE_STATE, PLAIN
from hexa_fx.isolation.module_snapshot import ModuleSnapshot
from hexa_fx.isolation.module_tree import named_modules

UNKNOWN = object()
"""Stands for a stored value that is neither a literal nor made of tensors of the run."""

_LITERAL = (bool, int, float, NoneType)


@dataclass(frozen=True)
class StoredValue:
    """An attribute that the run set on a module or an object: ``value`` with nodes for tensors, or `UNKNOWN`."""

    place: ModuleAttribute | ObjectAttribute
    value: Any
    scopes: frozenset[str]
    """Paths of the modules whose code set it."""
    location: SourceLocation | None = field(default=None, compare=False)
    """Where, if the value is unknown."""

    def __str__(self) -> str:
        return str(self.place)


@dataclass
class Settings:
    """Of every attribute that the run sets, by the module's id and name."""

    scopes: dict[tuple[int, str], set[str]] = field(default_factory=dict)
    """Paths of the modules whose code set it."""
    locations: dict[tuple[int, str], SourceLocation | None] = field(default_factory=dict)
    """Where it was set first."""

    def has(self, module: Any, name: Any) -> bool:
        """Whether the run has set the attribute by now."""
        return (id(module), name) in self.scopes

    def names(self, identity: int) -> list[str]:
        """What was set of the module or object with that id."""
        return [name for owner, name in self.scopes if owner == identity]

    def note(self, holder: Any, name: str, scope: str) -> None:
        """Notes that the code of ``scope`` sets ``name`` of ``holder``."""
        self.scopes.setdefault((id(holder), name), set()).add(scope)
        if (id(holder), name) not in self.locations:
            self.locations[id(holder), name] = user_location()


@contextmanager
def noted_settings(recorder: Recorder) -> Iterator[Settings]:
    """Notes which attributes the run sets."""
    noted = Settings()
    unnoted = nn.Module.__setattr__

    def noting(module: nn.Module, name: str, value: Any) -> None:
        unnoted(module, name, value)
        noted.note(module, name, recorder.scopes[-1])

    with attributes_set(nn.Module, __setattr__=noting):
        yield noted


def _changed(module: nn.Module, before: Mapping[str, Any]) -> list[str]:
    return [name for name, value in module.__dict__.items() if name not in before or value is not before[name]]


def stored_values(
    block: nn.Module,
    snapshot: ModuleSnapshot,
    settings: Settings,
    recorder: Recorder,
    hold: Callable[[Any, str, Any, frozenset[str]], None],
) -> Iterator[StoredValue]:
    """Attributes and buffers that are not what they were at ``snapshot``, or were set to a literal.

    Args:
        hold: is told of those that were set to another plain value that they had: a condition, as the rewritten block sets none.
    """
    for path, module in named_modules(block):
        before = snapshot.attributes(module)
        changed = _changed(module, before)
        again = [
            name for name in settings.names(id(module)) if name in module.__dict__.keys() - {*changed, *MODULE_STATE}
        ]
        for name in again:
            if is_kept_constant(module.__dict__[name], before[name]):
                hold(module, name, before[name], frozenset(settings.scopes[id(module), name]))
        for name in (*changed, *(name for name in again if _is_literal(before[name]))):
            value = module.__dict__[name]
            scopes = frozenset(settings.scopes.get((id(module), name), {path}))
            found, location = lifted(value, recorder), settings.locations.get((id(module), name))
            yield StoredValue(ModuleAttribute(path, name), found, scopes, location if found is UNKNOWN else None)
        yield from _exchanged_buffers(path, module, snapshot, settings, recorder)


def _exchanged_buffers(
    path: str, module: nn.Module, snapshot: ModuleSnapshot, settings: Settings, recorder: Recorder
) -> Iterator[StoredValue]:
    """Buffers in whose place other tensors are, as after ``self.usage = 0.9 * self.usage + used``."""
    before = snapshot.buffers(module)
    for name in before:
        if name in module._buffers and module._buffers[name] is not before[name]:
            scopes = frozenset(settings.scopes.get((id(module), name), {path}))
            yield StoredValue(ModuleAttribute(path, name), lifted(module._buffers[name], recorder), scopes)


def is_kept_constant(now: Any, before: Any) -> bool:
    """Whether an attribute that was set is a plain value as it was before, but none that could be set anew."""
    if type(now) is tuple:
        return not _is_literal(now) and all(isinstance(item, (*_LITERAL, str)) for item in now) and now == before
    return isinstance(now, PLAIN) and type(now) not in _LITERAL and is_as(now, before)


def _is_literal(value: Any) -> bool:
    return all(map(_is_literal, value)) if type(value) is tuple else type(value) in _LITERAL


def lifted(value: Any, recorder: Recorder) -> Any:
    """A value that a rewritten forward can set too, with nodes: a tensor, a number or shape that the run got from one, a literal
    (what code makes of numbers of tensors as plain ones is a decision), or a tuple, list or dict of such. `UNKNOWN` for others.
    """
    if isinstance(value, SymbolicSize):
        return recorder.record_call(torch.Size, (recorder.lift(tuple(value)),), torch.Size(map(plain, value)))
    numbers = recorder.pieces.given_by(value)
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
