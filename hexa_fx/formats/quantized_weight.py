"""A packed weight as a tensor: operators that know it read its format, everything else gets the numbers that it stands for."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hexa_fx.errors import InputError
from hexa_fx.formats import format_of
from hexa_fx.torch_private import _disabled_torch_function_impl

log = logging.getLogger(__name__)

_ATEN = torch.ops.aten

Place: TypeAlias = "tuple[QuantizedWeight, int, int] | None"
"""What matrices lie in, the number of this one among them, and how many they are."""


@cache
def _say_once(operation: str, shape: tuple[int, ...]) -> None:
    log.warning("a packed weight of shape %s is unpacked as a whole by %s", shape, operation)


class QuantizedWeight(Tensor):
    """A frozen weight (E, ., .) of a floating-point ``dtype`` whose memory is packed; or one expert's matrix (., .).

    Taking an expert's matrix from it unpacks that one. Copies, moves to a device and conversions keep it packed; a conversion
    changes in which dtype it is read. Any other operation unpacks all of it, which is logged once.

    Args:
        packed, scales: as ``format`` (a name of `hexa_fx.formats.FORMATS`) says; of one matrix without the experts' dimension.
        dtype: in which it is read.
        transposed: whether the matrices that are packed are the weight's, transposed. Formats share scales along rows, and rows are
            to be those of (N, K).
    """

    packed: Tensor
    scales: tuple[Tensor, ...]
    format: str
    transposed: bool
    place: Place
    """Of one of many matrices that were moved beside each other."""
    lies: str
    """A name of that place, which a compiler compares; empty if there is none."""
    __torch_function__ = _disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, packed: Tensor, scales: Sequence[Tensor], format: str, dtype: torch.dtype, transposed: bool = False
    ) -> QuantizedWeight:
        alone = packed.dim() == 2
        experts, rows, columns = format_of(format).shape_of(packed[None] if alone else packed)
        matrix = (columns, rows) if transposed else (rows, columns)
        shape = matrix if alone else (experts, *matrix)
        made: QuantizedWeight = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=dtype, device=packed.device
        )
        made._hold(packed, scales, format, transposed)
        return made

    def _hold(self, packed: Tensor, scales: Sequence[Tensor], format: str, transposed: bool) -> None:
        self.packed, self.scales, self.format, self.transposed = packed, tuple(scales), format, transposed
        for number, scale in enumerate(self.scales):
            setattr(self, f"scale{number}", scale)
        self.place, self.lies = None, ""

    @property
    def held(self) -> tuple[Tensor, ...]:
        """The packed tensor and its scales."""
        return (self.packed, *self.scales)

    def lie_in(self, held: Sequence[Tensor]) -> None:
        """Takes these in place of equal ones."""
        packed, *scales = held
        self._hold(packed, scales, self.format, self.transposed)

    @classmethod
    def of(cls, weight: Tensor, format: str, transposed: bool = False) -> QuantizedWeight:
        """A dense weight (E, ., .), packed expert by expert; or a matrix.

        Raises:
            InputError: the format does not take this shape, or there is no such format.
        """
        packed, *scales = _packed(weight, format, transposed)
        return cls(packed, scales, format, weight.dtype, transposed)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"QuantizedWeight({self.format}, {tuple(self.shape)}, {self.dtype}, device={self.device})"

    def expert(self, number: int) -> Tensor:
        """One expert's matrix, unpacked."""
        matrix = format_of(self.format).expert(self.packed, self.scales, number, self.dtype)
        return matrix.t() if self.transposed else matrix

    def dense(self) -> Tensor:
        """All of it, unpacked."""
        if self.dim() == 2:
            return self._stacked().expert(0)
        matrices = format_of(self.format).dense(self.packed, self.scales, self.dtype)
        return matrices.transpose(1, 2) if self.transposed else matrices

    def _stacked(self) -> QuantizedWeight:
        """A matrix as that of the only expert."""
        packed, *scales = (each[None] for each in self.held)
        return QuantizedWeight(packed, scales, self.format, self.dtype, self.transposed)

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """No: such a weight is frozen."""
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if value:
            raise InputError(
                "a packed weight has no gradient: train adapters on it (target_parameters, or target_modules where experts are in "
                "lists), leave its module out of modules_to_save, and ask for gradients of other parameters only"
            )

    def requires_grad_(self, requires_grad: bool = True) -> QuantizedWeight:
        self.requires_grad = requires_grad
        return self

    @property
    def data(self) -> QuantizedWeight:  # type: ignore[override]
        """The same weight, in the same memory."""
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, QuantizedWeight):
            value = QuantizedWeight.of(value, self.format, self.transposed)
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]  # shape, dtype and device
        self._hold(value.packed, value.scales, value.format, value.transposed)

    def share_memory_(self) -> QuantizedWeight:
        """Moves what it holds to shared memory."""
        for held in self.held:
            held.share_memory_()
        self.place, self.lies = None, ""
        return self

    @property
    def stored_bytes(self) -> int:
        """What it takes in memory."""
        return sum(t.numel() * t.element_size() for t in self.held)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["packed", *(f"scale{n}" for n in range(len(self.scales)))], (self.format, self.dtype, self.transposed)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], about: Any, size: Any, stride: Any) -> QuantizedWeight:
        scales = [inner[f"scale{n}"] for n in range(len(inner) - 1)]
        return cls(inner["packed"], scales, *about)

    def __reduce_ex__(self, protocol: Any) -> Any:
        about = self.format, self.dtype, self.transposed, isinstance(self, torch.nn.Parameter)
        # as bytes, since Python's pickle does not load torch's tensors of 8-bit floats
        return _restored, (self.packed.view(torch.uint8), self.scales, *about)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedWeight:
        copied = _restored(*pytree.tree_map_only(Tensor, Tensor.clone, self.__reduce_ex__(2)[1]))
        memo[id(self)] = copied
        return copied

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        weight = args[0] if args else None
        if isinstance(weight, QuantizedWeight):
            if func in _SAME:
                return weight._with(func, args[1:], kwargs)
            if func is _ATEN.copy_.default:
                return weight._overwrite(args[1])
            if func is _ATEN.select.int and args[1] == 0 and weight.dim() == 3:
                return weight.expert(args[2] % weight.shape[0])
            if func is _ATEN.unbind.int and (len(args) == 1 or args[1] == 0) and weight.dim() == 3:
                return [weight.expert(number) for number in range(weight.shape[0])]
        if func._schema.is_mutable:
            raise InputError(
                f"{func.name()} would change a packed weight, which only copy_ does: merge adapters into the dense weights that "
                "it was packed from, and leave weights without requires_grad out of averages, decay and initialisation"
            )
        found = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, QuantizedWeight)]
        if found[0].dim() == 3:
            _say_once(func.name(), tuple(found[0].shape))
        args, kwargs = pytree.tree_map_only(QuantizedWeight, QuantizedWeight.dense, (args, kwargs))
        return func(*args, **kwargs)

    def _with(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> QuantizedWeight:
        """The same numbers as another object, perhaps elsewhere or read in another dtype."""
        dtype = kwargs.get("dtype") or self.dtype
        kept = {key: value for key, value in kwargs.items() if key not in ("dtype", "memory_format")}
        packed, *scales = (func(t, *args, **kept) for t in self.held)
        return QuantizedWeight(packed, scales, self.format, dtype, self.transposed)

    def _overwrite(self, source: Tensor) -> QuantizedWeight:
        if not isinstance(source, QuantizedWeight):
            numbers, own = source.to(self.device), self if self.dim() == 3 else self._stacked()
            matrices = numbers.view(own.shape)
            # DDP copies to weights what it read from them, and packing again may round scales again.
            if all(torch.equal(own.expert(n).to(numbers.dtype), matrix) for n, matrix in enumerate(matrices)):
                return self
            held = _packed(numbers, self.format, self.transposed)
        elif (source.format, source.transposed) == (self.format, self.transposed):
            held = source.held
        else:
            raise InputError(f"a weight packed as {source.format} cannot be copied to one packed as {self.format}")
        for mine, other in zip(self.held, held, strict=True):
            mine.copy_(other)
        return self


_SAME = frozenset(
    {_ATEN.detach.default, _ATEN.alias.default, _ATEN.clone.default, _ATEN._to_copy.default, _ATEN.empty_like.default}
)


def _packed(weight: Tensor, format: str, transposed: bool) -> tuple[Tensor, ...]:
    """The packed tensor of a dense weight or matrix, and its scales."""
    matrices = weight.transpose(-1, -2) if transposed else weight
    if weight.dim() == 3:
        return format_of(format).pack_all(matrices)
    return tuple(each[0] for each in format_of(format).pack_all(matrices[None]))


def _restored(
    packed: Tensor, scales: Sequence[Tensor], format: str, dtype: torch.dtype, transposed: bool, parameter: bool
) -> QuantizedWeight:
    made = QuantizedWeight(packed.view(format_of(format).dtype), scales, format, dtype, transposed)
    return torch.nn.Parameter(made, requires_grad=False) if parameter else made  # type: ignore[return-value]


torch.serialization.add_safe_globals([_restored])
