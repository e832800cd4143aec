"""What a recorded run hands on: the block's graph, and what a graph cannot hold."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx
from torch import nn

from hexa_fx import registry
from hexa_fx.capture.kept import ChangedInPlace, StoredValue
from hexa_fx.capture.records import ModuleCall
from hexa_fx.ir import PythonRead, SourceLocation
from hexa_fx.isolation.module_tree import tensors_by_name
from hexa_fx.isolation.size import is_large, raises_in_pieces, whole_bytes


@dataclass(frozen=True)
class CapturedBlock:
    """A block's run as a straight-line graph. It holds one routing, so it is read but never run in place of the block.

    Args:
        block: the recorded module; ``get_attr`` targets of the graph are relative to it.
        path: its path in the model.
        graph: nodes carry a `hexa_fx.capture.records.NodeRecord` in ``meta["hexa"]``.
        constants: tensors that the code created outside torch's sight, by ``get_attr`` target.
        calls: every submodule call, with its arguments and results as nodes.
        functions: every call of an `autograd.Function`, likewise.
        arguments: name and value of every argument of the run in signature order; tensors are given as their placeholder.
        output: the result, with nodes for tensors.
        stored: what the run put into lists and dicts, then attributes that it set. Their nodes are results of the graph, too.
        changed: other things that the run changed in place.
        nested: constants that were given to the block inside a list, a dict or another argument that is no tensor.
        recalled: constants that the block's modules held before the run, outside their parameters and buffers.
        reads: what the run read from Python.
        handed: paths of a module that set an attribute to what is no tensor, and of another whose code read that.
        in_autocast: paths of the modules whose code switches autocast on or off, and whether on.
        asks: paths of the modules whose code asks for a dtype, a device, a layout, a gradient or a module's mode
            (`hexa_fx.capture.ran_code`).
        held: tensors that lie elsewhere than in parameters and buffers, and what they held before the run.
        written: where those are that torch wrote to.
        changed_parameters: parameters that the run wrote to, by name and the scope whose code does so, and where. They hold what
            they held before.
        replaced: the values that stood in for parameters whose elements are all equal, and others that were given, by name.
        numbers: what stands in for numbers that modules keep and every call asks for, by name.
        dtypes: of parameters and buffers at the end of the run, which may convert a router in its forward.
        analysis_bytes: memory that experiments on the block may hold.
        as_recorded: the graph before it was brought into canonical form, if that changed it.
        written_later: whether what the block was given is written to after its call.
        set_aside: nodes that count as no expert's while one of several runs of the same experts is looked at.
    """

    block: nn.Module
    path: str
    graph: torch.fx.Graph
    constants: dict[str, torch.Tensor]
    calls: tuple[ModuleCall, ...]
    arguments: tuple[tuple[str, Any], ...]
    output: Any
    stored: tuple[StoredValue, ...] = ()
    changed: tuple[ChangedInPlace, ...] = ()
    functions: tuple[ModuleCall, ...] = ()
    recalled: frozenset[str] = frozenset()
    nested: frozenset[str] = frozenset()
    reads: tuple[PythonRead, ...] = ()
    handed: frozenset[tuple[str, str]] = frozenset()
    in_autocast: Mapping[str, bool] = field(default_factory=dict)
    asks: Mapping[str, frozenset[str]] = field(default_factory=dict)
    held: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    written: frozenset[int] = frozenset()
    changed_parameters: Mapping[tuple[str, str], SourceLocation | None] = field(default_factory=dict)
    replaced: Mapping[str, torch.Tensor] = field(default_factory=dict)
    numbers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    as_recorded: torch.fx.Graph | None = None
    analysis_bytes: int = 2 << 30
    written_later: bool = False
    set_aside: frozenset[torch.fx.Node] = frozenset()

    @functools.cached_property
    def code(self) -> str:
        return str(self.graph.python_code("self").src)

    @functools.cached_property
    def whole_bytes(self) -> int | None:
        """Bytes up to which a weight of the block is copied to float64 as a whole, if large ones are to be upcast in pieces."""
        return whole_bytes(self.analysis_bytes) if raises_in_pieces(self.block, self.analysis_bytes) else None

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """The block's parameters and buffers, by every name that they have."""
        return tensors_by_name(self.block)

    def in_float64(self, value: torch.Tensor) -> torch.Tensor:
        """A floating-point tensor in float64, for reading."""
        if self.whole_bytes is not None and is_large(value):
            return self._upcast(value)
        return value.double()

    def stack_in_float64(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Tensors of one shape in float64, (E, ...), for reading."""
        alike = len({(value.shape, value.dtype, value.device) for value in values}) == 1
        if self.whole_bytes is not None and is_large(values[0]) and alike:
            return self._upcast(values)
        return torch.stack([self.in_float64(value.detach()) for value in values])

    def _upcast(self, value: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
        return registry.large_blocks().upcast(value, self.whole_bytes)  # type: ignore[no-any-return]

    def tensor_of(self, name: str) -> torch.Tensor:
        """The parameter, buffer or constant behind a ``get_attr`` target, with the value that it had in the run."""
        for known in (self.constants, self.replaced, self.numbers):
            if name in known:
                return known[name]
        owner, _, leaf = name.rpartition(".")
        return getattr(self.block.get_submodule(owner), leaf)  # type: ignore[no-any-return]

    def value_of(self, name: str) -> Any:
        """What a rewritten forward finds there: a tensor, or a number for which one stood in the run."""
        return self.numbers[name].item() if name in self.numbers else self.tensor_of(name)
