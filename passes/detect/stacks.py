"""Reads expert weights as one (E, N, K) array, whatever form the user's parameters have."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch.fx import Node

from hexa_fx import operations as ops
from hexa_fx.capture import CapturedBlock, record_of
from hexa_fx.ir import Layout
from hexa_fx.operations import operation
from hexa_fx.passes.detect.tags import ExpertGroups, Tag, expert_counts

Form = Literal["listed", "stacked", "packed"]
Part = Literal["whole", "first", "second", "even", "odd"]
_HALVES: tuple[Part, ...] = ("first", "second", "even", "odd")


@dataclass(frozen=True)
class Stack:
    """A reading of a base as expert matrices.

    Args:
        base: parameter path, or group pattern.
        form: one parameter an expert (``listed``), one (E, ., .) parameter (``stacked``), or one matrix (``packed``).
        layout: ``nk`` if a matrix lies as (out, in).
        part: which output features of the stored matrix this is.
        matrices: (E, N, K) float64 values.
    """

    base: str
    form: Form
    layout: Layout
    part: Part
    matrices: torch.Tensor

    def half(self, part: Part) -> Stack:
        """A half of the output features of this one."""
        return replace(self, part=part, matrices=self.matrices[:, slice_of(part, self.matrices.shape[1] // 2)])


def slice_of(part: Part, size: int) -> slice:
    """Where ``size`` output features lie, which are this part of all."""
    return {
        "whole": slice(None),
        "first": slice(None, size),
        "second": slice(size, None),
        "even": slice(None, None, 2),
        "odd": slice(1, None, 2),
    }[part]


@dataclass(frozen=True)
class WeightTable:
    """Looks up the values of bases."""

    captured: CapturedBlock
    groups: ExpertGroups
    tags: Mapping[Node, Tag]
    _known: dict[str, tuple[Form, torch.Tensor] | None] = field(default_factory=dict, repr=False)

    def stored(self, base: str) -> tuple[Form, torch.Tensor] | None:
        """The base as a float64 tensor with experts first, or None if it holds no experts. Converted once."""
        if base not in self._known:
            self._known[base] = self._read(base)
        return self._known[base]

    def _read(self, base: str) -> tuple[Form, torch.Tensor] | None:
        if base in self.groups.members:
            return "listed", self.captured.stack_in_float64(
                list(map(self.captured.tensor_of, self.groups.members[base]))
            )
        parameter = self._parameter(base)
        if parameter.dim() >= 3:
            return "stacked", parameter
        a_row_each = parameter.dim() == 2 and len(parameter) in expert_counts(self.captured, self.groups)
        shape = None if a_row_each else packed_shape(self.captured, base)
        if shape is None:
            return ("stacked", parameter) if parameter.dim() == 2 else None
        return "packed", parameter.reshape(shape)

    def matrices(self, base: str, out_features: int, in_features: int) -> Iterator[Stack]:
        """Every way to read ``base`` as (E, out_features, in_features), most likely first."""
        stored = self.stored(base)
        if stored is None or stored[1].dim() != 3:
            return
        form, value = stored
        layouts: tuple[tuple[Layout, torch.Tensor], ...] = (("nk", value), ("kn", value.transpose(1, 2)))
        wholes = [Stack(base, form, layout, "whole", matrices) for layout, matrices in layouts]
        yield from (whole for whole in wholes if whole.matrices.shape[1:] == (out_features, in_features))
        for whole in wholes:
            if whole.matrices.shape[1:] == (2 * out_features, in_features):
                yield from (whole.half(part) for part in _HALVES)

    def vectors(self, base: str) -> torch.Tensor | None:
        """The base as (E, features), for a bias."""
        stored = self.stored(base)
        if stored is None or (value := stored[1]).dim() < 2:
            return None
        return value.flatten(1) if value.dim() == 2 or value.shape[1:].numel() == max(value.shape[1:]) else None

    def table(self, base: str) -> tuple[Form, torch.Tensor] | None:
        """The base as (E, numbers an expert), whatever shape an expert's parameter has."""
        stored = self.stored(base)
        if stored is None:
            parameter = self._parameter(base)
            return ("stacked", parameter[:, None]) if parameter.dim() == 1 else None
        form, value = stored
        return form, value.flatten(1) if value.dim() > 1 else value[:, None]

    def _parameter(self, name: str) -> torch.Tensor:
        return self.captured.in_float64(self.captured.tensor_of(name).detach())


def packed_shape(captured: CapturedBlock, base: str) -> tuple[int, ...] | None:
    """How the code reads a parameter of one or two dimensions as (E, ., .), by a view or in chunks of rows; None if it does not."""
    parameter = captured.tensor_of(base)
    left = deque(captured.graph.find_nodes(op="get_attr", target=base))
    while left:
        node = left.popleft()
        value = record_of(node).value
        if isinstance(value, (tuple, list)):
            return (len(value), -1, *parameter.shape[1:])
        if value.dim() == 3 and value.numel() == parameter.numel():
            return tuple(value.shape)
        left += [user for user in node.users if ops.views(user) or ops.casts(user) or operation(user) == "chunk"]
    return None
