"""Operators under `torch.vmap`: one call for each sample.

Blocks run their own code in a forward under a transform. What comes here is a backward of many gradients at once
(``torch.autograd.grad(..., is_grads_batched=True)``, ``torch.autograd.functional.jacobian(..., vectorize=True)``, or a
`torch.vmap` around ``torch.autograd.grad``): kernels write into memory of their own, which no batching rule of torch's can follow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from hexa_fx.torch_private import (
    DispatchKeySet,
    OpOverload,
    _add_batch_dim,
    _remove_batch_dim,
    _vmapmode_decrement_nesting,
    _vmapmode_increment_nesting,
    is_legacy_batchedtensor,
    under_vmap,
)


def register(library: torch.library.Library, name: str, overload: Callable[[], OpOverload]) -> None:
    """Registers the rules of an operator that changes no argument, for `torch.vmap` and for the older one of torch.autograd."""
    for key, kernel in {"FuncTorchBatched": _under_vmap, "Batched": _under_autograds}.items():
        library.impl(name, functools.partial(kernel, overload), key, with_keyset=True)


def _under_vmap(overload: Callable[[], OpOverload], _keyset: DispatchKeySet, *args: Any) -> Any:
    def rule(info: Any, dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        leaves, spec = tree_flatten(args)
        results = _each(overload(), leaves, tree_flatten(dims)[0], info.batch_size, spec)
        return results, tree_map(lambda _: 0, results)

    return under_vmap(rule, overload(), args)


def _under_autograds(overload: Callable[[], OpOverload], _keyset: DispatchKeySet, *args: Any) -> Any:
    level = _vmapmode_increment_nesting() - 1
    _vmapmode_decrement_nesting()
    leaves, spec = tree_flatten(args)
    dims = [0 if isinstance(leaf, Tensor) and is_legacy_batchedtensor(leaf) else None for leaf in leaves]
    leaves = [leaf if dim is None else _remove_batch_dim(leaf, level, 1, 0) for leaf, dim in zip(leaves, dims)]
    size = next(len(leaf) for leaf, dim in zip(leaves, dims) if dim is not None)
    return tree_map(lambda found: _add_batch_dim(found, 0, level), _each(overload(), leaves, dims, size, spec))


def _each(overload: OpOverload, leaves: Sequence[Any], dims: Sequence[int | None], size: int, spec: Any) -> Any:
    """The results of all samples, stacked in their first dimension."""
    found = []
    for number in range(size):
        sample = [leaf if dim is None else leaf.select(dim, number) for leaf, dim in zip(leaves, dims)]
        found.append(overload(*tree_unflatten(sample, spec)))
    return tree_map(lambda *same: torch.stack(same), *found)
