"""Reuses the analysis of a block for the blocks of the model that are the same but for their numbers."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hexa_fx.capture.observe import Observation

if TYPE_CHECKING:
    from hexa_fx.passes import BlockAnalysis

_PLAIN = (int, float, str, bool, type(None))


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
    return (
        tuple((name, type(module), _attributes(module)) for name, module in block.named_modules()),
        tuple((name, tuple(p.shape), p.dtype, p.device.type) for name, p in block.named_parameters()),
        tuple((name, tuple(b.shape), b.dtype) for name, b in block.named_buffers()),
        _shape(observation.args),
        _shape(observation.kwargs),
    )


def _attributes(module: nn.Module) -> tuple[tuple[str, Hashable], ...]:
    """Plain attributes and functions. A layer number that no method reads does not tell two blocks apart."""
    found: list[tuple[str, Hashable]] = []
    for name, value in module.__dict__.items():
        if name in ("_parameters", "_buffers", "_modules", "training"):
            continue
        if isinstance(value, _PLAIN):
            if "layer" not in name or _is_read(type(module), name):
                found.append((name, value))
        elif isinstance(value, (tuple, list)) and all(isinstance(item, _PLAIN) for item in value):
            found.append((name, tuple(value)))
        elif isinstance(value, types.FunctionType):
            found.append((name, value))
    return tuple(found)


def _is_read(cls: type, name: str) -> bool:
    """Whether a method other than ``__init__`` mentions the attribute."""
    for owner in cls.__mro__:
        for member_name, member in vars(owner).items():
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
