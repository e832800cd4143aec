"""The inputs that a block is recorded on: those of the example, cut to a size at which experiments are cheap."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.fx

from hexa_fx import operations as ops
from hexa_fx.capture.records import record_of
from hexa_fx.capture.symint import is_of_sizes
from hexa_fx.operations import kind


def probe_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], max_tokens: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with at most about ``max_tokens`` rows.

    Cut along the first dimension where all tensors share it, then along the second dimension of a lone (B, S, D) input. Inputs
    that do not allow it are used whole.
    """
    cut = _cut(_dense({**dict(enumerate(args)), **kwargs}), max_tokens)
    return tuple(cut.get(i, value) for i, value in enumerate(args)), {
        key: cut.get(key, value) for key, value in kwargs.items()
    }


def _cut(tensors: dict[Any, torch.Tensor], max_tokens: int) -> dict[Any, torch.Tensor]:
    if not tensors or any(tensor.dim() == 0 for tensor in tensors.values()):
        return tensors
    if len({tensor.shape[0] for tensor in tensors.values()}) != 1:
        return tensors
    rows_each = max(_rows(tensor) for tensor in tensors.values()) // max(1, next(iter(tensors.values())).shape[0])
    keep = max(1, max_tokens // max(1, rows_each))
    tensors = {key: tensor[:keep] for key, tensor in tensors.items()}
    if len(tensors) == 1:
        ((key, tensor),) = tensors.items()
        if tensor.dim() == 3 and tensor.shape[0] == 1 and tensor.is_floating_point():
            return {key: tensor[:, :max_tokens]}
    return tensors


def _rows(tensor: torch.Tensor) -> int:
    """Number of rows of a float tensor; an index tensor has one for each first index."""
    return tensor.shape[:-1].numel() if tensor.is_floating_point() else tensor.shape[0]


OVERFLOW_TOKENS = 160
"""Tokens in a probe that overflows experts, unless the code names a larger capacity."""

_subscripts = ops.of("getitem set_item")
_cuts_rows = ops.of("getitem set_item split split_with_sizes tensor_split narrow")
_compares_counts = ops.of("lt le gt ge clamp min minimum")
_names_number = ops.of("lt le gt ge clamp clamp_min clamp_max min minimum max maximum remainder floor_divide")
LARGEST_LIMIT = 8192


def overflow_sizes(graph: torch.fx.Graph, least: int = OVERFLOW_TOKENS) -> tuple[int, ...]:
    """Numbers of tokens to try: ``least``, and more than any limit that the code compares with or cuts rows at.

    That is twice the largest whole number up to 8192 in a comparison, that a count is divided by or lessened by, where a list of
    integers is cut, or in a slice or split of rows that left the example whole.
    """
    limits = [
        limit for node in graph.nodes for limit in _limits(node) if 1 < limit <= LARGEST_LIMIT and 2 * limit > least
    ]
    return (least, 2 * max(limits)) if limits else (least,)


def limits_of(node: torch.fx.Node) -> list[int]:
    """The numbers that it compares counts with, divides them by or cuts rows at, also as floats. What bounds features is none."""
    if not _cuts_rows(node) and any(_is_float(n) and record_of(n).value.dim() > 1 for n in node.all_input_nodes):
        return []
    given = [*node.args, *node.kwargs.values()] if _names_number(node) else []
    numbers = [value for value in given if isinstance(value, (int, float)) and math.isfinite(value)]
    return [*map(int, numbers), *_limits(node)]


def decides_between_numbers(graph: torch.fx.Graph) -> bool:
    """Whether the host looked for the larger of two numbers that the code computed, as ``max(counts)`` does."""
    decisions = (node for node in graph.nodes if node.op != "output" and record_of(node).decision)
    asked = (n for node in decisions for n in (node, *node.all_input_nodes))
    return any(ops.orders(node) and len(node.all_input_nodes) > 1 for node in asked)


def _limits(node: torch.fx.Node) -> list[int]:
    quotient = kind(node) == "floor_divide" and not is_of_sizes(node)
    if _compares_counts(node) or quotient or (kind(node) in ("sub", "rsub") and not _is_float(node)):
        return _compared(node)
    if not _cuts_rows(node) or not node.args or not isinstance(node.args[0], torch.fx.Node):
        return []
    given = record_of(node.args[0]).value
    rows = given.shape[0] if isinstance(given, torch.Tensor) and given.dim() and given.is_floating_point() else 0
    first = node.args[1] if len(node.args) > 1 else None
    places = [*first] if kind(node) == "tensor_split" and isinstance(first, (list, tuple)) else [first]
    numbers = [*places, *node.kwargs.values()]
    if _subscripts(node):
        first = first[0] if isinstance(first, tuple) and first else first
        numbers = [first.start, first.stop] if isinstance(first, slice) else []
    return [abs(number) for number in _whole_numbers(numbers) if abs(number) >= rows]


def _compared(node: torch.fx.Node) -> list[int]:
    """The whole numbers that it is given; of counts, also floats, and what a buffer or parameter of one element holds."""
    given = [*node.args, *node.kwargs.values()]
    nodes = [value for value in given if isinstance(value, torch.fx.Node)]
    if any(_is_float(n) for n in nodes if n.op != "get_attr"):
        return _whole_numbers(given)
    held = [record_of(n).value for n in nodes if n.op == "get_attr"]
    given += [value.item() for value in held if isinstance(value, torch.Tensor) and value.numel() == 1]
    numbers = [value for value in given if isinstance(value, (int, float)) and not isinstance(value, bool)]
    return [int(value) for value in numbers if math.isfinite(value)]


def _is_float(node: torch.fx.Node) -> bool:
    value = record_of(node).value
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _whole_numbers(values: list[Any]) -> list[int]:
    return [value for value in values if isinstance(value, int) and not isinstance(value, bool)]


def _dense(named: dict[Any, Any]) -> dict[Any, torch.Tensor]:
    """The tensors among them that are not sparse."""
    tensors = {key: value for key, value in named.items() if isinstance(value, torch.Tensor)}
    return {key: value for key, value in tensors.items() if value.layout is torch.strided}


def overflow_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], tokens: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs of mostly large and nearly alike tokens, the others random, if the block takes one float tensor; else unchanged.

    The fewer the others, the larger the capacity that is exceeded; the larger the alike ones, the less a router's noise parts them.
    """
    named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    tensors = _dense(named)
    if len(tensors) != 1:
        return args, kwargs
    ((key, example),) = tensors.items()
    if not example.is_floating_point() or example.dim() not in (2, 3) or not example.numel():
        return args, kwargs
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(tokens, example.shape[-1], generator=generator, device="cpu").to(example) * example.std()
    one = example.reshape(-1, example.shape[-1])[0]
    alike = torch.arange(tokens, device=example.device)[:, None] % 8 != 0
    mixed = torch.where(alike, 4 * one + 0.01 * noise, noise)
    named[key] = mixed if example.dim() == 2 else mixed.unsqueeze(0)
    return tuple(named[i] for i in range(len(args))), {name: named[name] for name in kwargs}
