"""Cutting a layer's expert parameters down to a rank's slice, and remembering what was cut.

Parameters stay the same objects under the same names; only their data shrinks. So hooks, parameter groups and
optimizers without state stay valid, `named_parameters` has the same keys on every rank, and a record of each cut is
enough to write and read checkpoints in the shape of the original model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hexa_fx.errors import PlanError
from hexa_fx.runtime.distributed.geometry import Chunk, Geometry


@dataclass(frozen=True)
class WeightSource:
    """The parameters behind one weight of the canonical node.

    Args:
        parts: one path when the weight is stored stacked, (E, ...). Else, for each part that is concatenated along the
            first dimension of an expert's matrix, one path an expert.
        stacked: whether the parameter has the expert dimension itself.
    """

    parts: tuple[tuple[str, ...], ...]
    stacked: bool


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
    """A parameter, named ``name`` in the model, of shape ``whole`` originally, of which this rank holds ``chunks``."""

    name: str
    parameter: Tensor
    whole: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def cut_layer(model: nn.Module, weights: LayerWeights, lo: int, hi: int) -> list[ShardedParameter]:
    """Shrinks the parameters of a layer to channels ``lo .. hi`` of the intermediate size, in place."""
    cut: dict[str, ShardedParameter] = {}
    for role, source in weights.sources.items():
        for part, paths in enumerate(source.parts):
            chunks = _chunks(weights.geometry, role, source, part, lo, hi)
            for path in paths:
                name = f"{weights.root}.{path}" if weights.root else path
                if name in cut:
                    raise PlanError(f"{name!r} is used twice by the layer, so it cannot be cut")
                cut[name] = _cut_parameter(model, name, chunks)
    return list(cut.values())


def _chunks(geometry: Geometry, role: str, source: WeightSource, part: int, lo: int, hi: int) -> tuple[Chunk, ...]:
    chunks = geometry.chunks(role, lo, hi)
    if source.stacked:
        return chunks
    if len(source.parts) > 1:  # gate and up are parameters of their own: each has only its half
        chunks = (Chunk(chunks[part].dim, lo, 0, hi - lo),)
    return tuple(replace(chunk, dim=chunk.dim - 1) for chunk in chunks)


def _cut_parameter(model: nn.Module, name: str, chunks: tuple[Chunk, ...]) -> ShardedParameter:
    parameter = find_tensor(model, name)
    if type(parameter) not in (nn.Parameter, Tensor):
        raise PlanError(
            f"{name!r} is a {type(parameter).__name__}: partition the model before wrapping it in DDP or FSDP2"
        )
    whole = tuple(parameter.shape)
    with torch.no_grad():
        pieces = [parameter.data.narrow(chunk.dim, chunk.start, chunk.length) for chunk in chunks]
        parameter.data = torch.cat(pieces, dim=chunks[0].dim).contiguous()
    parameter.grad = None
    return ShardedParameter(name, parameter, whole, chunks)


def find_tensor(model: nn.Module, name: str) -> Tensor:
    """A parameter or buffer by its dotted name."""
    value: object = model
    for key in name.split("."):
        value = getattr(value, key, None)
    if not isinstance(value, Tensor):
        raise PlanError(f"the model has no parameter or buffer {name!r}")
    return value
