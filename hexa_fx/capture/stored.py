"""Attributes that a block's run sets on modules: notes them as results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hexa_fx.capture.recorder import Recorder
from hexa_fx.contexts import attributes_set
from hexa_fx.ir import ModuleAttribute
from hexa_fx.isolation.module_snapshot import ModuleSnapshot

UNKNOWN = object()
"""Stands for a stored value that is neither None nor made of tensors of the run."""


@dataclass(frozen=True)
class StoredValue:
    """An attribute that the run set on a module: ``value`` with nodes for tensors, or `UNKNOWN`."""

    place: ModuleAttribute
    value: Any
    scopes: frozenset[str]
    """Paths of the modules whose code set it."""

    def __str__(self) -> str:
        return str(self.place)


@dataclass
class Settings:
    """Of every attribute that the run sets, by the module's id and name."""

    scopes: dict[tuple[int, str], set[str]] = field(default_factory=dict)
    """Paths of the modules whose code set it."""
    emptied: set[tuple[int, str]] = field(default_factory=set)
    """Set to None at last. That is a result too, though it may have been None before."""

    def has(self, module: Any, name: Any) -> bool:
        """Whether the run has set the attribute by now."""
        return (id(module), name) in self.scopes


@contextmanager
def noted_settings(recorder: Recorder) -> Iterator[Settings]:
    """Notes which attributes the run sets."""
    noted = Settings()
    plain = nn.Module.__setattr__

    def noting(module: nn.Module, name: str, value: Any) -> None:
        plain(module, name, value)
        noted.scopes.setdefault((id(module), name), set()).add(recorder.scopes[-1])
        if value is None:
            noted.emptied.add((id(module), name))
        else:
            noted.emptied.discard((id(module), name))

    with attributes_set(nn.Module, __setattr__=noting):
        yield noted


def _changed(module: nn.Module, before: Mapping[str, Any]) -> list[str]:
    return [name for name, value in module.__dict__.items() if name not in before or value is not before[name]]


def stored_values(
    block: nn.Module, snapshot: ModuleSnapshot, settings: Settings, recorder: Recorder
) -> Iterator[StoredValue]:
    """Attributes that are not what they were at ``snapshot``, or were set to None."""
    for path, module in block.named_modules():
        changed = _changed(module, snapshot.attributes(module))
        emptied_here = (
            name for owner, name in sorted(settings.emptied) if owner == id(module) and name in module.__dict__
        )
        for name in dict.fromkeys((*changed, *emptied_here)):
            value = module.__dict__[name]
            scopes = frozenset(settings.scopes.get((id(module), name), {path}))
            yield StoredValue(
                ModuleAttribute(path, name), recorder.lift(value) if is_liftable(value) else UNKNOWN, scopes
            )


def is_liftable(value: Any) -> bool:
    """Whether a value is None, a tensor, or a tuple, list or dict of such, so that a rewritten forward can set it too."""
    if type(value) in (tuple, list):
        return all(is_liftable(item) for item in value)
    if type(value) is dict:
        return all(isinstance(key, str) and is_liftable(item) for key, item in value.items())
    return value is None or isinstance(value, torch.Tensor)
