"""Where the elements of a parameter that this process holds lie in the whole one, as boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hexa_fx.distributed.geometry import Chunk
from hexa_fx.distributed.shards import ShardedParameter
from hexa_fx.errors import InputError


@dataclass(frozen=True)
class Piece:
    """A box of ``size``, at ``start`` in the whole tensor and at ``local`` in what this process holds."""

    start: tuple[int, ...]
    local: tuple[int, ...]
    size: tuple[int, ...]

    def of(self, held: Tensor) -> Tensor:
        """The box, as a view of what is held."""
        for dim, (begin, length) in enumerate(zip(self.local, self.size)):
            held = held.narrow(dim, begin, length)
        return held


def pieces_of(held: Tensor, shard: ShardedParameter) -> tuple[Piece, ...]:
    """The boxes of a parameter (or of its gradient or optimizer state) that is cut by the plan and perhaps, within that, by FSDP2.

    Raises:
        InputError: FSDP2 cut it in a way that is not known.
    """
    size, offset = _within(held, shard.held_shape, shard)
    boxes = (_intersection(chunk, size, offset) for chunk in shard.chunks)
    return tuple(box for box in boxes if 0 not in box.size)


def _within(held: Tensor, slice_shape: Sequence[int], shard: ShardedParameter) -> tuple[Sequence[int], Sequence[int]]:
    """Size and offset, in this rank's slice of the plan, of what FSDP2 left to this process."""
    if not isinstance(held, DTensor):
        return slice_shape, [0] * len(slice_shape)
    mesh, placements = held.device_mesh, list(held.placements)
    if isinstance(shard.original, DTensor):  # the last dimension of the mesh is that of the plan
        if mesh.ndim == 1:
            return slice_shape, [0] * len(slice_shape)
        names = mesh.mesh_dim_names
        if names is None:
            raise InputError(f"{shard.name!r} lies on a mesh without names; give them to init_device_mesh")
        mesh, placements = _sliced(mesh, names[:-1]), placements[:-1]
    plain = [Replicate() if p.is_replicate() else Shard(p.dim) for p in placements]  # type: ignore[attr-defined]
    size, offset = compute_local_shape_and_global_offset(torch.Size(slice_shape), mesh, plain)
    return size, offset


def _sliced(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return mesh[names if len(names) > 1 else names[0]]


def _intersection(chunk: Chunk, size: Sequence[int], offset: Sequence[int]) -> Piece:
    """What of a chunk is in the box of ``size`` at ``offset`` of the plan's slice."""
    start, local, length = list(offset), [0] * len(size), list(size)
    dim = chunk.dim
    low = max(chunk.local, offset[dim])
    high = min(chunk.local + chunk.length, offset[dim] + size[dim])
    start[dim], local[dim], length[dim] = chunk.start + low - chunk.local, low - offset[dim], max(0, high - low)
    return Piece(tuple(start), tuple(local), tuple(length))
