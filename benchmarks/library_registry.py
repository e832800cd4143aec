"""What a library's block is for benchmarks/libraries.py, and what blocks of many libraries are built with."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

D, I, E = 16, 24, 4  # noqa: E741


@dataclass(frozen=True)
class LibraryBlock:
    """A block of a library.

    Args:
        distribution: name on the package index. what: class and the options that matter.
        make: builds the block; raises ImportError where the library is not there.
        inputs: positional arguments of a call.
        stand_ins: modules that the library imports and its MoE code does not use; replaced where they are not installed.
        dtypes: of the comparison, the first in which the block runs.
    """

    distribution: str
    what: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    stand_ins: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32)


def tokens(batch: int = 4, sequence: int = 8, width: int = D) -> tuple[Any, ...]:
    """One tensor (batch, sequence, width)."""
    return (torch.randn(batch, sequence, width, generator=torch.Generator().manual_seed(1)),)


def rows() -> tuple[Any, ...]:
    """One tensor (tokens, width)."""
    return (tokens()[0].flatten(0, 1),)


BLOCKS: list[LibraryBlock] = []


def block(distribution: str, what: str, **options: Any) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Adds the decorated function to `BLOCKS`."""

    def add(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        BLOCKS.append(LibraryBlock(distribution, what, make, options.pop("inputs", tokens), **options))
        return make

    return add


def mlp(width: int = D, hidden: int = I) -> nn.Module:
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))


def one_process() -> None:
    """A process group of this process alone."""
    if not dist.is_initialized():
        store = dist.FileStore(tempfile.mkstemp()[1], 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)


class _StandIns:
    """An import finder that makes empty modules of the given names."""

    def __init__(self, roots: tuple[str, ...]) -> None:
        self.roots = roots

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self) if name.split(".")[0] in self.roots else None  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> Any:
        module = mock.MagicMock(name=spec.name)
        module.__path__, module.__version__, module.__file__ = [], "0", spec.name
        return module

    def exec_module(self, module: Any) -> None:
        """Nothing to run."""


@contextmanager
def stand_ins(names: tuple[str, ...]) -> Iterator[None]:
    """Imports of ``names`` that fail otherwise give empty modules inside the block."""
    missing = tuple(name for name in names if importlib.util.find_spec(name) is None)
    finder = _StandIns(missing)
    sys.meta_path.append(finder)  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]
        for name in [name for name in sys.modules if name.split(".")[0] in missing]:
            del sys.modules[name]
