"""Weights that are one tensor an expert, wherever these lie: a loop over experts reads them as it reads a stacked weight.

`Listed` has the shape of the stack and gives an expert's matrix by its number. Nothing is moved or copied. Kernels on a CPU take it
in place of a weight, and `Gradients` in place of a buffer: every tensor that wants a gradient gets one of its own. Kernels on CUDA
are told where its tensors lie (`Places`). Whatever else comes to one gets the stack (`dense`), a differentiable copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from hexa_fx.torch_private import _are_functorch_transforms_active, _foreach_copy_, untraced, without_autocast

T = TypeVar("T")


class Places(NamedTuple):
    """Where the matrices of listed experts lie.

    Args:
        address: of the lowest one; the others lie a whole number of steps further on.
        table: (parts, E) int32 on their device, how many.
        step: elements.
    """

    address: int
    table: Tensor
    step: int


class Listed:
    """An (E, ...) weight of one tensor an expert, or of several that lie one below the other, as gate and up.

    Args:
        parts: tensors of all experts, of each part: all of one dtype and device, and of one shape but for the rows of a part.
        eager: whether kernels may read them: they are plain tensors, which nothing traces.

    Attributes:
        places: where they lie, once kernels on CUDA are to be told (`hexa_fx.cuda.places`).
    """

    __slots__ = ("device", "dtype", "eager", "places", "shape", "sizes", "tensors", "turned")

    def __init__(self, parts: Sequence[Sequence[Tensor]], eager: bool = True) -> None:
        first = parts[0][0]
        self.tensors, self.eager, self.turned = [tensor for part in parts for tensor in part], eager, False
        self.places: Places | None = None
        self.sizes = [part[0].shape[0] for part in parts]
        self.dtype, self.device = first.dtype, first.device
        self.shape = torch.Size((len(parts[0]), sum(self.sizes), *first.shape[1:]))

    def __repr__(self) -> str:
        return f"Listed({self.dtype} {tuple(self.shape)} on {self.device})"

    def of(self, tensors: list[Tensor], dtype: torch.dtype | None = None) -> Listed:
        """The same of other tensors; of none where only the shape counts."""
        made = object.__new__(Listed)
        made.tensors, made.dtype = tensors, dtype or self.dtype
        made.eager, made.turned, made.sizes, made.places = self.eager, self.turned, self.sizes, None
        made.device, made.shape = self.device, self.shape
        return made

    @property
    def ndim(self) -> int:
        """Of the stack."""
        return len(self.shape)

    def size(self, dim: int) -> int:
        """Of the stack."""
        return self.shape[dim]

    def numel(self) -> int:
        """Of the stack."""
        return self.shape.numel()

    def element_size(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    def pieces(self) -> list[Listed]:
        """Its parts as weights of one part each."""
        return [self] if len(self.sizes) == 1 else [self._piece(number) for number in range(len(self.sizes))]

    def _piece(self, number: int) -> Listed:
        experts, size = self.shape[0], self.sizes[number]
        made = self.of(self.tensors[number * experts : (number + 1) * experts])
        inner = (*self.shape[1:-1], size) if self.turned else (size, *self.shape[2:])
        made.sizes, made.shape = [size], torch.Size((experts, *inner))
        return made

    def _parts(self, first: int = 0, end: int | None = None) -> list[Sequence[Tensor]]:
        """Tensors of some experts, of each part."""
        return [part[first:end] for part in in_parts(self.tensors, self.shape[0])]

    def __getitem__(self, index: Any) -> Any:
        """The tensor of an expert, a copy where it has several parts; by slices, of which the first takes all experts, theirs."""
        if isinstance(index, tuple):
            return self.each(lambda tensor: tensor[index[1:]])
        tensor = self.tensors[index] if len(self.sizes) == 1 else torch.cat(self.tensors[index :: self.shape[0]])
        return tensor.t() if self.turned else tensor

    def detach(self) -> Listed:
        """Of which nothing wants a gradient."""
        return self.of([tensor.detach() for tensor in self.tensors])

    def each(self, function: Callable[[Tensor], Tensor]) -> Listed:
        """What a differentiable function makes of every tensor."""
        return Listed([[function(tensor) for tensor in part] for part in self._parts()], self.eager)

    def transpose(self, _first: int, _second: int) -> Listed:
        """Every expert's matrix transposed."""
        made = self.of(self.tensors)
        made.places, made.turned = self.places, not self.turned
        made.shape = torch.Size((self.shape[0], self.shape[2], self.shape[1]))
        return made

    def unsqueeze(self, dim: int) -> Listed:
        """As of the stack, behind its first dimension."""
        return self.each(lambda tensor: tensor.unsqueeze(dim - 1))

    def flatten(self, start: int) -> Listed:
        """As of the stack, behind its first dimension."""
        return self.each(lambda tensor: tensor.flatten(start - 1))

    def __mul__(self, other: Listed) -> Listed:
        """Expert by expert."""
        return Listed([[one * two for one, two in zip(self.tensors, other.tensors, strict=True)]], self.eager)

    def to(self, dtype: torch.dtype) -> Listed | Tensor:
        """In another dtype. On a GPU, where a launch for each tensor would take longer than a layer, as a stack."""
        if dtype == self.dtype:
            return self
        if self.device.type == "cuda":
            return self.stack(dtype)
        return self.of([tensor.to(dtype) for tensor in self.tensors], dtype)

    def between(self, first: int, end: int) -> Tensor:
        """A copy of some experts' as one tensor."""
        some = joined(self._parts(first, end))
        return some.transpose(1, 2) if self.turned else some

    def stack(self, dtype: torch.dtype | None = None) -> Tensor:
        """A differentiable copy as one tensor, in another dtype if one is given."""
        if not self.tensors:
            return torch.zeros(self.shape, dtype=dtype or self.dtype, device=self.device)
        with without_autocast():  # under which torch.stack refuses the other 16-bit dtype
            if _are_functorch_transforms_active() or not self.eager:
                whole = joined(self._parts()).to(dtype or self.dtype)
            else:
                whole = Stack.apply(self.sizes, dtype or self.dtype, *self.tensors)
        return whole.transpose(1, 2) if self.turned else whole


def dense(value: Any) -> Any:
    """The stack of a listed weight, which is a differentiable copy; anything else itself."""
    return value.stack() if type(value) is Listed else value


def versions(weight: Tensor | Listed) -> list[int]:
    """How often each of its tensors has been written to."""
    return [tensor._version for tensor in (weight.tensors if isinstance(weight, Listed) else (weight,))]


def tensors_of(values: Iterable[Any]) -> list[Tensor]:
    """Of all listed weights among operands, in order."""
    return [tensor for value in values if type(value) is Listed for tensor in value.tensors]


def joined(parts: Sequence[Sequence[Tensor]]) -> Tensor:
    """One tensor (E, sum of the parts' sizes, ...) of every expert's tensors, one part below the other."""
    if len(parts) == 1:
        return torch.stack([*parts[0]])
    rows = torch.cat([tensor for expert in zip(*parts) for tensor in expert])
    return rows.view(len(parts[0]), -1, *rows.shape[1:])


def separated(whole: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Views of such a tensor, one for every tensor: part by part, and expert by expert within a part."""
    return [row for part in whole.split_with_sizes([*sizes], 1) for row in part.unbind(0)]


def in_parts(tensors: Sequence[T], experts: int) -> list[Sequence[T]]:
    """What there is for every expert of each part, one part after the other, as a sequence for each part."""
    return [tensors[start : start + experts] for start in range(0, len(tensors), experts)]


def wanted_of(gradient: Tensor, sizes: Sequence[int], wanted: Sequence[bool]) -> list[Tensor | None]:
    """`separated`, and None where a tensor wants no gradient."""
    return [part if need else None for part, need in zip(separated(gradient, sizes), wanted, strict=True)]


class Stack(torch.autograd.Function):
    """`joined` in a dtype, of which every tensor that wants a gradient gets one (`shares_of`)."""

    @staticmethod
    def forward(ctx: Any, sizes: Sequence[int], dtype: torch.dtype, *tensors: Tensor) -> Tensor:
        ctx.sizes, ctx.parameters = sizes, tensors
        first, *_ = tensors
        if dtype == first.dtype:
            return joined(in_parts(tensors, len(tensors) // len(sizes)))
        whole = first.new_empty((len(tensors) // len(sizes), sum(sizes), *first.shape[1:]), dtype=dtype)
        _foreach_copy_(separated(whole, sizes), tensors)
        return whole

    @staticmethod
    @untraced
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _, _, *needs = ctx.needs_input_grad
        return None, None, *shares_of(grads[0].to(ctx.parameters[0].dtype), ctx.sizes, needs)


def shares_of(gradient: Tensor, sizes: Sequence[int], wanted: Sequence[bool]) -> list[Tensor | None]:
    """The gradients of tensors, from one of their stack. Each has memory of its own, but on a GPU where all are wanted: there a
    launch for each would take longer than the gradient did.
    """
    shares = wanted_of(gradient, sizes, wanted)
    if gradient.is_cuda and all(wanted):
        return shares
    return [None if share is None else share.clone() for share in shares]


readable_on: dict[str, Callable[[Sequence[Any]], Sequence[Any]]] = {}
"""By device type, what makes operands readable for its kernels, where these do not take listed weights as they are."""


def readable(operands: Sequence[Any], device: str) -> Sequence[Any]:
    """Operands as the kernels of a device type take them."""
    return readable_on[device](operands) if device in readable_on else operands


class Gradients:
    """Takes the gradient of a listed weight of one part, as kernels add it to a buffer.

    Args:
        weight: the weight.
        wanted: of every tensor, whether it wants a gradient.
        buffers: what gradients of single tensors are added to instead, in the accumulators' type; empty for none.
    """

    def __init__(self, weight: Listed, wanted: Sequence[bool], buffers: Sequence[Tensor | None] = ()) -> None:
        self.weight, self.wanted = weight, wanted
        self._buffers = buffers
        self._found: list[Tensor | None] = [None] * len(wanted)

    def add(self, expert: int, value: Tensor) -> None:
        """Adds a tensor that nobody else has, if it is wanted."""
        if not self.wanted[expert]:
            return
        buffer, found = self._buffer(expert), self._found[expert]
        if buffer is not None:
            buffer.add_(value)
        elif found is not None:
            found.add_(value)
        else:
            self._found[expert] = value.to(self.weight.dtype)

    def add_products(self, experts: Iterable[int], a: Iterable[Tensor], b: Iterable[Tensor]) -> None:
        """Adds ``a @ b`` of every expert whose gradient is wanted."""
        wanted, found = self.wanted, self._found  # looked up once: for loops between small products
        mm, dtype = torch.mm, self.weight.dtype
        for expert, left, right in zip(experts, a, b):
            if not wanted[expert]:
                continue
            if not self._buffers and found[expert] is None and left.dtype is dtype:
                found[expert] = mm(left, right)
            elif (buffer := self._buffer(expert)) is None:
                self.add(expert, mm(left, right))
            else:
                buffer.addmm_(left.to(buffer.dtype), right.to(buffer.dtype))

    def _buffer(self, expert: int) -> Tensor | None:
        buffer = self._buffers[expert] if self._buffers else None
        return buffer.t() if buffer is not None and self.weight.turned else buffer

    def results(self) -> list[Tensor | None]:
        """What autograd is given for every tensor: zeros for experts without rows, None where a buffer has taken the gradient."""
        if not self._buffers and not self.weight.turned and all(found is not None for found in self._found):
            return self._found
        buffers = self._buffers or [None] * len(self.wanted)
        each = zip(self.wanted, buffers, self._found, strict=True)
        return [self._result(found) if need and buffer is None else None for need, buffer, found in each]

    def _result(self, found: Tensor | None) -> Tensor:
        if found is None:
            found = torch.zeros(self.weight.shape[1:], dtype=self.weight.dtype, device=self.weight.device)
        return found.t() if self.weight.turned else found
