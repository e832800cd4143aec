"""Reads per-expert parameters as one stacked tensor, without copying them and without the user noticing.

The parameters of the user's experts stay what they are: the same objects with the same names, order, hooks and
``requires_grad``, so that optimizers, ``state_dict`` and ``load_state_dict`` work as before. Only their storage moves:
``parameter.data`` becomes a view of one packed tensor. (Tiny ones are copied where a gradient is wanted, which is faster.) When
something moves the storage away again (``model.to``, ``half``, deepcopy, ``load_state_dict(assign=True)``, ...), the next
forward notices and packs the parameters again.

Every expert's ``.grad`` is a slice of one (E, ...) gradient. For an expert without tokens it is zero, where code that skips such
experts leaves None. Optimizers that act on zero gradients tell the difference: AdamW decays the weight and its moments.
Passing ``top_k_index`` restores None, at the price of one device-to-host copy in backward.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from operator import attrgetter
from typing import Any

import torch
from torch import is_grad_enabled, nn
from torch.compiler import is_compiling

from hexa_fx.contexts import set_to
from hexa_fx.formats.quantized_weight import QuantizedWeight
from hexa_fx.isolation.size import owns_its_storage
from hexa_fx.ops import library
from hexa_fx.runtime import shared_storage
from hexa_fx.runtime.call_kinds import is_foreign, said_of
from hexa_fx.runtime.guards import AGAIN, GuardMiss
from hexa_fx.runtime.paths import MOVING, WeightReader
from hexa_fx.runtime.saved_alone import save_alone
from hexa_fx.runtime.shared_storage import SharedStorage
from hexa_fx.torch_private import (
    DisableTorchFunction,
    _are_functorch_transforms_active,
    _get_tracing_state,
    _len_torch_dispatch_stack,
)

logger = logging.getLogger(__name__)

_of_copies: ContextVar[bool] = ContextVar("hexa_fx_of_copies", default=False)


def moving_copies() -> AbstractContextManager[None]:
    """A context in which parameters that are moved are nobody's but the analysis's."""
    return set_to(_of_copies, True)


REPACK_LIMIT = 3
"""Repackings in a row after which something else evidently owns the storage, and the weights are copied instead."""

COPY_ELEMENTS = 1 << 16
"""Elements up to which a read that needs a gradient copies: torch.cat and its gradient take less time than a Python
autograd function."""

_version = attrgetter("_version")
_requires_grad = attrgetter("requires_grad")


class _ReadPacked(torch.autograd.Function):
    """The packed tensor as a differentiable function of the parameters in it. Backward hands out slices of one gradient."""

    @staticmethod
    def forward(ctx: Any, packed: torch.Tensor, storage: SharedStorage, index: Any, *parameters: Any) -> torch.Tensor:
        ctx.storage, ctx.index = storage, index
        return packed.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        slices = ctx.storage.views(grads[0])
        skipped = _experts_without_tokens(ctx.index, ctx.storage.shape[0])
        needed = ctx.needs_input_grad[3:]
        kept = (
            part if wanted and place % ctx.storage.shape[0] not in skipped else None
            for place, (part, wanted) in enumerate(zip(slices, needed))
        )
        return (None, None, None, *kept)


def _experts_without_tokens(top_k_index: torch.Tensor | None, num_experts: int) -> frozenset[int]:
    if top_k_index is None:
        return frozenset()
    return frozenset(range(num_experts)) - frozenset(top_k_index.reshape(-1).tolist())


class PackedExperts(WeightReader):
    """A weight that is read as a dense tensor (E, ...)."""

    def _bind(self, block: nn.Module) -> None:
        super()._bind(block)
        self._packed: torch.Tensor | None = None
        self._storage: SharedStorage | None = None
        self._parameters: list[torch.Tensor] = []
        self._ids: list[int] = []
        self._pointers: list[int] = []
        self._repacked_in_a_row = 0
        self._versions = 0
        self._copy_reason = ""

    def __repr__(self) -> str:
        parts = self.weight.parts
        state = f"copied: {self._copy_reason}" if self._copy_reason else "packed"
        return f"PackedExperts({self.weight.name}: {len(parts[0])} experts, {len(parts)} part(s), {state})"

    @property
    def is_packed(self) -> bool:
        """Whether the last read took no copy."""
        return self._packed is not None and not self._copy_reason

    def __call__(self, top_k_index: torch.Tensor | None = None) -> torch.Tensor:
        """The stacked weight: (E, N, K), or (E, N) for a bias.

        Args:
            top_k_index: integer ids of the experts chosen in this forward, in any shape. If given, parameters of other
                experts get None as their gradient instead of zeros.

        Raises:
            GuardMiss: an expert or parameter was replaced by something that cannot be stacked.
        """
        if is_compiling() or _traced():
            traced = self._paths.tensors_in_trace()
            self._check_kinds(traced)
            return self._copy(traced)
        parameters = self._paths.tensors()
        if not self._in_place(parameters):
            with MOVING:
                parameters = self._paths.tensors()
                if not self._in_place(parameters) and not self._pack(parameters):
                    return self._copy(parameters)
        packed = self._packed
        assert packed is not None
        self.note_writes()
        if not is_grad_enabled() or not any(map(_requires_grad, parameters)):
            return packed.detach()
        if top_k_index is None and packed.numel() <= COPY_ELEMENTS:
            return self._copy(parameters)
        read: torch.Tensor = _ReadPacked.apply(packed, self._storage, top_k_index, *parameters)
        return read

    def note_writes(self) -> None:
        """As `WeightReader.note_writes`: what holds for the stacked weight as it was (`ops.fp8_weights`, too) no longer does."""
        versions = _sum_of_versions(self._parameters)
        if self._packed is not None and versions != self._versions:
            torch.autograd.graph.increment_version(self._packed)
            self._versions = versions

    def refresh(self) -> None:
        """Checks the module tree, and packs the parameters again if they were moved. Call it before the block has any effect.

        Raises:
            GuardMiss: an expert was replaced or hooked, so that the original code has to run.
        """
        if is_compiling():
            self._check_kinds([self._paths.first_in_trace()])
            return
        self.check()
        if _traced():
            self._check_kinds([self._paths.first_in_trace()])
            return
        if not self._ends_in_place(self._paths.tensors()):
            with MOVING:
                parameters = self._paths.tensors()
                if not self._ends_in_place(parameters):  # another thread may have moved them meanwhile
                    self._pack(parameters)

    def _check_kinds(self, tensors: Sequence[torch.Tensor]) -> None:
        for path, tensor in zip(self._paths.paths, tensors):
            if type(tensor) is nn.Parameter:
                continue
            if isinstance(tensor, QuantizedWeight):  # by way of another block with these experts, perhaps
                raise GuardMiss(f"{'.'.join(path)} was packed after the block was rewritten; {AGAIN}")
            if is_foreign(tensor):
                raise GuardMiss(f"{'.'.join(path)} is {said_of(tensor)}")

    def _ends_in_place(self, parameters: Sequence[torch.Tensor]) -> bool:
        """A quick check, since whatever moves parameters moves all of them. Every read checks each one."""
        if self._packed is None:
            return False
        pointers = self._pointers
        return parameters[0].data_ptr() == pointers[0] and parameters[-1].data_ptr() == pointers[-1]

    def _in_place(self, parameters: Sequence[torch.Tensor]) -> bool:
        packed = self._packed
        if packed is None or list(map(id, parameters)) != self._ids:
            return False
        with DisableTorchFunction():  # a mode would be told of every parameter
            pointers = list(map(torch.Tensor.data_ptr, parameters))
            if pointers != self._pointers:
                # The whole storage may have moved as one, e.g. into shared memory.
                places = self._storage.byte_offsets(packed.element_size()) if self._storage else []
                if pointers != [packed.data_ptr() + place for place in places]:
                    return False
                self._pointers = pointers
            if packed.dtype != parameters[0].dtype or not all(map(torch.Tensor.is_contiguous, parameters)):
                return False
        self._repacked_in_a_row = 0
        return True

    def _pack(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Takes over the parameters' storage, or says in ``_copy_reason`` why it must not."""
        parts: list[Sequence[Any]] = self.in_parts(tensors)
        self._check_kinds(tensors)
        if any(type(tensor).__name__ == "DTensor" for tensor in tensors):
            raise GuardMiss("the experts' weights are distributed tensors")
        reason = _why_not_packable(tensors)
        if not reason and not shared_storage.same_kind(parts):
            raise GuardMiss(f"the experts' parameters of {self.weight.name!r} differ in shape, dtype or device")
        # A repack may happen inside inference_mode or a device context; the parameters must stay ordinary tensors.
        with torch.inference_mode(False), torch.no_grad(), DisableTorchFunction():
            packed = None if reason else shared_storage.adopt(parts)
            if packed is None:
                if reason := reason or self._why_not_move(tensors):
                    self._note_copy(reason)
                    return False
                packed = self._move(parts)
                self._repacked_in_a_row += 1
        self._packed, self._storage = packed, SharedStorage.of(parts)
        self._parameters = list(tensors)
        self._ids, self._pointers = list(map(id, tensors)), list(map(torch.Tensor.data_ptr, tensors))
        self._copy_reason = ""
        save_alone({self._paths.owner_of(path) for path in self._paths.paths})
        return True

    def _move(self, parts: Sequence[Sequence[nn.Parameter]]) -> torch.Tensor:
        views = self._lie_in_one(tensor for part in parts for tensor in part)
        try:
            moved = shared_storage.move(parts)
        except shared_storage.NoRoom as error:
            raise GuardMiss(
                f"the experts' weights of {self.weight.name!r} cannot be laid side by side on {parts[0][0].device}: that takes "
                f"{error.needed / 2**30:.1f} GiB for a while, which are not free; optimize the model on the host and move it, or "
                "use a version of it with stacked weights"
            ) from None
        if views and not _of_copies.get():
            logger.warning(
                "the experts' weights (%s, ...) were views of a larger tensor; they now lie side by side in memory of their own, "
                "and what is written to that tensor no longer reaches them",
                self.weight.parts[0][0],
            )
        return moved

    def _lie_in_one(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether some are views of one larger tensor, which is no stack that was made of parameters before."""
        views = [t for t in tensors if not _is_alone(t)]
        return len({t.untyped_storage().data_ptr() for t in views}) < len(views)

    def _why_not_move(self, tensors: Sequence[torch.Tensor]) -> str:
        if self._repacked_in_a_row >= REPACK_LIMIT:
            return "something else moves the experts' storage at every step"
        exchanged = bool(self._ids) and list(map(id, tensors)) != self._ids
        if tensors[0].numel() and len(set(map(torch.Tensor.data_ptr, tensors))) < len(tensors):
            return "some lie in the same memory since, and what is written to one is to reach the other"
        if self._packed is not None and not exchanged and not all(map(_is_alone, tensors)):
            return "code has laid the parameters into a larger tensor, which it may write to (a flat buffer, FSDP, perhaps)"
        if exchanged and _distributed():
            return "the parameters were exchanged in a distributed job (FSDP, perhaps)"
        return ""

    def _copy(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        # Under autocast torch.stack takes no weights in the other 16-bit dtype, which products cast.
        with nullcontext() if is_compiling() else library.without_autocast():
            return shared_storage.stack(self.in_parts(tensors))

    def _note_copy(self, reason: str) -> None:
        if reason != self._copy_reason:
            logger.info("%s is stacked by copying at every forward: %s", self.weight.name, reason)
        self._copy_reason = reason


def _is_alone(tensor: torch.Tensor) -> bool:
    """Whether nobody else's numbers lie in a parameter's storage."""
    return owns_its_storage(tensor) or shared_storage.is_made_here(tensor)


def _sum_of_versions(tensors: Sequence[torch.Tensor]) -> int:
    with DisableTorchFunction():
        return sum(map(_version, tensors))


def _why_not_packable(tensors: Sequence[torch.Tensor]) -> str:
    """Why the tensors' storage has to stay where it is; empty if it may be moved."""
    if any(type(tensor) is not nn.Parameter for tensor in tensors):
        return "the experts' weights are not plain parameters at the moment (functional_call, a parametrization, ...)"
    if tensors[0].device.type == "meta":
        return "the parameters are on the meta device"
    if len(set(map(id, tensors))) != len(tensors):
        return "experts share a parameter"
    return ""


def _traced() -> bool:
    """Whether a tracer or transform is active: it must see the parameters, and nothing may be moved."""
    return bool(
        _len_torch_dispatch_stack() > 0 or _are_functorch_transforms_active() or _get_tracing_state() is not None
    )


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
