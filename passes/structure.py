"""Reuses the analysis of a block for blocks of the model that differ only in the values of their parameters."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hexa_fx.capture.observe import Observation
from hexa_fx.isolation.held_objects import MODULE_STATE, PLAIN, is_object, items
from hexa_fx.runtime.reads import read_by_forward

if TYPE_CHECKING:
    from hexa_fx.passes import BlockAnalysis

_PLAIN = (int, float, str, bool, type(None))
_LONGEST = 4096


class StructureCache:
    """Analyses by structure: class, parameters' names, shapes and types, plain attributes, and the shapes of the inputs."""

    def __init__(self) -> None:
        self._known: dict[Hashable, BlockAnalysis] = {}

    def find(self, observation: Observation) -> BlockAnalysis | None:
        return self._known.get(_key(observation))

    def add(self, observation: Observation, analysis: BlockAnalysis) -> None:
        self._known[_key(observation)] = analysis


def moved_to(analysis: BlockAnalysis, path: str) -> BlockAnalysis:
    """The same analysis for the identical block at ``path``."""
    return dataclasses.replace(
        analysis,
        path=path,
        rewritten={mode: dataclasses.replace(block, path=path) for mode, block in analysis.rewritten.items()},
        refusals={mode: dataclasses.replace(refusal, path=path) for mode, refusal in analysis.refusals.items()},
        seconds=0.0,
    )


def _key(observation: Observation) -> Hashable:
    block = observation.module
    known: dict[int, Hashable] = {}
    return (
        tuple((name, type(module), _attributes(module, known)) for name, module in block.named_modules()),
        tuple((name, tuple(p.shape), p.dtype, p.device.type) for name, p in block.named_parameters()),
        tuple((name, tuple(b.shape), b.dtype) for name, b in block.named_buffers()),
        _shape(observation.args),
        _shape(observation.kwargs),
    )


def _attributes(module: nn.Module, known: dict[int, Hashable]) -> tuple[tuple[str, Hashable], ...]:
    """Attributes, with the contents of objects among them. A layer number that no method reads does not distinguish blocks."""
    own = {name: value for name, value in module.__dict__.items() if name not in MODULE_STATE}
    return tuple((key, _contents(value, type(module), known)) for key, value in _telling(own, type(module)))


def _telling(values: Mapping[Any, Any], reader: type) -> Iterator[tuple[Any, Any]]:
    for key, value in values.items():
        if "layer" not in str(key) or not isinstance(value, _PLAIN) or _is_read(reader, str(key)):
            yield key, value


def _contents(value: Any, reader: type, known: dict[int, Hashable]) -> Hashable:
    """A value's identity: by value as far as possible; functions and classes by identity, torch objects by type.

    Args:
        known: contents of objects by id; an object that contains itself is represented by its type there.
    """
    if isinstance(value, functools.partial):
        return _contents((value.func, value.args, value.keywords), reader, known)
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, (types.ModuleType, types.MethodType)):
        return id(getattr(value, "__func__", value))
    if not is_object(value):
        return str(type(value))
    if id(value) in known:
        return known[id(value)]
    inside = items(value)
    known[id(value)] = str(type(value))
    if len(inside) > _LONGEST:
        return id(value)
    found: Hashable = tuple((key, _contents(item, reader, known)) for key, item in _telling(inside, reader))
    if isinstance(value, (set, frozenset)):
        found = frozenset(_contents(item, reader, known) for item in value)
    known[id(value)] = type(value), found
    return known[id(value)]


def _is_read(cls: type, name: str) -> bool:
    """Whether a method other than ``__init__``, or a function that forward calls, mentions the attribute."""
    if name in read_by_forward(cls):
        return True
    for owner in cls.__mro__:
        for member_name, member in vars(owner).items():
            member = member.fget if isinstance(member, property) else member
            function = getattr(member, "__wrapped__", getattr(member, "__func__", member))
            if (
                member_name != "__init__"
                and isinstance(function, types.FunctionType)
                and name in _names(function.__code__)
            ):
                return True
    return False


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _shape(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(_shape(item) for item in value)
    if isinstance(value, Mapping):
        return tuple((key, _shape(item)) for key, item in value.items())
    return repr(value) if isinstance(value, _PLAIN) else type(value).__name__
