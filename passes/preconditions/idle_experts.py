"""What experts without tokens in the example read from Python, were they called.

Code that loops over experts leaves these out, so a recorded run says nothing of their modes and settings. The rewritten graph
computes with their weights all the same. What the code of one expert read is therefore taken to be read of every one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from torch import nn

from hexa_fx.capture import CapturedBlock
from hexa_fx.ir import PythonRead
from hexa_fx.isolation.held_objects import MISSING
from hexa_fx.isolation.lookup import lookup, own_names
from hexa_fx.isolation.read_values import Names, Unreadable, is_unreadable, snapshot
from hexa_fx.passes.detect.tags import expert_groups

_ReadPath: TypeAlias = tuple[str, tuple[Any, ...]]
"""A path in an expert, with a point before it, and steps from there; no path for steps of the module that holds the experts."""


@dataclass(frozen=True)
class _Siblings:
    """Modules that hold one expert each, by their names in the module that holds them all."""

    owner: str
    names: tuple[str, ...]

    def path(self, name: str) -> str:
        return f"{self.owner}.{name}".lstrip(".")

    def holder(self, read: PythonRead) -> str | None:
        """The sibling that a read is of, or is in."""
        if read.root == self.owner:
            return str(read.steps[0]) if read.steps[0] in self.names else None
        above = f"{self.owner}." if self.owner else ""
        name = read.root[len(above) :].partition(".")[0] if read.root.startswith(above) else ""
        return name if name in self.names else None

    def relative(self, read: PythonRead, name: str) -> _ReadPath:
        if read.root == self.owner:
            return "", read.steps[1:]
        return f".{read.root[len(self.path(name)) :]}", read.steps

    def moved(self, read: PythonRead, one: str, other: str) -> PythonRead:
        """What is read of ``one``, as one would read it of ``other``."""
        old, new = self.path(one), self.path(other)
        scopes = frozenset(new + s[len(old) :] if f"{s}.".startswith(f"{old}.") else s for s in read.scopes)
        if read.root == self.owner:
            return replace(read, steps=(other, *read.steps[1:]), scopes=scopes)
        return replace(read, root=new + read.root[len(old) :], scopes=scopes)


def with_idle_experts(captured: CapturedBlock) -> CapturedBlock:
    """The same block, with the reads of experts that the run did not call among its reads."""
    modules = dict(captured.block.named_modules(remove_duplicate=False))
    reads = [read for read in captured.reads if not read.is_global]
    added: list[PythonRead] = []
    for siblings in _siblings(captured.block, modules):
        by_place: dict[_ReadPath, dict[str, PythonRead]] = defaultdict(dict)
        for read in reads:
            name = siblings.holder(read)
            if name is not None:
                by_place[siblings.relative(read, name)][name] = read
        for found in by_place.values():
            one, read = next(iter(found.items()))
            moved = (siblings.moved(read, one, other) for other in siblings.names if other not in found)
            added += (there for there in map(partial(_as_now, modules), moved) if there is not None)
    return replace(captured, reads=(*captured.reads, *added)) if added else captured


def _siblings(block: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[_Siblings]:
    """The modules that hold experts' weights, and lists of others of one kind, such as activations beside stacked weights."""
    found = set()
    for pattern, members in expert_groups(dict(block.named_parameters(remove_duplicate=False))).members.items():
        place = next(place for place, part in enumerate(pattern.split(".")) if "{}" in part)
        found.add(tuple(dict.fromkeys(member.split(".")[place] for member in members)))
    below: tuple[str, ...] = ()
    for path, module in modules.items():
        if below and f"{path}.".startswith(below):
            continue
        children = module._modules
        alike = isinstance(module, (nn.ModuleList, nn.ModuleDict)) and len(set(map(type, children.values()))) == 1
        names = next((names for names in found if children.keys() >= set(names)), tuple(children) if alike else ())
        if len(names) > 1:
            siblings = _Siblings(path, names)
            below += tuple(f"{siblings.path(name)}." for name in names)
            yield siblings


def _as_now(modules: Mapping[str, nn.Module], read: PythonRead) -> PythonRead | None:
    """With what lies there now; None where nothing could."""
    if read.root not in modules:  # siblings may hold different modules, such as layers with lists of different lengths
        return None
    holder: Any = modules[read.root]
    for step in read.steps[:-1]:
        holder = lookup(holder, step)
    key = read.steps[-1]
    if holder is MISSING:
        return None
    if isinstance(read.value, Names):
        return replace(read, value=Names(own_names(holder) if key == "__dict__" else frozenset(vars(holder)[key])))
    value = lookup(holder, key)
    noted = snapshot(value)
    return replace(read, value=Unreadable(type(value).__name__) if is_unreadable(value, noted) else noted)
