"""Arithmetic on a CPU in which a row's bits do not depend on the rows beside it.

A matrix product sums in another order for another number of rows, and elementwise functions take other code for the last few
elements of a tensor. So rows are multiplied in blocks of fixed sizes, the last one filled up with zeros, and activations are
computed on pieces of a fixed size. That a product gives a row the same bits at every place of a block, and in blocks of every size
used, is tried once for every shape; where it does not, rows are multiplied one by one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import lru_cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from hexa_fx.contexts import set_to
from hexa_fx.ops.cpu import Group, Weight, multiply

log = logging.getLogger(__name__)
R = TypeVar("R")

_active: ContextVar[bool] = ContextVar("fixed_order", default=False)
is_fixed = _active.get
"""Whether this thread's products and activations are to run in a fixed order."""

_BYTES = 64
"""Rows of a block are a cache line of one column, so that every block starts on a cache line."""

_LARGER = (16, 4)
"""Sizes of longer blocks, in blocks, that are taken where they give the same bits."""

_ORDERS = 2
"""In how many orders all rows are tried: a place may show in one column and in some rows alone."""

_PIECE = 1 << 14
"""Elements of an elementwise piece: whole vectors, and too few for torch to give to several threads."""


def fixed_order() -> AbstractContextManager[None]:
    """A context in which this thread's expert operators run in a fixed order."""
    return set_to(_active, True)


def in_fixed_order(function: Callable[..., R]) -> Callable[..., R]:
    """A function of expert operators, in a fixed order."""

    @wraps(function)
    def run(*args: Any) -> R:
        with fixed_order():
            return function(*args)

    return run


def multiply_groups_into(x: Tensor, weight: Weight, bias: Weight | None, groups: Sequence[Group], out: Tensor) -> None:
    """`hexa_fx.ops.cpu.multiply_groups_into` in blocks of fixed sizes."""
    start = 0
    for expert, first, end in groups:
        stop = start + end - first
        _multiply_rows(x[start:stop], weight, bias, expert, out[start:stop])
        start = stop


def _multiply_rows(x: Tensor, weight: Weight, bias: Weight | None, expert: int, out: Tensor) -> None:
    matrix = weight[expert]
    sizes = _sizes(
        x.dtype, matrix.dtype, tuple(matrix.shape), matrix.stride(), bias is not None, torch.get_num_threads()
    )
    place = 0
    while place < len(x):
        left = len(x) - place
        size = next((size for size in sizes if size <= left), sizes[-1])
        taken = min(size, left)
        rows, target = x[place : place + taken], out[place : place + taken]
        place += taken
        if taken == size and _on_a_line(rows):
            target.copy_(multiply(rows, weight, bias, expert))
            continue
        block = x.new_zeros((size, x.shape[1]))
        block[:taken].copy_(rows)
        target.copy_(multiply(block, weight, bias, expert)[:taken])


def _on_a_line(rows: Tensor) -> bool:
    """Whether rows lie as a copy of them would; a product may depend on where its operands lie."""
    return rows.is_contiguous() and rows.data_ptr() % _BYTES == 0


@lru_cache(maxsize=256)
def _sizes(
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    shape: tuple[int, int],
    strides: tuple[int, int],
    has_bias: bool,
    threads: int,
) -> tuple[int, ...]:
    """Numbers of rows, the largest first, for which products with an expert's weight give every row the same bits."""
    least = max(1, _BYTES // dtype.itemsize)
    generator = torch.Generator().manual_seed(0)
    inputs, outputs = shape
    weight = torch.empty_strided((1, *shape), (0, *strides), dtype=weight_dtype)
    weight.copy_(torch.randn((1, *shape), generator=generator, device="cpu"))
    bias = torch.randn((1, outputs), generator=generator, device="cpu").to(weight_dtype) if has_bias else None
    rows = torch.randn((least * _LARGER[0], inputs), generator=generator, device="cpu").to(dtype)
    expected = _in_blocks(rows, least, weight, bias)
    orders = [torch.randperm(len(rows), generator=generator, device="cpu") for _ in range(_ORDERS)]

    def is_fixed(size: int) -> bool:
        return all(_same(_in_blocks(rows[order], size, weight, bias), expected[order]) for order in orders)

    if not is_fixed(least):
        log.warning(
            "products of %d rows depend on the place of a row in them here: rows are multiplied one by one", least
        )
        return (1,)
    return (*(size for size in (least * many for many in _LARGER) if is_fixed(size)), least)


def _in_blocks(rows: Tensor, size: int, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.cat([multiply(block.clone(), weight, bias, 0) for block in rows.split(size)])


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b)


def elementwise(function: Callable[..., Tensor], *operands: Tensor) -> Tensor:
    """``function`` of tensors of one shape, element by element, whose shape the result has.

    Args:
        function: of tensors (n,), which it may overwrite.
    """
    shape, count = operands[0].shape, operands[0].numel()
    pieces = -(-count // _PIECE)
    padded = [operand.new_empty(pieces * _PIECE) for operand in operands]
    for whole, operand in zip(padded, operands, strict=True):
        whole[:count].view(shape).copy_(operand)
        whole[count:].zero_()
    for parts in zip(*(whole.split(_PIECE) for whole in padded), strict=True):
        parts[0].copy_(function(*parts))
    return padded[0][:count].view(shape)
