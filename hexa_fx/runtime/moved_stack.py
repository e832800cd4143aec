"""Per-expert parameters that lie in one stacked tensor, which CUDA kernels read: the same objects, whose memory has moved there.

Each keeps a storage of its own, over its part, so that files, copies and what ``state_dict`` gives are those of single tensors.
When something moves a parameter away again (``model.to``, ``half``, deepcopy, ``load_state_dict(assign=True)``, ...), the next
forward notices and lays the parameters side by side again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, UntypedStorage, is_grad_enabled, nn
from torch.multiprocessing.reductions import StorageWeakRef

from hexa_fx.isolation.size import owns_its_storage
from hexa_fx.jit.errors import DriverError
from hexa_fx.jit.mapped_memory import MappedMemory
from hexa_fx.ops.listed import separated, wanted_of
from hexa_fx.ops.rows import contiguous_strides
from hexa_fx.runtime.guards import GuardMiss
from hexa_fx.runtime.paths import MOVING
from hexa_fx.torch_private import DisableTorchFunction, storage_behind

PIECE_BYTES = 512 << 20
"""How much of a large weight is on a GPU twice while it moves, unless one expert is larger."""

REPACK_LIMIT = 3
"""Moves in a row after which something else evidently owns the memory, and the weights are copied instead."""

logger = logging.getLogger(__name__)
Parts = Sequence[Sequence[Tensor]]
_version, _requires_grad = attrgetter("_version"), attrgetter("requires_grad")
_made: dict[int, tuple[StorageWeakRef, int]] = {}
"""Storages of stacks that were made, with their bytes, by where they start."""


class NoRoom(Exception):
    """A device lacks ``needed`` bytes for moving parameters, which are there twice for a while."""

    def __init__(self, needed: int) -> None:
        super().__init__(needed)
        self.needed = needed


class ReadStack(torch.autograd.Function):
    """The stack as a differentiable function of the parameters in it.

    If all want a gradient these are slices of one; where only some do, each has a tensor of its own.
    """

    @staticmethod
    def forward(ctx: Any, stack: Tensor, sizes: Sequence[int], *parameters: Tensor) -> Tensor:
        ctx.sizes, ctx.parameters = sizes, parameters
        return stack.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        _, _, *needs = ctx.needs_input_grad
        parts = wanted_of(grads[0], ctx.sizes, needs)
        return None, None, *(parts if all(needs) else (None if part is None else part.clone() for part in parts))


class MovedStack:
    """The parameters of one weight, and the stack that they lie in.

    Args:
        name: of the weight, for messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.why_copied = ""
        self._stack: Tensor | None = None
        self._parameters: list[Tensor] = []
        self._ids: list[int] = []
        self._pointers: list[int] = []
        self._moves, self._versions = 0, 0

    def read(self, parts: Parts, parameters: Sequence[Tensor]) -> Tensor | None:
        """The stack, which may want a gradient; None if the parameters have to be copied.

        Raises:
            GuardMiss: there is no room for it.
        """
        if not self.lay(parts, parameters):
            return None
        stack = self._stack
        assert stack is not None
        self.note_writes()
        if not is_grad_enabled() or not any(map(_requires_grad, parameters)):
            return stack.detach()
        read: Tensor = ReadStack.apply(stack, [part[0].shape[0] for part in parts], *parameters)
        return read

    def lay(self, parts: Parts, parameters: Sequence[Tensor]) -> bool:
        """Lays parameters side by side that do not lie so. Returns whether they do now."""
        if self.holds(parameters):
            return True
        with MOVING:
            # Another thread may have moved them meanwhile.
            return self.holds(parameters) or self._lay(parts, parameters)

    def has_lost(self, first: Tensor, last: Tensor) -> bool:
        """Whether there is a stack in which the first or the last parameter no longer lies."""
        if self._stack is None:
            return bool(self.why_copied)
        return (first.data_ptr(), last.data_ptr()) != (self._pointers[0], self._pointers[-1])

    @property
    def is_made(self) -> bool:
        """Whether there is a stack."""
        return self._stack is not None

    def note_writes(self) -> None:
        """Counts what was written to parameters as written to the stack: what holds for it as it was no longer does."""
        if self._stack is not None and (versions := _sum_of_versions(self._parameters)) != self._versions:
            torch.autograd.graph.increment_version(self._stack)
            self._versions = versions

    def holds(self, parameters: Sequence[Tensor]) -> bool:
        """Whether these lie in the stack."""
        if self._stack is None or list(map(id, parameters)) != self._ids:
            return False
        with DisableTorchFunction():  # a mode would be told of every parameter
            same = list(map(Tensor.data_ptr, parameters)) == self._pointers
            same = same and self._stack.dtype == parameters[0].dtype and all(map(Tensor.is_contiguous, parameters))
        self._moves = 0 if same else self._moves
        return same

    def _lay(self, parts: Parts, parameters: Sequence[Tensor]) -> bool:
        """Takes over the parameters' memory, or says in ``why_copied`` why it must not."""
        reason = _why_not_movable(parameters)
        # A move may happen inside inference_mode or a device context; the parameters must stay ordinary tensors.
        with torch.inference_mode(False), torch.no_grad(), DisableTorchFunction():
            stack = None if reason else found(parts)
            if stack is None:
                if reason := reason or self._why_not_move(parameters):
                    if reason != self.why_copied:
                        logger.info("%s is stacked by copying at every forward: %s", self.name, reason)
                    self.why_copied = reason
                    return False
                stack = self._move(parts)
                self._moves += 1
            self._stack, self._parameters, self.why_copied = stack, list(parameters), ""
            self._ids, self._pointers = list(map(id, parameters)), list(map(Tensor.data_ptr, parameters))
        return True

    def _move(self, parts: Parts) -> Tensor:
        try:
            return move(parts)
        except NoRoom as error:
            raise GuardMiss(
                f"the experts' weights of {self.name!r} cannot be laid side by side on {parts[0][0].device}: that takes "
                f"{error.needed / 2**30:.1f} GiB for a while, which are not free; optimize the model on the host and move it, or "
                "use a version of it with stacked weights"
            ) from None

    def _why_not_move(self, tensors: Sequence[Tensor]) -> str:
        if self._moves >= REPACK_LIMIT:
            return "something else moves the experts' storage at every step"
        exchanged = bool(self._ids) and list(map(id, tensors)) != self._ids
        if tensors[0].numel() and len(set(map(Tensor.data_ptr, tensors))) < len(tensors):
            return "some lie in the same memory, and what is written to one is to reach the other"
        if not all(map(owns_its_storage, tensors)):
            return "they are parts of a larger tensor, which code may write to (a flat buffer, FSDP, perhaps)"
        if exchanged and torch.distributed.is_available() and torch.distributed.is_initialized():
            return "the parameters were exchanged in a distributed job (FSDP, perhaps)"
        return ""


def _why_not_movable(tensors: Sequence[Tensor]) -> str:
    """Why the tensors' memory has to stay where it is; empty if it may be moved."""
    if any(type(tensor) is not nn.Parameter for tensor in tensors):
        return "the experts' weights are not plain parameters at the moment (functional_call, a parametrization, ...)"
    return "experts share a parameter" if len(set(map(id, tensors))) != len(tensors) else ""


def _sum_of_versions(tensors: Sequence[Tensor]) -> int:
    with DisableTorchFunction():
        return sum(map(_version, tensors))


def found(parts: Parts) -> Tensor | None:
    """The stack over parameters that lie side by side already, in a tensor of the user's or in a stack that was made; else None.

    Parameters of one part may also lie in rows with others, as where a block reads gate and up as one in eval mode and as two in
    train mode.
    """
    flat = [tensor.data for part in parts for tensor in part]  # so that the stack counts its own versions
    first, rows, inner = flat[0], sum(part[0].shape[0] for part in parts), flat[0].shape[1:]
    whole, size, matrix = _made_around(first), first.element_size(), inner.numel()
    if whole is None and len({tensor.untyped_storage().data_ptr() for tensor in flat}) > 1:
        return None
    step = rows * matrix
    if len(flat) > 1 and len(parts) == 1 and whole is not None:
        step = max(step, (flat[1].data_ptr() - first.data_ptr()) // size)
    begins = [sum(part[0].shape[0] for part in parts[:place]) * matrix for place in range(len(parts))]
    places = [begin + expert * step for begin in begins for expert in range(len(parts[0]))]
    start = first.data_ptr()
    if not all(
        t.is_contiguous() and t.data_ptr() == start + size * place for t, place in zip(flat, places, strict=True)
    ):
        return None
    storage = first.untyped_storage() if whole is None else whole
    offset = (start - storage.data_ptr()) // size
    shape, strides = (len(parts[0]), rows, *inner), (step, *contiguous_strides((rows, *inner)))
    if size * (offset + places[-1] + parts[-1][0].numel()) > storage.nbytes():
        return None
    return torch.empty(0, dtype=first.dtype, device=first.device).set_(storage, offset, shape, strides)  # type: ignore[call-overload]


def _made_around(tensor: Tensor) -> UntypedStorage | None:
    """The storage of the stack that a tensor lies in, if that was made here."""
    address = tensor.data_ptr()
    for start, (reference, nbytes) in _made.items():
        if start <= address < start + nbytes and not reference.expired():
            return storage_behind(reference)
    return None


def _note(stack: Tensor) -> None:
    for start in [start for start, (reference, _) in _made.items() if reference.expired()]:
        del _made[start]
    storage = stack.untyped_storage()
    _made[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()


def move(parts: Parts) -> Tensor:
    """Moves the parameters' data into one new stacked tensor, bit for bit, and returns it.

    The parameters stay the same objects; only their ``.data`` changes. Large weights on a GPU are moved a few experts at a time,
    and what these leave is given back in between, so that there is never a second copy of them.

    Raises:
        NoRoom: the device has no memory for what has to be there twice for a while. The parameters keep their values.
    """
    first, needed = parts[0][0], _nbytes(parts)
    shape = (len(parts[0]), sum(part[0].shape[0] for part in parts), *first.shape[1:])
    memory = None
    if first.is_cuda and needed > PIECE_BYTES:
        try:
            memory = MappedMemory(needed, first.device.index)
        except DriverError as error:
            logger.info("expert weights move all at once: %s", error)
    if memory is not None:
        stack = _moved_in_pieces(parts, memory, shape)
    else:
        if first.is_cuda:
            torch.cuda.empty_cache()  # experts that were moved before lie in blocks of their own
            if needed > torch.cuda.mem_get_info(first.device)[0]:
                raise NoRoom(needed)
        stack = torch.empty(shape, dtype=first.dtype, device=first.device)
        _place(parts, stack)
    _note(stack)
    return stack


def _nbytes(parts: Parts) -> int:
    return sum(tensor.numel() * tensor.element_size() for part in parts for tensor in part)


def _moved_in_pieces(parts: Parts, memory: MappedMemory, shape: tuple[int, ...]) -> Tensor:
    dtype, experts, per_expert = parts[0][0].dtype, shape[0], _nbytes(parts) // shape[0]
    step = max(1, PIECE_BYTES // per_expert)
    for start in range(0, experts, step):
        end = min(start + step, experts)
        torch.cuda.empty_cache()  # what the experts before have left
        try:
            memory.extend(end * per_expert)
        except DriverError:
            raise NoRoom((end - start) * per_expert) from None
        _place([part[start:end] for part in parts], memory.tensor((end, *shape[1:]), dtype)[start:])
    stack = memory.tensor(shape, dtype)
    for parameter, view in _with_views(parts, stack):
        parameter.data = with_own_storage(view)
    return stack


def _place(parts: Parts, stack: Tensor) -> None:
    """Copies the parameters into a stack, and frees their own memory one by one."""
    for parameter, view in _with_views(parts, stack):
        view.copy_(parameter.detach())
        parameter.data = with_own_storage(view)


def _with_views(parts: Parts, stack: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Every parameter, with its place in the stack."""
    sizes = [part[0].shape[0] for part in parts]
    return zip((parameter for part in parts for parameter in part), separated(stack, sizes), strict=True)


def with_own_storage(value: Tensor) -> Tensor:
    """A tensor on the same memory, which it keeps alive, that has a storage for itself; on the meta device a view.

    Whatever looks at storages takes tensors of one storage for one tensor under several names: accelerate saves the first of them
    only, safetensors' ``save_model`` refuses them, and `torch.save` of one writes all.
    """
    if value.is_meta:
        return value
    start = value.storage_offset() * value.element_size()
    with torch.inference_mode(False), torch.no_grad(), DisableTorchFunction():
        part: UntypedStorage = value.untyped_storage()[start : start + value.numel() * value.element_size()]
        return torch.empty(0, dtype=value.dtype, device=value.device).set_(part, 0, value.shape, value.stride())
