"""Counts what a node costs: FLOPs of its matrix products, and bytes if every operand travels once."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from hexa_fx.inspection.operators import CHECKS

_FREE = frozenset(CHECKS) | frozenset(
    "size dim numel getitem after view reshape unflatten flatten squeeze unsqueeze expand expand_as permute transpose t "
    "contiguous chunk split unbind detach item tolist __bool__ __int__ __index__ stack_ size_ getattr view_as "
    "not_ empty new_empty empty_like".split()
)
_GATHER = frozenset("index_select gather take index getitem_rows".split())
_SCATTER = frozenset("index_add index_add_ scatter_add scatter_add_ index_put_ set_item index_copy_".split())
_PRODUCTS = frozenset("linear matmul mm bmm grouped_mm _grouped_mm __matmul__ addmv grouped_mm_fallback".split())


def moved_bytes(op: str, operands: Sequence[Any], results: Sequence[Any]) -> int:
    """Bytes that a call reads and writes. Views are free; a gather reads what it returns, a scatter what it is given."""
    name = _bare(op)
    read, written = _tensors(operands), _tensors(results)
    if name == "getitem" and len(read) > 1:  # indexed by a tensor
        name = "getitem_rows"
    if name in _FREE:
        return 0
    if name in _GATHER:
        return 2 * _bytes(written) + _bytes(read[1:])
    if name in _SCATTER:
        return 2 * _bytes(read[-1:]) + _bytes(read[1:])
    return _bytes(read) + _bytes(written)


def flops_of(op: str, args: Sequence[Any], operands: Sequence[Any], results: Sequence[Any]) -> int:
    """Two for every multiplication and addition of a matrix product; 0 for anything else."""
    name, read, out = _bare(op), _tensors(operands), _tensors(results)
    if name in _HEXA and out:
        return int(_HEXA[name](read, results))
    if name == "einsum" and isinstance(args[0], str):
        return _einsum(args[0], read)
    if name in ("addmm", "baddbmm", "addbmm") and len(read) > 2:
        return 2 * out[0].numel() * read[1].shape[-1]
    if name in _PRODUCTS and out and read and read[0].dim():
        return 2 * out[0].numel() * read[0].shape[-1]
    return 0


def _esmm_act(read: list[torch.Tensor], results: Sequence[Any]) -> int:
    """h = x W1 (and W3): x is (., D); weights of layout nk or kn hold D * N elements an expert."""
    weights = [t for t in read[1:] if t.dim() == 3]
    rows = int(results[1].shape[0])
    return 2 * rows * sum(w.shape[1] * w.shape[2] for w in weights)


_HEXA = {
    "esmm": lambda read, results: 2 * results[0].numel() * read[0].shape[-1],
    "esmm_act": _esmm_act,
    "esmm_act_backward": lambda read, results: 2 * results[1].numel() * read[0].shape[-1],
    "estmm": lambda read, results: 2 * max(read[0].shape[0], read[1].shape[0]) * prod(results[0].shape[1:]),
    "esfk": lambda read, results: 4 * read[1].shape[0] * prod(results[1].shape[1:]),
}


def _einsum(equation: str, operands: list[torch.Tensor]) -> int:
    terms = equation.replace(" ", "").split("->")[0].split(",")
    if len(terms) < 2:
        return 0
    sizes: dict[str, int] = {}
    for term, operand in zip(terms, operands):
        unnamed = "0123456789"[10 - (operand.dim() - len(term) + 3) :]
        for letter, size in zip(term.replace("...", unnamed), operand.shape):
            sizes[letter] = max(size, sizes.get(letter, 1))
    return 2 * prod(sizes.values())


def _bare(op: str) -> str:
    return op.removeprefix("hexa.").removeprefix("aten.").split(".")[0]


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    return [v for v in values if isinstance(v, torch.Tensor)]


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
