"""Works out what a call launches, from the types, shapes, strides and alignment of its operands and from nothing else.

An operator's code runs once on stand-ins for its tensors (`Operand`) and asks for launches in place of making them. What it asks
for holds for all calls that are alike, so it can be made again on other addresses (`hexa_fx.cuda.plan`). The code of a whole layer
can run on stand-ins too: its operators then ask for their launches one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hexa_fx.codegen.family import get_family
from hexa_fx.codegen.spec import KernelSpec
from hexa_fx.cuda.choosing import Card
from hexa_fx.cuda.fallback import Unsupported
from hexa_fx.cuda.kernel import Kernel, kernel_of
from hexa_fx.errors import KernelError
from hexa_fx.ops.listed import Listed
from hexa_fx.ops.rows import contiguous_strides

Shape = tuple[int, ...]


class CannotPlan(KernelError):
    """What a call does cannot be made again on other addresses; says why."""


class Operand:
    """What planning knows of a tensor. It has the attributes of `torch.Tensor` that the operators' code asks for.

    Any other method, and any function of torch, becomes a step of the plan (`Planning.torch`).

    Attributes:
        planning: of the call.
        place: number of the memory that it lies in.
        offset: elements from there to its first one.
        low: the last four bits of the memory's address.
        table: of a weight of listed experts (`hexa_fx.cuda.places`), where their matrices lie. Only kernels read such a weight.
    """

    __slots__ = ("dtype", "low", "offset", "place", "planning", "shape", "strides", "table")

    def __init__(
        self,
        planning: Planning,
        place: int,
        dtype: torch.dtype,
        shape: Shape,
        strides: Shape,
        offset: int = 0,
        low: int = 0,
    ) -> None:
        self.planning, self.place, self.dtype, self.shape, self.strides = planning, place, dtype, shape, strides
        self.offset, self.low = offset, low
        self.table: Operand | None = None

    def stride(self) -> Shape:
        """Of every dimension, in elements."""
        return self.strides

    def size(self, dim: int) -> int:
        """Of one dimension."""
        return self.shape[dim]

    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def element_size(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    def data_ptr(self) -> int:
        """The last four bits of its address, which are all that planning knows."""
        return (self.low + self.offset * self.dtype.itemsize) & 15

    def is_contiguous(self) -> bool:
        """Whether its elements lie one behind the other."""
        each = zip(self.shape, self.strides, contiguous_strides(self.shape), strict=True)
        return not self.numel() or all(size == 1 or stride == dense for size, stride, dense in each)

    def contiguous(self) -> Any:
        """The same elements one behind the other, copied only where they are not."""
        return self if self.is_contiguous() else self.planning.torch(Tensor.contiguous, self)

    def transpose(self, first: int, second: int) -> Operand:
        """A view with two dimensions exchanged."""
        shape, strides = list(self.shape), list(self.strides)
        for of in (shape, strides):
            of[first], of[second] = of[second], of[first]
        return self.view_of(tuple(shape), tuple(strides), self.offset)

    def new_empty(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> Operand:
        """Memory that every call allocates."""
        return self.planning.allocate(tuple(shape), dtype or self.dtype)

    def add_(self, other: Any) -> Operand:
        """Has torch add to it."""
        self.planning.run(Tensor.add_, self, other)
        return self

    def view_of(self, shape: Shape, strides: Shape, offset: int) -> Operand:
        """Another tensor in the same memory."""
        made = Operand(self.planning, self.place, self.dtype, shape, strides, offset, self.low)
        made.table = self.table
        return made

    def __getitem__(self, index: Any) -> Any:
        """A row, or a run of rows; any other part as torch finds it."""
        if not isinstance(index, int | slice):
            return self.planning.torch(Tensor.__getitem__, self, index)
        size, step = self.shape[0], self.strides[0]
        if isinstance(index, int):
            return self.view_of(self.shape[1:], self.strides[1:], self.offset + range(size)[index] * step)
        rows = range(size)[index]
        return self.view_of(
            (len(rows), *self.shape[1:]), (step * rows.step, *self.strides[1:]), self.offset + rows.start * step
        )

    def __getattr__(self, name: str) -> Any:
        method = getattr(Tensor, name)
        return lambda *args, **kwargs: self.planning.torch(method, self, *args, **kwargs)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found: list[Operand] = []
        replaced(args, found.append)
        return found[0].planning.torch(function, *args, **(kwargs or {}))


def replaced(value: Any, by: Callable[[Operand], Any]) -> Any:
    """The value with every `Operand` in it, in lists and tuples too, replaced."""
    if isinstance(value, Operand):
        return by(value)
    if isinstance(value, list | tuple):
        each = [replaced(one, by) for one in value]
        return type(value)._make(each) if hasattr(value, "_make") else type(value)(each)  # type: ignore[attr-defined]
    return value


class TensorMap(NamedTuple):
    """A tensor, and the arguments of `hexa_fx.jit.tensormap.tensor_map` after its address."""

    tensor: Tensor
    args: tuple[Any, ...]


class TileQueue:
    """Stands for the address of a queue of tiles, another one in every launch (`hexa_fx.cuda.plan`)."""


Pointer = Tensor | Operand | TileQueue | None
Piece = tuple[tuple[Pointer, ...], bytes]
"""Pointers, and the numbers that follow them as they lie in memory. Every argument struct is a few of these."""


class Launch(NamedTuple):
    """A kernel with its grid, its argument struct, and tensor maps if it takes any, None where it reads through none."""

    kernel: Kernel
    grid: tuple[int, int, int]
    pieces: tuple[Piece, ...]
    maps: tuple[TensorMap | None, ...] = ()

    @property
    def pointers(self) -> list[Pointer]:
        """What it has the addresses of."""
        of_maps = [one.tensor for one in self.maps if one is not None]
        return [*of_maps, *(pointer for pointers, _ in self.pieces for pointer in pointers)]


class TorchCall(NamedTuple):
    """A function of torch between launches: its arguments, with operands among them, and its results in memory of their own."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[Operand, ...]


class Planning:
    """What a call asks for, while its code runs on stand-ins.

    Args:
        card: what kernels are chosen for.
        float32: how float32 is multiplied, ``tensor`` or ``fast_f32``; `math_of` has more.
        tile_of: chooses the tile of a product, by its key.

    Attributes:
        steps: launches and functions of torch, in order.
        allocated: shape and type of what every call allocates, by place.
    """

    def __init__(self, card: Card, float32: str, tile_of: Callable[[Any], Any]) -> None:
        self.card, self.float32, self.tile_of = card, float32, tile_of
        self.steps: list[Launch | TorchCall] = []
        self.allocated: dict[int, tuple[Shape, torch.dtype]] = {}
        self._whole: list[Operand] = []

    def math_of(self, dtype: torch.dtype) -> str:
        """How elements of this type are multiplied: ``tensor``, ``fast_f32`` (3xTF32) or ``simt``."""
        return self.float32 if dtype == torch.float32 else "simt" if dtype == torch.float64 else "tensor"

    def operand(self, dtype: torch.dtype, shape: Shape, strides: Shape, low: int) -> Operand:
        """A tensor in memory of its own: first those of the call, from place 0 on."""
        made = Operand(self, len(self._whole), dtype, shape, strides, 0, low)
        self._whole.append(made)
        return made

    def listed(self, weight: Listed) -> Operand:
        """A weight of listed experts, whose matrices lie apart, and in the place behind it their table."""
        assert weight.places is not None, "see hexa_fx.cuda.places"
        experts, *matrix = weight.shape
        lines, width = reversed(matrix) if weight.turned else matrix
        made = self.operand(weight.dtype, (experts, lines, width), (weight.places.step, width, 1), 0)
        table = weight.places.table
        made.table = self.operand(table.dtype, tuple(table.shape), contiguous_strides(table.shape), 0)
        return made.transpose(1, 2) if weight.turned else made

    def allocate(self, shape: Shape, dtype: torch.dtype) -> Operand:
        """Memory that every call allocates."""
        made = self.operand(dtype, shape, contiguous_strides(shape), 0)
        self.allocated[made.place] = shape, dtype
        return made

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        pieces: tuple[Piece, ...],
        maps: tuple[TensorMap | None, ...] = (),
    ) -> None:
        """Asks for a launch. One without blocks only counts as use of the kernel.

        Raises:
            Unsupported: an operand is a weight of listed experts, which this kernel does not read.
        """
        made = Launch(kernel, grid, pieces, maps)
        listed = any(isinstance(each, Operand) and each.table is not None for each in made.pointers)
        if listed and not kernel.spec.option("listed"):
            raise Unsupported(f"{kernel.spec.family} reads stacked weights, not those of listed experts")
        self.steps.append(made)

    def torch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Asks for a function of torch. Its results' shapes are those on tensors without data; a view needs no step."""
        schema = getattr(function, "_schema", None)
        if schema.is_mutable if schema is not None else function.__name__.rstrip("_") + "_" == function.__name__:
            raise CannotPlan(f"it also runs {function}")
        known: dict[int, Operand] = {}

        def stand_in(o: Operand) -> Tensor:
            if o.table is not None:
                raise Unsupported(f"{function} would run on a weight of listed experts")
            reach = 1 + o.offset + sum((n - 1) * s for n, s in zip(o.shape, o.strides, strict=True) if n)
            flat = torch.empty(reach, dtype=o.dtype, device="meta")
            known[flat.untyped_storage()._cdata] = o
            return flat.as_strided(o.shape, o.strides, o.offset)

        found = function(*replaced(args, stand_in), **kwargs)
        made: list[Operand] = []

        def operand(t: Any) -> Any:
            if isinstance(t, list | tuple):
                return type(t)(map(operand, t))
            if not isinstance(t, Tensor):
                return t
            base = known.get(t.untyped_storage()._cdata)
            if base is not None and base.dtype == t.dtype:
                return base.view_of(tuple(t.shape), t.stride(), int(t.storage_offset()))
            made.append(self.operand(t.dtype, tuple(t.shape), t.stride(), 0))
            return made[-1]

        result = operand(found)
        if made or result is None:
            self.steps.append(TorchCall(function, replaced(args, self.whole), kwargs, tuple(made)))
        return result

    def run(self, function: Callable[..., Any], *args: Any) -> None:
        """Asks for a function of torch that writes to its arguments."""
        self.steps.append(TorchCall(function, replaced(args, self.whole), {}, ()))

    def whole(self, o: Operand) -> Operand:
        """The same as all of a memory, which torch's functions and callers can be given: a step of the plan makes it of a part."""
        base = self._whole[o.place]
        if (o.offset, o.shape, o.strides) == (0, base.shape, base.strides):
            return base
        made = self.operand(o.dtype, o.shape, o.strides, o.data_ptr())
        self.steps.append(TorchCall(_part, (base, o.shape, o.strides, o.offset), {}, (made,)))
        return made


def _part(base: Tensor, shape: Shape, strides: Shape, offset: int) -> Tensor:
    return base.as_strided(shape, strides, base.storage_offset() + offset)


def planning_of(t: Tensor) -> Planning:
    """Of the call that an operand belongs to."""
    assert isinstance(t, Operand), "operators plan on operands"
    return t.planning


def launch(x: Tensor, spec: KernelSpec, grid: tuple[int, int, int], /, *more: Piece, **fields: Any) -> None:
    """Asks for a launch, in the call that x belongs to, of a kernel with these fields of its argument struct; others are zero.

    Args:
        more: what the arguments end with.
    """
    planning_of(x).launch(kernel_of(spec), grid, (get_family(spec.family).args.piece(**fields), *more))


def is_same_memory(t: Tensor, other: Tensor) -> bool:
    """Whether two operands of a call lie in the same memory."""
    assert isinstance(t, Operand)
    assert isinstance(other, Operand)
    return t.place == other.place
