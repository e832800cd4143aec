"""The arguments of a launch before addresses are known: which tensor each pointer and tensor map is of, and bytes for the rest.

Every argument struct of ours is pointers followed by numbers, or a few of these one after the other.
"""

from __future__ import annotations

import re
from struct import Struct
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from hexa_fx.jit.tensormap import TENSOR_MAP_BYTES, tensor_map


class Pointer(Protocol):
    """What a pointer is to: a tensor, or one of the classes here. Its address may differ from call to call."""

    def data_ptr(self) -> int: ...


class Inside(NamedTuple):
    """A place inside a tensor, `offset` bytes from its first element."""

    tensor: Tensor
    offset: int

    def data_ptr(self) -> int:
        """Its address."""
        return self.tensor.data_ptr() + self.offset


TensorMap = tuple[Tensor, tuple[Any, ...]]
"""A tensor, and the arguments of `hexa_fx.jit.tensormap.tensor_map` after its address. A plain tuple, as launches make many."""

NO_MAP = bytes(TENSOR_MAP_BYTES)
"""Stands where a launch reads through no map."""

Piece = tuple[tuple[Pointer | None, ...], bytes]
"""Pointers, and the numbers that follow them as they lie in memory."""

Arguments = tuple[Piece, ...]
"""An argument struct."""

_POINTERS = [Struct(f"{count}P") for count in range(20)]


def numbers_of(args: Struct) -> Struct:
    """The numbers behind the pointers that an argument struct begins with."""
    return Struct(re.sub(r"^(\d*P)+", "", args.format))


def packed(arguments: Arguments) -> bytes:
    """The struct with the tensors' present addresses."""
    found = b""
    for pointers, numbers in arguments:
        found += _POINTERS[len(pointers)].pack(*[0 if p is None else p.data_ptr() for p in pointers]) + numbers
    return found


def encoded(maps: tuple[TensorMap | None, ...]) -> bytes:
    """The tensor maps with the tensors' present addresses, one behind the other."""
    return b"".join([NO_MAP if one is None else tensor_map(one[0].data_ptr(), *one[1]) for one in maps])
