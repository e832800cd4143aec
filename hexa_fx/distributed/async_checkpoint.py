"""Checkpoints that are written while training goes on, by torch.distributed.checkpoint's `async_save`."""

from __future__ import annotations

import copy
import logging
import os
from concurrent.futures import Future
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import async_save as _dcp_async_save
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils import _pytree as pytree

from hexa_fx.distributed.checkpoint import Optimizers, Piece, PlanShard, begun, is_first, publish, together
from hexa_fx.distributed.groups import local_part, new_group_of
from hexa_fx.distributed.session import PartitionSession

log = logging.getLogger(__name__)

_groups: WeakKeyDictionary[PartitionSession, Any] = WeakKeyDictionary()
_under_way: WeakKeyDictionary[nn.Module, Saving] = WeakKeyDictionary()


class Saving:
    """A checkpoint that is being written. `wait` for it before the process group is destroyed."""

    def __init__(self, written: Future[Any], path: str, session: PartitionSession) -> None:
        self._session = session
        self._published: Future[None] = Future()
        self._first, self._path = is_first(session), path
        written.add_done_callback(self._publish)

    @property
    def done(self) -> bool:
        """Whether this rank has nothing more to write. Does not communicate."""
        return self._published.done()

    def wait(self) -> None:
        """Until the checkpoint is there under its name, on all ranks. A collective call.

        Raises:
            RankError: a rank was lost while writing. A checkpoint that was there before is untouched.
        """
        with self._session.guard("writing a checkpoint"):
            self._published.result()
        together(self._session, "after publishing a checkpoint")

    def _publish(self, written: Future[Any]) -> None:
        """When the first rank has written its part, the index of all parts is there too."""
        try:
            written.result()
            if self._first:
                publish(f"{self._path}.partial", self._path)
        except BaseException as error:
            log.error("the checkpoint %s is not written: %s", self._path, error)
            self._published.set_exception(error)
        else:
            self._published.set_result(None)


def async_save(
    path: str | os.PathLike[str],
    model: nn.Module,
    session: PartitionSession,
    optimizer: Optimizers = None,
) -> Saving:
    """As `checkpoint.save`, but returns as soon as everything is copied to the host's memory. A collective call.

    Waits for the checkpoint of this model that was begun before, if that is still being written.

    Args:
        path, model, session, optimizer: as for `checkpoint.save`.

    Raises:
        InputError, PlanError, RankError: as for `checkpoint.save`.
    """
    before = _under_way.pop(model, None)
    if before is not None:
        before.wait()
    target, partial = os.fspath(path), f"{os.fspath(path)}.partial"
    contents = begun(partial, model, session, optimizer)
    with session.guard("writing a checkpoint"):
        given = {"checkpoint_id": partial, "process_group": _group(session), "async_stager": _Copies()}
        written: Any = _dcp_async_save(contents, **given)
    saving = _under_way[model] = Saving(written, target, session)
    return saving


def _group(session: PartitionSession) -> Any:
    """A group for the thread that writes: another thread's collectives on the same one would mix with the training's."""
    if session not in _groups:
        ranks = dist.get_process_group_ranks(session.everyone)
        _groups[session] = new_group_of(ranks, backend="gloo")
    return _groups[session]


class _Copies(AsyncStager):
    """Copies what a checkpoint holds to the host, so that training may go on changing it."""

    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        copied: dict[str, Any] = pytree.tree_map(_copied, state_dict)
        return copied

    def synchronize_staging(self) -> None:
        """Copies are complete when `stage` returns."""
        return

    def close(self) -> None:
        """Holds nothing."""
        return


def _copied(value: Any) -> Any:
    if isinstance(value, PlanShard):
        return PlanShard(_on_host(value._held), tuple(value.shape), value._pieces)
    if isinstance(value, DTensor):
        size, start = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
        whole = Piece(tuple(start), (0,) * len(start), tuple(size))
        return PlanShard(_on_host(value), tuple(value.shape), () if 0 in whole.size else (whole,))
    return _on_host(value) if isinstance(value, Tensor) else copy.deepcopy(value)


def _on_host(tensor: Tensor) -> Tensor:
    return local_part(tensor).detach().to("cpu", copy=True)
