"""Weights that count as float64 and are stored as they are: a product upcasts the matrices that it multiplies, piece by piece.

A float64 copy of a large block takes four times its memory. Everything that reads expert weights, in users' code and in our
operators, ends in few operations of torch: views, which are taken of the stored weight, and products of two matrices. Only
those are known here. Any other operation gets the whole weight in float64 as long as that is not too large.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hexa_fx.contexts import set_to
from hexa_fx.isolation.size import InPieces
from hexa_fx.large_blocks.listed_stack import ListedStack
from hexa_fx.torch_private import DispatchKey, _disabled_torch_function_impl, _dispatch_has_kernel_for_dispatch_key

_kept: ContextVar[list[torch.Tensor] | None] = ContextVar("pieces", default=None)


def piece_memory_kept() -> AbstractContextManager[None]:
    """A context in which `upcast_piece` keeps its memory, as much as the largest piece takes."""
    return set_to(_kept, [])


def upcast_piece(piece: torch.Tensor) -> torch.Tensor:
    """A float64 tensor (rows, columns) of the same values, laid out as ``piece`` is. It holds until the next one is made."""
    kept = _kept.get()
    if kept is None or piece.device.type != "cpu" or piece.dtype == torch.float64:
        return piece.to(torch.float64)
    if not kept or kept[0].numel() < piece.numel():
        kept[:] = [torch.empty(piece.numel(), dtype=torch.float64, device="cpu")]
    memory = kept[0][: piece.numel()]
    by_columns = piece.stride(0) < piece.stride(1)
    upcast = memory.view(piece.shape[::-1]).t() if by_columns else memory.view(piece.shape)
    return upcast.copy_(piece)


_ATEN = torch.ops.aten

PIECE_BYTES = 4 << 20
"""Float64 bytes that a product holds of a weight at a time: they stay in a core's cache from the upcast to the product."""

_WIDER = 32
"""Times as much on a GPU, which narrow matrices do not keep busy."""

_VIEWS = frozenset(
    {
        _ATEN.alias.default,
        _ATEN.as_strided.default,
        _ATEN.detach.default,
        _ATEN.diagonal.default,
        _ATEN.expand.default,
        _ATEN.permute.default,
        _ATEN.select.int,
        _ATEN.slice.Tensor,
        _ATEN.split.Tensor,
        _ATEN.split_with_sizes.default,
        _ATEN.squeeze.default,
        _ATEN.squeeze.dim,
        _ATEN.squeeze.dims,
        _ATEN.t.default,
        _ATEN.transpose.int,
        _ATEN.unbind.int,
        _ATEN.unfold.default,
        _ATEN.unsqueeze.default,
        _ATEN.view.default,
        _ATEN._unsafe_view.default,
        _ATEN._reshape_alias.default,
    }
)
_GATHERS = frozenset({_ATEN.index.Tensor, _ATEN.index_select.default, _ATEN.clone.default})
"""Their results are copies, held as the weight is stored."""


class TooLarge(MemoryError):
    """An operation needs more of a weight in float64 than the analysis may hold."""


class UpcastWeight(InPieces):
    """A float64 tensor over stored ones, which keep their own dtype. It is only read.

    Args:
        stored: floating-point tensor, any strides; or experts' tensors that lie apart.
        limit: float64 bytes up to which an operation that is not known here gets a copy of it.
    """

    stored: Tensor | ListedStack
    limit: int
    __torch_function__ = _disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, stored: Tensor | ListedStack, limit: int) -> UpcastWeight:
        like = stored.empty() if isinstance(stored, ListedStack) else stored
        made: UpcastWeight = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            like.size(),
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=torch.float64,
            device=stored.device,
        )
        made.stored, made.limit = stored.data if isinstance(stored, Tensor) else stored, limit
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"UpcastWeight({tuple(self.shape)} over {self.stored.dtype})"

    @property
    def source(self) -> Tensor:
        """The stored tensor; a copy of those that lie apart."""
        return self.stored if isinstance(self.stored, Tensor) else torch.stack(self.stored.rows())

    def rows(self) -> Sequence[Tensor]:
        """What is stored of every index of the first dimension."""
        return self.stored.unbind() if isinstance(self.stored, Tensor) else self.stored.rows()

    def whole(self) -> Tensor:
        """A float64 copy.

        Raises:
            TooLarge: it would take more than ``limit`` bytes.
        """
        if 8 * self.numel() > self.limit:
            raise TooLarge(
                f"a weight of {self.numel() >> 20} Mi elements would be copied to float64 as a whole; "
                f"the analysis may hold {self.limit / 2**30:.2f} GiB of it"
            )
        return self.source.double()

    def lies_with(self, other: InPieces) -> bool:
        one, two = self.source, other.source
        if one.data_ptr() == two.data_ptr() and one.shape == two.shape and one.stride() == two.stride():
            return True
        return one.dtype == two.dtype and one.shape == two.shape and all(map(torch.equal, one, two))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run(func, args, kwargs or {})


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operation writes to."""
    named = {**{schema.name: value for schema, value in zip(func._schema.arguments, args)}, **kwargs}
    targets = (schema.name for schema in func._schema.arguments if schema.alias_info and schema.alias_info.is_write)
    return [named.get(name) for name in targets]


def upcast(stored: Tensor | Sequence[Tensor], limit: int) -> UpcastWeight:
    """A weight of a large block, or those of its experts, which lie apart, as one (E, ...); see `UpcastWeight`."""
    return UpcastWeight(stored if isinstance(stored, Tensor) else ListedStack(tuple(stored)), limit)


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func(*args, **kwargs)``, an operation below autograd that is given a `UpcastWeight`."""
    if func in _PRODUCTS:
        return _PRODUCTS[func](*args, **kwargs)
    first = args[0]
    if isinstance(first, UpcastWeight) and (func in _VIEWS or func in _GATHERS):
        taken = first.stored.seen_through(func, *args[1:], **kwargs) if isinstance(first.stored, ListedStack) else None
        if taken is None:
            taken = func(first.source, *args[1:], **kwargs)
        if isinstance(taken, Tensor | ListedStack):
            return UpcastWeight(taken, first.limit)
        return [UpcastWeight(part, first.limit) for part in taken]
    if isinstance(first, UpcastWeight) and _keeps_dtype(func, args, kwargs):
        return UpcastWeight(first.stored, first.limit)
    if func in _JOINS and _all_upcast(args[0]):
        return _joined(func, args, kwargs)
    if func.namespace == "hexa" and _dispatch_has_kernel_for_dispatch_key(func.name(), _GENERAL):
        # its plain torch version, which comes back here for its products
        return func._op_dk(DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
    if func._can_decompose():
        return func.decompose(*args, **kwargs)
    if any(isinstance(value, UpcastWeight) for value in written(func, args, kwargs)):
        raise TypeError(f"{func} writes to a weight, which is only read while a block is analysed")
    args, kwargs = pytree.tree_map_only(UpcastWeight, UpcastWeight.whole, (args, kwargs))
    return func(*args, **kwargs)


def is_product(func: Any) -> bool:
    """Whether an operation multiplies matrices, piece by piece."""
    return func in _PRODUCTS


_GENERAL = "CompositeExplicitAutograd"
_JOINS = frozenset({_ATEN.cat.default, _ATEN.stack.default})


def _keeps_dtype(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether it is a conversion to what the weight counts as already."""
    if func is not _ATEN._to_copy.default:
        return False
    asked = {key: value for key, value in kwargs.items() if value is not None and key not in _FORMAT}
    kept = {"dtype": torch.float64, "device": args[0].device}
    return all(key in kept and kept[key] == value for key, value in asked.items())


_FORMAT = frozenset({"memory_format", "non_blocking", "layout", "pin_memory"})


def _all_upcast(values: Any) -> bool:
    return all(isinstance(value, UpcastWeight) for value in values)


def _joined(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> UpcastWeight:
    """Weights one after the other, without a copy where a stack is made of them."""
    parts: list[UpcastWeight] = list(args[0])
    dim, sources = kwargs.get("dim", args[1] if len(args) > 1 else 0), [part.source for part in parts]
    stack = func is _ATEN.stack.default and dim == 0
    return UpcastWeight(ListedStack(tuple(sources)) if stack else func(sources, dim), parts[0].limit)


# -- products ----------------------------------------------------------------------------------------------------------


def _mm(a: Tensor, b: Tensor) -> Tensor:
    if isinstance(a, UpcastWeight) and isinstance(b, UpcastWeight):
        return _mm(a.whole(), b) if a.numel() < b.numel() else _mm(a, b.whole())
    if isinstance(a, UpcastWeight):
        return _mm(b.t(), a.t()).t()
    assert isinstance(b, UpcastWeight)
    return _rows_times(a, b.source)


def _rows_times(rows: Tensor, matrix: Tensor, out: Tensor | None = None) -> Tensor:
    """(n, K) times (K, N) in its own dtype, upcast by columns."""
    result = rows.new_empty(rows.shape[0], matrix.shape[1]) if out is None else out
    if not result.numel():
        return result
    step = max(1, PIECE_BYTES * (_WIDER if matrix.is_cuda else 1) // (8 * max(1, matrix.shape[0])))
    for start in range(0, matrix.shape[1], step):
        piece = upcast_piece(matrix[:, start : start + step])
        torch.mm(rows, piece, out=result[:, start : start + step])
    return result


def _mm_into(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    if isinstance(b, UpcastWeight) and not isinstance(a, UpcastWeight):
        return _rows_times(a, b.source, out)
    return out.copy_(_mm(a, b))


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    if isinstance(a, UpcastWeight) and isinstance(b, UpcastWeight):
        return _bmm(a.whole(), b) if a.numel() < b.numel() else _bmm(a, b.whole())
    if isinstance(a, UpcastWeight):
        return _bmm(b.transpose(1, 2), a.transpose(1, 2)).transpose(1, 2)
    assert isinstance(b, UpcastWeight)
    result = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    for number, (rows, matrix) in enumerate(zip(a, b.rows())):
        result[number] = _rows_times(rows, matrix)
    return result


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return alpha * torch.mm(a, b) + beta * _whole(bias)


def _baddbmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return alpha * torch.bmm(a, b) + beta * _whole(bias)


def _mv(matrix: Tensor, vector: Tensor) -> Tensor:
    return _mm(_whole(vector)[None], matrix.t())[0] if isinstance(matrix, UpcastWeight) else matrix @ _whole(vector)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.whole() if isinstance(tensor, UpcastWeight) else tensor


_PRODUCTS: dict[Any, Callable[..., Tensor]] = {
    _ATEN.mm.default: _mm,
    _ATEN.mm.out: _mm_into,
    _ATEN.bmm.default: _bmm,
    _ATEN.mv.default: _mv,
    _ATEN.addmm.default: _addmm,
    _ATEN.baddbmm.default: _baddbmm,
}
