"""Gives results of a rewritten forward under autocast the dtypes of the original there (`hexa_fx.passes.modes.autocast`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._C import _is_any_autocast_enabled
from torch.compiler import is_compiling
from torch.utils import _pytree as pytree

from hexa_fx.ir import AutocastDtypes, InputGuard
from hexa_fx.isolation.held_objects import fields_of
from hexa_fx.runtime.guards import AGAIN, GuardMiss


def kind_of(guards: Sequence[InputGuard], values: Mapping[str, Any]) -> tuple[torch.dtype, ...]:
    """What dtypes of results depend on under autocast: its dtype, and those of the tensors among the inputs."""
    tensors = [values[guard.name] for guard in guards if guard.kind == "tensor"]
    device = tensors[0].device.type if tensors else "cpu"
    return (torch.get_autocast_dtype(device), *(tensor.dtype for tensor in tensors))


def may_be_on() -> bool:
    """Whether autocast is on for some device, or a compiler asks."""
    return is_compiling() or _is_any_autocast_enabled()


def dtypes_under_autocast(
    known: AutocastDtypes, guards: Sequence[InputGuard], values: Mapping[str, Any]
) -> tuple[torch.dtype | None, ...] | None:
    """The dtypes that results must have in this call; None if autocast is off.

    Raises:
        GuardMiss: they are not known.
    """
    first = next((values[guard.name] for guard in guards if guard.kind == "tensor"), None)
    if first is None or not torch.is_autocast_enabled(first.device.type):
        return None
    kind = kind_of(guards, values)
    found = known.get(kind)
    if found is None:
        inputs = ", ".join(str(dtype).removeprefix("torch.") for dtype in kind[1:])
        helps = f"; {AGAIN}" if known else ""
        raise GuardMiss(f"what it gives under autocast to {kind[0]} for inputs in {inputs} is not known{helps}")
    return found


def dtypes_of(result: Any) -> tuple[torch.dtype | None, ...]:
    """The dtype of every tensor in a result, None for other leaves.

    Raises:
        TypeError: there is an object in it whose tensors are not seen.
    """
    leaves = pytree.tree_leaves(result)
    if any(fields_of(leaf) is not None for leaf in leaves):
        raise TypeError("a result of a class that torch.utils._pytree does not know")
    return tuple(leaf.dtype if isinstance(leaf, torch.Tensor) else None for leaf in leaves)


def in_dtypes(result: Any, dtypes: tuple[torch.dtype | None, ...]) -> Any:
    """``result`` with its tensors in the given dtypes, in the order of `dtypes_of`."""
    leaves, structure = pytree.tree_flatten(result)
    given = [leaf if dtype is None else leaf.to(dtype) for leaf, dtype in zip(leaves, dtypes)]
    return pytree.tree_unflatten(given, structure)
