"""Runs in eval and in train mode, or with autocast off and on: whether two of them show the same, so that what is found in one
holds of the other.

Code that asks no module for its mode does the same in train mode as in eval mode, and runs once. Other code often does the same
all the same; it is recorded in both, since only that shows it, and searched once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx
from torch import nn

from hexa_fx.capture import CapturedBlock, record_of
from hexa_fx.isolation.held_objects import fields_of
from hexa_fx.isolation.random_state import random_state_kept
from hexa_fx.isolation.training_mode import has_own_train, training_mode
from hexa_fx.passes.detect.graph import UNINITIALISED, is_float, operation
from hexa_fx.passes.detect.operations import CASTS

_OF_THE_RUN = frozenset({"graph", "reads", "collections", "held", "written", "as_recorded"})
"""Fields that are compared otherwise, or that detection does not see."""

_NOTED = ("scope", "writes", "decision", "gradient")

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format)


@contextmanager
def in_mode(block: nn.Module, training: bool) -> Iterator[None]:
    """A context in which the block is in train or eval mode; random numbers that are drawn in it are given back."""
    with training_mode(block, training), random_state_kept():
        yield


def depends_on_mode(captured: CapturedBlock) -> bool:
    """Whether the recorded code may do something else in train mode than in eval mode."""
    return "mode" in captured.asks or any(map(_may_hide_mode, captured.block.modules()))


def _may_hide_mode(module: nn.Module) -> bool:
    """Whether its mode is read by code that nobody sees (TorchScript, compiled or generated code), or set by code of its own."""
    home = type(module).__module__
    generated = home.startswith("torch.") and not home.startswith("torch.nn.")
    return generated or has_own_train(module) or module._compiled_call_impl is not None


def seen_before(captured: CapturedBlock, earlier: Iterable[CapturedBlock]) -> CapturedBlock:
    """The block on the graph of an earlier run that shows the same, with what its own run read; else as it is."""
    same = next((known for known in earlier if same_run(known, captured)), None)
    return (
        captured if same is None else dataclasses.replace(same, reads=captured.reads, collections=captured.collections)
    )


def same_run(first: CapturedBlock, second: CapturedBlock) -> bool:
    """Whether both made the same calls, with the same values, in the same memory, from the same places in the code."""
    if not _same_graph(first.graph, second.graph, ("location", *_NOTED)):
        return False
    names = (field.name for field in dataclasses.fields(CapturedBlock) if field.name not in _OF_THE_RUN)
    return all(_same(getattr(first, name), getattr(second, name)) for name in names)


def same_but_for_casts(first: CapturedBlock, second: CapturedBlock) -> bool:
    """Whether both made the same calls, with the same values, but for casts from one floating dtype to another.

    Args:
        first, second: runs in float64, of which the graphs lose these casts. The second may ask for less than the first.
    """
    for captured in (first, second):
        _drop_casts(captured.graph)
    asks_no_more = all(scopes <= first.asks.get(asked, frozenset()) for asked, scopes in second.asks.items())
    left = [([*map(str, (*run.stored, *run.accesses))], run.changed) for run in (first, second)]
    return asks_no_more and left[0] == left[1] and _same_graph(first.graph, second.graph, _NOTED)


def _drop_casts(graph: torch.fx.Graph) -> None:
    for node in list(graph.nodes):
        source = node.args[0] if operation(node) in CASTS and node.args else None
        if isinstance(source, torch.fx.Node) and is_float(source) and is_float(node):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _same_graph(first: torch.fx.Graph, second: torch.fx.Graph, noted: Sequence[str]) -> bool:
    """Whether their nodes are the same one by one, in what is ``noted`` of them too."""
    memory: tuple[dict[Any, Any], dict[Any, Any]] = {}, {}
    if len(first.nodes) != len(second.nodes):
        return False
    return all(_same_node(one, two, *memory, noted) for one, two in zip(first.nodes, second.nodes))


def _same_node(
    one: torch.fx.Node, two: torch.fx.Node, there: dict[Any, Any], back: dict[Any, Any], noted: Sequence[str]
) -> bool:
    if one.op != two.op or one.name != two.name or one.target != two.target:
        return False
    a, b = record_of(one), record_of(two)
    if there.setdefault(a.storage, b.storage) != b.storage or back.setdefault(b.storage, a.storage) != a.storage:
        return False
    if any(getattr(a, name) != getattr(b, name) for name in noted):
        return False
    if not (_same(one.args, two.args) and _same(one.kwargs, two.kwargs)):
        return False
    if operation(one) in UNINITIALISED and isinstance(a.value, torch.Tensor) and isinstance(b.value, torch.Tensor):
        return _kind(a.value) == _kind(b.value)  # whatever the memory held before
    return _same(a.value, b.value)


def _same(one: Any, two: Any) -> bool:
    """Equality as far as it can be told; nodes by name."""
    if one is two:
        return True
    if type(one) is not type(two):
        return False
    if isinstance(one, torch.fx.Node):
        return bool(one.name == two.name)
    if isinstance(one, torch.Tensor):
        return _same_tensor(one, two)
    if isinstance(one, (tuple, list)):
        return len(one) == len(two) and all(_same(a, b) for a, b in zip(one, two))
    if isinstance(one, Mapping):
        return list(one) == list(two) and all(map(_same, one.values(), two.values()))
    if isinstance(one, slice):
        return _same((one.start, one.stop, one.step), (two.start, two.stop, two.step))
    if (fields := fields_of(one)) is not None:
        return _same(fields, fields_of(two))
    return isinstance(one, (*_PLAIN, frozenset)) and bool(one == two)


def _same_tensor(one: torch.Tensor, two: torch.Tensor) -> bool:
    if _kind(one) != _kind(two):
        return False
    if one.is_meta or (one.data_ptr() != 0 and one.data_ptr() == two.data_ptr()):
        return True
    return bool(torch.equal(one, two))


def _kind(value: torch.Tensor) -> tuple[Any, ...]:
    return value.shape, value.stride(), value.dtype, value.device, value.requires_grad
