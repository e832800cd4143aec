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
from torch._C._functorch import is_legacy_batchedtensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten


def register(library: torch.library.Library, name: str, overload: Callable[[], torch._ops.OpOverload]) -> None:
    """Registers the rules of an operator that changes no argument, for `torch.vmap` and for the older one of torch.autograd."""
    for key, kernel in {"FuncTorchBatched": _under_vmap, "Batched": _under_autograds}.items():
        library.impl(name, functools.partial(kernel, overload), key, with_keyset=True)


def _under_vmap(overload: Callable[[], torch._ops.OpOverload], _keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
    # Importing these takes longer than importing this package.
    from torch._functorch.autograd_function import custom_function_call_vmap_helper
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

    def rule(info: Any, dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        leaves, spec = tree_flatten(args)
        results = _each(overload(), leaves, tree_flatten(dims)[0], info.batch_size, spec)
        return results, tree_map(lambda _: 0, results)

    interpreter: Any = retrieve_current_functorch_interpreter()
    return custom_function_call_vmap_helper(interpreter, rule, overload(), *args)


def _under_autograds(
    overload: Callable[[], torch._ops.OpOverload], _keyset: torch._C.DispatchKeySet, *args: Any
) -> Any:
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    leaves, spec = tree_flatten(args)
    dims = [0 if isinstance(leaf, Tensor) and is_legacy_batchedtensor(leaf) else None for leaf in leaves]
    leaves = [leaf if dim is None else torch._remove_batch_dim(leaf, level, 1, 0) for leaf, dim in zip(leaves, dims)]
    size = next(len(leaf) for leaf, dim in zip(leaves, dims) if dim is not None)
    return tree_map(lambda found: torch._add_batch_dim(found, 0, level), _each(overload(), leaves, dims, size, spec))


def _each(
    overload: torch._ops.OpOverload, leaves: Sequence[Any], dims: Sequence[int | None], size: int, spec: Any
) -> Any:
    """The results of all samples, stacked in their first dimension."""
    found = []
    for number in range(size):
        sample = [leaf if dim is None else leaf.select(dim, number) for leaf, dim in zip(leaves, dims)]
        found.append(overload(*tree_unflatten(sample, spec)))
    return tree_map(lambda *same: torch.stack(same), *found)
