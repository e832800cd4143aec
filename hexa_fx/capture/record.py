"""Records one block on given inputs, and puts everything back as it was."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx
from torch import nn
from torch.utils._pytree import tree_leaves

from hexa_fx.capture.calls import Unreadable
from hexa_fx.capture.copies import copied
from hexa_fx.capture.held_reads import HeldReads
from hexa_fx.capture.host import visible_host
from hexa_fx.capture.recorder import Recorder
from hexa_fx.capture.records import ModuleCall, NodeRecord, record_of
from hexa_fx.capture.stir import stirred_parameters
from hexa_fx.errors import CaptureError
from hexa_fx.ir import HeldValue

UNKNOWN = object()
"""Stands for a stored value that is neither None nor made of tensors of the run."""


@dataclass(frozen=True)
class StoredValue:
    """An attribute that the run set on a module: ``value`` with nodes for tensors, or `UNKNOWN`."""

    path: str
    name: str
    value: Any

    def __str__(self) -> str:
        return f"{self.path}.{self.name}" if self.path else f"self.{self.name}"


@dataclass(frozen=True)
class CapturedBlock:
    """A block's run as a straight-line graph. It holds one routing, so it is read but never run in place of the block.

    Args:
        block: the recorded module; ``get_attr`` targets of the graph are relative to it.
        path: its path in the model.
        graph: nodes carry a `hexa_fx.capture.records.NodeRecord` in ``meta["hexa"]``.
        constants: tensors that the code created outside torch's sight, by ``get_attr`` target.
        calls: every submodule call, with its arguments and results as nodes.
        arguments: name and value of every argument of the run in signature order; tensors are given as their placeholder.
        output: the result, with nodes for tensors.
        stored: attributes that the run set on modules. Their nodes are results of the graph beside the output.
        recalled: constants that the block's modules held before the run, outside their parameters and buffers.
        held: what the run read out of objects that the block's modules hold.
        stirred: the random values that stood in for parameters whose elements are all equal, by name.
        as_recorded: the graph before it was brought into canonical form, if that changed it; for people to read.
    """

    block: nn.Module
    path: str
    graph: torch.fx.Graph
    constants: dict[str, torch.Tensor]
    calls: tuple[ModuleCall, ...]
    arguments: tuple[tuple[str, Any], ...]
    output: Any
    stored: tuple[StoredValue, ...] = ()
    recalled: frozenset[str] = frozenset()
    held: tuple[HeldValue, ...] = ()
    stirred: Mapping[str, torch.Tensor] = field(default_factory=dict)
    as_recorded: torch.fx.Graph | None = None

    def tensor_of(self, name: str) -> torch.Tensor:
        """The parameter, buffer or constant behind a ``get_attr`` target, with the value that it had in the run."""
        if name in self.constants:
            return self.constants[name]
        if name in self.stirred:
            return self.stirred[name]
        owner, _, leaf = name.rpartition(".")
        tensor: torch.Tensor = getattr(self.block.get_submodule(owner), leaf)
        return tensor

    @property
    def graph_module(self) -> torch.fx.GraphModule:
        """The recorded run as a printable module."""
        root = nn.Module()
        for node in self.graph.find_nodes(op="get_attr"):
            torch.fx.graph_module._assign_attr(self.tensor_of(str(node.target)).detach(), root, str(node.target))
        return torch.fx.GraphModule(root, self.graph, class_name=f"Captured{type(self.block).__name__}")


def capture(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], path: str = "", seed: int = 0
) -> CapturedBlock:
    """Runs ``block`` once and returns what it did.

    Parameters, buffers and the global random state are left unchanged. Gradients are on, so that the code's own ``no_grad``
    shows. Parameters whose elements are all equal, such as new biases, get random numbers for the run: adding zero or
    multiplying by one would leave no trace. Code that fails under these conditions is run again without them.

    Raises:
        CaptureError: the block does not run on these inputs; the message quotes its error.
    """
    try:
        return _capture(block, args, kwargs, path, seed, as_it_is=False)
    except Exception:
        return _capture(block, args, kwargs, path, seed, as_it_is=True)


def _capture(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], path: str, seed: int, as_it_is: bool
) -> CapturedBlock:
    parameters = dict(block.named_parameters(remove_duplicate=False)) | dict(
        block.named_buffers(remove_duplicate=False)
    )
    bound = _bind_arguments(block, args, kwargs)
    reads = HeldReads(block)
    try:
        with (
            _restored_state(block) as attributes,
            stirred_parameters({} if as_it_is else parameters) as stirred,
            torch.random.fork_rng(devices=[]),
            torch.set_grad_enabled(not as_it_is),
        ):
            recorder = Recorder(parameters, sees_gradients=not as_it_is)
            torch.manual_seed(seed)
            with _emptied() as emptied, reads.noted():
                result, arguments = _run(block, recorder, bound)
            output = recorder.lift_result(result)
            stored = tuple(_stored_values(block, attributes, emptied, recorder))
            kept_before = {id(leaf) for before in attributes.values() for leaf in tree_leaves(list(before.values()))}
            kept_before |= {id(tensor) for tensor in reads.tensors()}
    except CaptureError:
        raise
    except Unreadable as error:
        raise CaptureError(str(error), path=path or type(block).__name__) from error
    except Exception as error:
        raise CaptureError(f"{type(error).__name__}: {error}", path=path or type(block).__name__) from error
    kept = [item.value for item in stored if item.value is not UNKNOWN]
    recorder.graph.output((output, kept) if kept else output).meta["hexa"] = NodeRecord(None)
    recalled = frozenset(name for name, identity in recorder.met.items() if identity in kept_before)
    calls = tuple(recorder.calls)
    return CapturedBlock(
        block,
        path,
        recorder.graph,
        recorder.constants,
        calls,
        arguments,
        output,
        stored,
        recalled=recalled,
        held=reads.values(),
        stirred=stirred,
    )


@contextmanager
def _restored_state(block: nn.Module) -> Iterator[dict[str, dict[str, Any]]]:
    """A context that restores buffers and attributes. Yields every module's attributes as they were, by path."""
    buffers = {name: buffer.detach().clone() for name, buffer in block.named_buffers()}
    attributes = {path: dict(module.__dict__) for path, module in block.named_modules()}
    try:
        yield attributes
    finally:
        for path, module in block.named_modules():
            before = attributes.get(path, {})
            for name in _changed(module, before):
                del module.__dict__[name]
            module.__dict__.update(before)
        with torch.no_grad():
            for name, buffer in block.named_buffers():
                if name in buffers:
                    buffer.copy_(buffers[name])


@contextmanager
def _emptied() -> Iterator[set[tuple[int, str]]]:
    """Notes (module id, attribute) set to None: a result of the run, even where the attribute was None before."""
    noted: set[tuple[int, str]] = set()
    plain = nn.Module.__setattr__

    def noting(module: nn.Module, name: str, value: Any) -> None:
        plain(module, name, value)
        if value is None:
            noted.add((id(module), name))
        else:
            noted.discard((id(module), name))

    nn.Module.__setattr__ = noting  # type: ignore[method-assign, assignment]
    try:
        yield noted
    finally:
        nn.Module.__setattr__ = plain  # type: ignore[method-assign]


def _changed(module: nn.Module, before: dict[str, Any]) -> list[str]:
    return [name for name, value in module.__dict__.items() if name not in before or value is not before[name]]


def _stored_values(
    block: nn.Module, attributes: dict[str, dict[str, Any]], emptied: set[tuple[int, str]], recorder: Recorder
) -> Iterator[StoredValue]:
    for path, module in block.named_modules():
        changed = _changed(module, attributes.get(path, {}))
        emptied_here = (name for owner, name in sorted(emptied) if owner == id(module) and name in module.__dict__)
        for name in dict.fromkeys((*changed, *emptied_here)):
            value = module.__dict__[name]
            yield StoredValue(path, name, recorder.lift(value) if _is_liftable(value) else UNKNOWN)


def _is_liftable(value: Any) -> bool:
    """Whether a value is None, a tensor, or a tuple or list of such, so that a rewritten forward can set it too."""
    if type(value) in (tuple, list):
        return all(_is_liftable(item) for item in value)
    return value is None or isinstance(value, torch.Tensor)


def _bind_arguments(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
    try:
        return inspect.signature(block.forward).bind(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise CaptureError(str(error), path=type(block).__name__) from error


def _run(
    block: nn.Module, recorder: Recorder, bound: inspect.BoundArguments
) -> tuple[Any, tuple[tuple[str, Any], ...]]:
    """Calls the block's forward with copies of the tensors. Returns the result and the named arguments."""
    named: list[tuple[str, Any]] = []

    def given(name: str, value: Any) -> Any:
        fresh = copied(value)
        named.append((name, recorder.placeholder(name, fresh) if isinstance(value, torch.Tensor) else value))
        return fresh

    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            bound.arguments[name] = tuple(given(f"{name}_{index}", item) for index, item in enumerate(value))
        elif kind is inspect.Parameter.VAR_KEYWORD:
            bound.arguments[name] = {key: given(key, item) for key, item in value.items()}
        else:
            bound.arguments[name] = given(name, value)
    with visible_host(block, recorder), recorder:
        return block.forward(*bound.args, **bound.kwargs), tuple(named)


__all__ = ["UNKNOWN", "CapturedBlock", "StoredValue", "capture", "record_of"]
