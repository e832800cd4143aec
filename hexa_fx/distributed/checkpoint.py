"""Checkpoints in the shape of the original model, which can be written and read under any plan.

Each rank writes its slices with torch.distributed.checkpoint, as chunks of whole tensors under the original names. A checkpoint
therefore loads under another plan, on another number of ranks, or into the unpartitioned model on one device.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as _dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as _dcp_save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim.optimizer import Optimizer

from hexa_fx.distributed.geometry import Chunk
from hexa_fx.distributed.groups import local_part, ranks_of
from hexa_fx.distributed.lockstep import Place, meet
from hexa_fx.distributed.session import PartitionSession
from hexa_fx.distributed.shards import ShardedParameter
from hexa_fx.distributed.slice_states import check_element_wise, is_slice, known_slices
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


log = logging.getLogger(__name__)

Optimizers = Optimizer | Sequence[Optimizer] | None
"""One optimizer, several that share out the model's parameters, or none."""


def listed(optimizer: Optimizers) -> tuple[Optimizer, ...]:
    """All of them."""
    if optimizer is None:
        return ()
    return (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer)


def state_by_name(
    model: nn.Module, optimizers: Sequence[Optimizer], cut: Mapping[str, ShardedParameter]
) -> dict[str, Any]:
    """State and groups of all optimizers. Gradients are put aside, or an optimizer without state would not get any.

    Raises:
        InputError: an optimizer has a parameter that the model does not name. PlanError: it keeps something of a slice that is not
            of the slice's shape.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    held = [parameter for group in groups for parameter in group["params"]]
    if not {id(parameter) for parameter in held} <= {id(parameter) for parameter in model.parameters()}:
        raise InputError("the optimizer has a parameter that the model does not name: build it on this model")
    gradients = [parameter.grad for parameter in held]
    for parameter in held:
        parameter.grad = None
    try:
        found: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizers))
    finally:
        for parameter, gradient in zip(held, gradients):
            parameter.grad = gradient
    for name, shard in cut.items():
        if is_slice(shard) or len(shard.chunks) > 1:  # else a DTensor, which says what it is
            check_element_wise(found["state"].get(name, {}), shard)
    return found


def without_unsaved(found: dict[str, Any], model: nn.Module, path: str | os.PathLike[str]) -> dict[str, Any]:
    """State and groups, without the state of parameters of which a checkpoint has none: they had no gradient, or were frozen.

    If it has none of any, everything, which then misses.

    Raises:
        InputError: the checkpoint has state of a parameter of which these optimizers, which made steps, have none.
    """
    state, saved = found["state"], _saved(path)
    unsaved = [name for name in state if name not in saved]
    if len(unsaved) == len(state):
        return found
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    held = (name for group in found["param_groups"] for name in group["params"])
    new = next((name for name in held if name in trained & saved and name not in state), None)
    if new is not None:
        raise InputError(
            f"the checkpoint {os.fspath(path)!r} has optimizer state of {new!r}, of which this optimizer has none after its steps: "
            "load into a new optimizer"
        )
    if unsaved:
        log.warning(
            "the checkpoint %s has no optimizer state of %r and %d more parameters, which had no gradient then: it begins anew",
            *(os.fspath(path), unsaved[0], len(unsaved) - 1),
        )
    return found | {"state": {name: values for name, values in state.items() if name in saved}}


def _saved(path: str | os.PathLike[str]) -> set[str]:
    """Of which parameters a checkpoint has state. Other names among these do no harm."""
    names, place = set(), "optimizer.state."
    for key in FileSystemReader(path).read_metadata().state_dict_metadata:
        parts = key.removeprefix(place).split(".") if key.startswith(place) else []
        names |= {".".join(parts[:end]) for end in range(1, len(parts))}
    return names


def give_back(model: nn.Module, optimizers: Sequence[Optimizer], found: dict[str, Any]) -> None:
    """Hands loaded state to the optimizers; those of whose parameters nothing was loaded have none afterwards."""
    set_optimizer_state_dict(model, optimizers, found, options=StateDictOptions(strict=False))


class PlanShard(Tensor):
    """A tensor of which this process holds pieces, in the protocol of torch.distributed.checkpoint."""

    _held: Tensor
    _pieces: tuple[Piece, ...]

    @staticmethod
    def __new__(cls, held: Tensor, whole: tuple[int, ...], pieces: tuple[Piece, ...]) -> PlanShard:
        handle = torch.Tensor._make_wrapper_subclass(cls, torch.Size(whole), dtype=held.dtype, device=held.device)
        handle._held = held
        handle._pieces = pieces
        return handle

    def _storage(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(piece.start), torch.Size(piece.size)) for piece in self._pieces]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self._held.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self._storage()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self._storage()

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for piece in self._pieces:
            if index.offset is None or piece.start == tuple(index.offset):
                return piece.of(local_part(self._held))
        raise ValueError(f"no chunk at {index.offset} of {index.fqn!r}")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            handle = args[0]
            return cls(handle._held.detach(), tuple(handle.shape), handle._pieces)
        raise InputError(
            f"{func} of a tensor that lies on several ranks: it can be saved and loaded, and nothing else. To save while training "
            "goes on use hexa_fx.distributed.async_checkpoint.async_save, which copies what torch's async_save cannot"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PlanShard({tuple(self.shape)}, pieces {self._pieces})"


def state_dict(
    model: nn.Module, session: PartitionSession | None = None, optimizer: Optimizers = None
) -> dict[str, Any]:
    """What `save` writes and `load` fills, backed by the live tensors. For direct use with torch.distributed.checkpoint.

    ``model`` holds parameters and buffers by name, ``optimizer`` what `torch.distributed.checkpoint.state_dict` makes of one: state
    by parameter name, and groups. An optimizer that has made no step yet gets its state here.

    Args:
        model: the module itself, not its DDP wrapper.
        session: the running plan; None for a model on one device.
        optimizer: one whose state belongs to the checkpoint, too; or several.

    Raises:
        InputError: the session is not the model's, or the optimizer has a parameter that the model does not name.
        PlanError: the optimizer keeps factors of a slice, or anything else that is not of its shape.
    """
    _check_session(model, session)
    cut = {} if session is None else {shard.name: shard for shard in session.shards}
    with known_slices():
        held = model.state_dict()
        found = {} if optimizer is None else state_by_name(model, listed(optimizer), cut)
    out = {"model": {name: _handle(value, cut.get(name)) for name, value in held.items()}}
    if optimizer is not None:
        for name, values in found["state"].items():
            found["state"][name] = {key: _handle(value, cut.get(name)) for key, value in values.items()}
        out["optimizer"] = found
    return out


def _check_session(model: nn.Module, session: PartitionSession | None) -> None:
    """Slices under other names, or without their session, would be taken for whole parameters."""
    if session is not None and session.model is not model:
        raise InputError(
            "the session is of another module: give the one that optimize_ was called on, not a wrapper or a part"
        )
    if session is None and any(
        isinstance(held, PartitionSession) for part in model.modules() for held in vars(part).values()
    ):
        raise InputError("the model's experts are spread over devices: give its session, too, model.partition")


def _handle(value: Any, shard: ShardedParameter | None) -> Any:
    """What torch.distributed.checkpoint can write and read of a value: of one that is cut, a handle."""
    if shard is None or not isinstance(value, Tensor) or value.shape != shard.parameter.shape:
        return value
    return PlanShard(value.detach(), shard.whole, pieces_of(value, shard))


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    session: PartitionSession | None = None,
    optimizer: Optimizers = None,
) -> None:
    """Writes a checkpoint folder, which appears under its name only once every rank has written its part.

    Args:
        path: the folder.
        model, session, optimizer: as for `state_dict`.

    Raises:
        InputError, PlanError: as for `state_dict`; or parameters lie on data-parallel axes that the session does not know.
        RankError: a rank was lost while writing. A checkpoint that was there before is untouched.
    """
    target, partial = os.fspath(path), f"{os.fspath(path)}.partial"
    contents = begun(partial, model, session, optimizer)
    if session is None:
        _dcp_save(contents, checkpoint_id=partial, no_dist=True)
    else:
        with session.guard("writing a checkpoint"):
            _dcp_save(contents, checkpoint_id=partial, process_group=session.everyone)
    together(session, "after writing a checkpoint")
    if is_first(session):
        publish(partial, target)
    together(session, "after publishing a checkpoint")


def begun(partial: str, model: nn.Module, session: PartitionSession | None, optimizer: Optimizers) -> dict[str, Any]:
    """What is to be written to a folder, which is empty then, on all ranks."""
    if is_first(session):
        shutil.rmtree(partial, ignore_errors=True)
    together(session, "before writing a checkpoint")
    contents = state_dict(model, session, optimizer)
    _check_reach(contents, session)
    return contents


def publish(partial: str, target: str) -> None:
    old = f"{target}.old"
    shutil.rmtree(old, ignore_errors=True)
    if os.path.exists(target):
        os.rename(target, old)
    os.rename(partial, target)
    shutil.rmtree(old, ignore_errors=True)


def _check_reach(contents: dict[str, Any], session: PartitionSession | None) -> None:
    """Raises `InputError` if FSDP2 keeps a part of the model on ranks that the session does not know."""
    if session is None:
        return
    known = set(dist.get_process_group_ranks(session.everyone))
    for name, value in contents["model"].items():
        held = value._held if isinstance(value, PlanShard) else value
        if isinstance(held, DTensor) and not ranks_of(held.device_mesh) <= known:
            raise InputError(
                f"{name!r} lies on a mesh that reaches beyond ranks {sorted(known)}, which are all that the session knows: give "
                "optimize_ the data-parallel axes as data_mesh="
            )


def is_first(session: PartitionSession | None) -> bool:
    return session is None or dist.get_rank(session.everyone) == 0


def together(session: PartitionSession | None, when: str) -> None:
    if session is None:
        return
    meet(session.groups, Place.CHECKPOINT)
    session.join(when)
    for host in session.data.hosts:
        with session.guard(when):
            dist.barrier(host)


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    session: PartitionSession | None = None,
    optimizer: Optimizers = None,
) -> None:
    """Reads a checkpoint, which `save` may have written under another plan, into the live model and optimizer.

    Args:
        path: the folder.
        model, session, optimizer: as for `state_dict`; changed in place.

    Raises:
        InputError: there is no complete checkpoint at this path, or it is of something else; or as for `state_dict`.
        RankError: a rank was lost while reading. The model and the optimizer may be half loaded: load again, or end.
    """
    found = _whole(os.fspath(path))
    contents = state_dict(model, session, optimizer)
    _check_reach(contents, session)
    if optimizer is not None:
        contents["optimizer"] = without_unsaved(contents["optimizer"], model, found)
    group = {"no_dist": True} if session is None else {"process_group": session.everyone}
    guard = nullcontext() if session is None else session.guard("reading a checkpoint")
    try:
        with torch.no_grad(), guard:
            _dcp_load(contents, checkpoint_id=found, **group)
    except CheckpointException as error:
        raise _explained(error, found) from error
    if optimizer is not None:
        state = contents["optimizer"]["state"].items()
        contents["optimizer"]["state"] = {
            name: {key: value._held if isinstance(value, PlanShard) else value for key, value in values.items()}
            for name, values in state
        }
        give_back(model, listed(optimizer), contents["optimizer"])
    if session is not None:
        session.invalidate()


def _explained(error: CheckpointException, path: str) -> BaseException:
    """What torch found while it compared what is saved with what is asked for, as a sentence; any other error as it is."""
    found = next(
        (one for one, _ in error.failures.values() if "Missing key" in str(one) or "mismatch" in str(one)), None
    )
    if found is None:
        return error
    said = str(found).splitlines()[0].rstrip(".")
    return InputError(
        f"the checkpoint {path!r} does not fit: {said}. Load into a model of the same kind, and with an optimizer only if it was "
        "saved with one"
    )


def _whole(path: str) -> str:
    """The folder to read. If a job died while exchanging the old folder for the new one, that is the old one."""
    for folder in (path, f"{path}.old"):
        if is_complete(folder):
            return folder
    raise InputError(f"{path!r} holds no complete checkpoint: its .metadata, which is written last, is missing")


def is_complete(path: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint folder was written completely."""
    return os.path.exists(os.path.join(os.fspath(path), ".metadata"))
