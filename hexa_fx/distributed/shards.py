"""Cuts a layer's expert parameters down to a rank's slice, and remembers what was cut.

Parameters stay the same objects under the same names; only their data shrinks. Hooks, parameter groups and optimizers without
state therefore stay valid, `named_parameters` has the same keys on every rank, and a record of each cut is enough to write and
read checkpoints in the shape of the original model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from hexa_fx.distributed.geometry import Chunk, Geometry
from hexa_fx.errors import PlanError

_OTHER = {torch.float32: torch.float64}


@dataclass(frozen=True)
class WeightSource:
    """The parameters behind one weight of the canonical node.

    Args:
        parts: one path when the weight is stored stacked, (E, ...). Else, for each part that is concatenated along the
            first dimension of an expert's matrix, one path an expert.
        stacked: whether the parameter has the expert dimension itself.
        form: ``concat`` or ``interleaved`` where the parameter holds this weight and another (gate and up of a ``split``
            expert) as halves or alternating channels; both are cut at once.
        dim: the intermediate dimension of the stacked parameter.
        experts: where the experts' matrices lie below each other in one matrix, their number.
    """

    parts: tuple[tuple[str, ...], ...]
    stacked: bool
    form: Literal["own", "concat", "interleaved"] = "own"
    dim: int = 1
    experts: int = 0


@dataclass(frozen=True)
class LayerWeights:
    """The expert weights of one layer, by role (`geometry.ROLES`).

    Args:
        path: the layer's name in the plan.
        root: the module that the sources' paths start from, as a path in the model.
    """

    path: str
    root: str
    geometry: Geometry
    sources: Mapping[str, WeightSource]


@dataclass(frozen=True, eq=False)
class ShardedParameter:
    """The parameter ``name``, originally of shape ``whole``, of which this rank holds ``chunks``."""

    name: str
    parameter: Tensor
    whole: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def cut_layer(model: nn.Module, weights: LayerWeights, lo: int, hi: int) -> list[ShardedParameter]:
    """Shrinks the parameters of a layer to channels ``lo .. hi`` of the intermediate size, in place.

    Raises:
        PlanError: a parameter is missing, used twice by the layer, or not a plain one.
    """
    wanted: dict[str, tuple[Chunk, ...]] = {}
    for role, source in weights.sources.items():
        for part, paths in enumerate(source.parts):
            chunks = _chunks(weights.geometry, role, source, part, lo, hi)
            for path in paths:
                name = f"{weights.root}.{path}" if weights.root else path
                shared = source.form != "own"
                if name in wanted and not (shared and wanted[name] == chunks):
                    raise PlanError(
                        f"{name!r} is used twice by the layer, so it cannot be cut; give each use a parameter of its own"
                    )
                wanted[name] = chunks
    return [_cut_parameter(model, name, chunks) for name, chunks in wanted.items()]


def _chunks(geometry: Geometry, role: str, source: WeightSource, part: int, lo: int, hi: int) -> tuple[Chunk, ...]:
    size, length = geometry.shape.intermediate_size, hi - lo
    if not source.stacked and len(source.parts) > 1:  # gate and up are parameters of their own: each has only its half
        return (Chunk(geometry.dim(role) - 1, lo, 0, length),)
    if source.form == "concat":
        chunks: tuple[Chunk, ...] = (Chunk(source.dim, lo, 0, length), Chunk(source.dim, size + lo, length, length))
    elif source.form == "interleaved":
        chunks = (Chunk(source.dim, 2 * lo, 0, 2 * length),)
    else:
        chunks = tuple(replace(chunk, dim=source.dim) for chunk in geometry.chunks(role, lo, hi))
    if source.experts:
        return _below_each_other(chunks, source, size, length)
    return chunks if source.stacked else tuple(replace(chunk, dim=chunk.dim - 1) for chunk in chunks)


def _below_each_other(chunks: tuple[Chunk, ...], source: WeightSource, size: int, length: int) -> tuple[Chunk, ...]:
    """The chunks of one expert, repeated for every expert."""
    local = sum(chunk.length for chunk in chunks)
    whole = local // length * size if length else size
    return tuple(
        replace(chunk, start=chunk.start + expert * whole, local=chunk.local + expert * local)
        for expert in range(source.experts)
        for chunk in chunks
    )


def _cut_parameter(model: nn.Module, name: str, chunks: tuple[Chunk, ...]) -> ShardedParameter:
    parameter = find_tensor(model, name)
    if type(parameter) not in (nn.Parameter, Tensor):
        raise PlanError(
            f"{name!r} is a {type(parameter).__name__}: partition the model before wrapping it in DDP or FSDP2"
        )
    whole = tuple(parameter.shape)
    with torch.no_grad():
        pieces = [parameter.data.narrow(chunk.dim, chunk.start, chunk.length) for chunk in chunks]
        local = torch.cat(pieces, dim=chunks[0].dim).contiguous()
        # A live graph keeps autograd's record of the whole shape; a detour through another dtype drops it.
        parameter.data = parameter.data.new_empty(0, dtype=_OTHER.get(parameter.dtype, torch.float32))
        parameter.data = local
    parameter.grad = None
    return ShardedParameter(name, parameter, whole, chunks)


def find_tensor(model: nn.Module, name: str) -> Tensor:
    """A parameter or buffer by its dotted name; raises `PlanError` if there is none."""
    value: object = model
    for key in name.split("."):
        value = getattr(value, key, None)
    if not isinstance(value, Tensor):
        raise PlanError(f"the model has no parameter or buffer {name!r}")
    return value
