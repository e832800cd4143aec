"""Tells kernels where the matrices of listed experts lie, so that no parameter is moved or copied.

A weight of listed experts is read from its lowest address on: each matrix lies a whole number of steps from there, and a table on
the device holds how many. So the copy engine needs one tensor map for all of them, whose last dimension is as long as memory, and
whose coordinate in it comes from the table in place of the expert's number; other kernels multiply and add. What does not lie so
(not contiguous, of unlike parts, further apart than a table can tell) is read as a stack, which is a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hexa_fx.codegen.family import PLACES
from hexa_fx.cuda.fallback import Unsupported
from hexa_fx.cuda.planning import Operand, Piece
from hexa_fx.errors import InputError
from hexa_fx.ops.listed import Listed, Places
from hexa_fx.torch_private import DisableTorchFunction

STEPS = (512, 16)
"""Bytes of a step. Torch allocates at multiples of the first, so that it is the same for most weights, as are their kernels' plans;
the copy engine wants multiples of the last."""

MOST = 1 << 31
"""Steps that a table can tell."""

MOST_PARTS = 2
"""Of a weight: gate and up."""

_WHOLE = (1 << 31) - 1
"""Lines of a part where there is one; see templates/include/hexa_fx/types/places.cuh."""

_data_ptr, _is_contiguous = Tensor.data_ptr, Tensor.is_contiguous


def readable(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The operands as kernels take them: listed weights with their places, or what cannot be read so, and biases, as stacks."""
    if Listed not in map(type, args):
        return args
    return tuple([_readable(each) if type(each) is Listed and each.places is None else each for each in args])


def _readable(weight: Listed) -> Listed | Tensor:
    if weight.ndim != 3 or len(weight.sizes) > MOST_PARTS or len(set(weight.sizes)) > 1 or not weight.numel():
        return weight.stack()
    with DisableTorchFunction():  # a mode would be told of every parameter
        lie_well = all(map(_is_contiguous, weight.tensors))
        addresses = tuple(map(_data_ptr, weight.tensors))
    table = _table(addresses, weight.shape[0], weight.element_size(), weight.device.index)
    if not lie_well or table is None:
        return weight.stack()
    made = weight.of(weight.tensors)
    made.places = table.on_this_stream()
    return made


_recorded: set[_Table] = set()
"""Tables that CUDA graphs read."""


class _Table:
    """Where matrices lie, on the device.

    Args:
        places: what kernels are told.
    """

    def __init__(self, places: Places) -> None:
        self._places, self._device = places, places.table.device
        self._stream = torch._C._cuda_getCurrentRawStream(self._device.index)
        self._written: torch.cuda.Event | None = torch.cuda.Event()
        self._written.record(torch.cuda.current_stream(self._device))

    def on_this_stream(self) -> Places:
        """The places, once their table is there for the current stream, if that is another one than the table is written on."""
        if torch.cuda.is_current_stream_capturing():  # which begins when all is done that was asked for
            _recorded.add(self)
        elif self._written is not None and torch._C._cuda_getCurrentRawStream(self._device.index) != self._stream:
            self._written.synchronize()
            self._written = None
        return self._places


def steps_of(addresses: Sequence[int]) -> tuple[int, list[int]] | None:
    """Bytes of a step, and how many lie between the lowest address and each; None if a table cannot tell them."""
    first, low = min(addresses), 0
    for address in addresses:
        low |= address - first
    step = next((step for step in STEPS if not (low | (first & STEPS[-1] - 1)) & step - 1), 0)
    if not step or (max(addresses) - first) // step >= MOST:
        return None
    return step, [(address - first) // step for address in addresses]


@lru_cache(maxsize=4096)
def _table(addresses: tuple[int, ...], experts: int, size: int, index: int) -> _Table | None:
    """Of matrices at these addresses; None if a table cannot tell them."""
    found = steps_of(addresses)
    if found is None:
        return None
    if torch.cuda.is_current_stream_capturing():
        raise InputError(
            "experts lie where they did not before, and a CUDA graph that is being recorded cannot be told where: call the model "
            "once before the recording"
        )
    step, steps = found
    with torch.inference_mode(False):  # it outlives the call
        pinned = torch.tensor(steps, dtype=torch.int32, device="cpu").view(-1, experts).pin_memory()
        # Weights that are gathered move from step to step: the host must not wait each time.
        table = pinned.to(torch.device("cuda", index), non_blocking=True)
    return _Table(Places(min(addresses), table, step // size))


def listed(weight: Tensor) -> tuple[tuple[str, bool], ...]:
    """The option of a kernel that reads a weight of listed experts; no option if they are stacked."""
    return (("listed", True),) if _table_of(weight) is not None else ()


def parts_of(weight: Tensor) -> int:
    """How many matrices an expert has in a weight: gate and up of listed experts may be one each."""
    table = _table_of(weight)
    return 1 if table is None else table.shape[0]


def part_of(weight: Tensor) -> int:
    """Lines of one of them, as it is stored."""
    return weight.shape[1] // parts_of(weight)


def places_of(weight: Tensor, up: Tensor | None = None) -> tuple[Piece, ...]:
    """What the arguments of a kernel end with that reads listed experts, and an up weight of them; nothing if they are stacked.

    Raises:
        Unsupported: only one of both is listed.
    """
    tables = [_table_of(each) for each in (weight, up) if each is not None]
    if all(table is None for table in tables):
        return ()
    if any(table is None for table in tables):
        raise Unsupported("gate or up is a weight of listed experts, the other one a stack")
    own, *of_up = tables
    part = part_of(weight) if parts_of(weight) > 1 else _WHOLE
    return (PLACES.piece(own=own, up=next(iter(of_up), None), part=part),)


def _table_of(weight: Tensor) -> Operand | None:
    assert isinstance(weight, Operand), "operators plan on operands"
    return weight.table
