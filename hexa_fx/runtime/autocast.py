"""Gives results of a rewritten forward under autocast the dtypes of the original there (`hexa_fx.passes.rewrite.autocast`), and
calls what the original calls with autocast off."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch import nn
from torch.utils import _pytree as pytree

from hexa_fx.ir import AutocastDtypes, InputGuard
from hexa_fx.isolation.lookup import at, attributes, held_in
from hexa_fx.isolation.outcome import unfolded
from hexa_fx.runtime.guards import GuardMiss

_CASTING = frozenset("addmm baddbmm bmm einsum linear matmul mm".split())
"""Functions that multiply in the autocast dtype, whatever they are given."""
WITHOUT_AUTOCAST = "without_autocast"
"""In ``meta`` of a node: the kind of device for which autocast is off while it runs; empty if it stays as it is."""


def parameters_that_count(graph: torch.fx.Graph) -> tuple[str, ...]:
    """Paths of parameters and buffers that a graph does more with than multiply matrices: their dtypes count."""
    read = graph.find_nodes(op="get_attr", sort=False)
    return tuple(dict.fromkeys(str(node.target) for node in read if not all(map(_casts, node.users))))


def _casts(node: torch.fx.Node) -> bool:
    casting = str(node.target).startswith("hexa.") or getattr(node.target, "__name__", node.target) in _CASTING
    return casting and not node.meta.get(WITHOUT_AUTOCAST)


def kind_of(
    guards: Sequence[InputGuard], values: Mapping[str, Any], block: nn.Module, parameters: Sequence[str]
) -> tuple[torch.dtype, ...]:
    """What dtypes of results depend on under autocast: its dtype, and those of the tensors among the inputs and of parameters."""
    tensors = [values[guard.name] for guard in guards if guard.kind == "tensor"]
    device = tensors[0].device.type if tensors else "cpu"
    tensors += [at(block, path) for path in parameters]
    # The others are numbers that a module counts with.
    floating = (tensor for tensor in tensors if isinstance(tensor, torch.Tensor))
    return (torch.get_autocast_dtype(device), *(tensor.dtype for tensor in floating))


def dtypes_under_autocast(
    known: AutocastDtypes, guards: Sequence[InputGuard], values: Mapping[str, Any], block: nn.Module
) -> tuple[torch.dtype, ...] | None:
    """The dtypes that results must have in this call, by the values of its arguments; None if autocast is off. Raises `GuardMiss`
    if the block was not recorded under this autocast."""
    first = next((values[each.name] for each in guards if each.kind == "tensor" and each.name in values), None)
    if first is None or not torch.is_autocast_enabled(first.device.type):
        if not known.off:
            raise GuardMiss("it was recorded under autocast, which is off")
        return None
    kind = kind_of(guards, values, block, known.parameters)
    found = known.results.get(kind)
    if found is None:
        names = [str(dtype).removeprefix("torch.") for dtype in kind[1:]]
        count = len(names) - len(known.parameters)
        inputs, others = ", ".join(names[:count]), ", ".join(names[count:])
        inputs += f" and parameters in {others}" if others else ""
        raise GuardMiss(f"it was not recorded under autocast to {kind[0]} for inputs in {inputs}")
    return found


def dtypes_of(result: Any) -> tuple[torch.dtype, ...]:
    """The dtype of every tensor in a result, also in dataclasses and mappings."""
    leaves = pytree.tree_leaves(unfolded(result))
    return tuple(leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor))


def in_dtypes(result: Any, dtypes: Iterable[torch.dtype]) -> Any:
    """``result`` with its tensors in the given dtypes, in the order of `dtypes_of`. Objects in it, which are new, are changed."""
    left = iter(dtypes)
    leaves, structure = pytree.tree_flatten(result, is_leaf=lambda value: held_in(value) is not None)
    return pytree.tree_unflatten([_leaf_in_next(leaf, left) for leaf in leaves], structure)


def _leaf_in_next(leaf: Any, dtypes: Iterator[torch.dtype]) -> Any:
    held = held_in(leaf)
    if held is None:
        return leaf.to(next(dtypes)) if isinstance(leaf, torch.Tensor) else leaf
    own = attributes(leaf)
    for name, value in held:
        cast = in_dtypes(value, dtypes)
        if isinstance(leaf, dict) and name in leaf:
            leaf[name] = cast
        if name in own:
            object.__setattr__(leaf, name, cast)
    return leaf


class WithoutAutocast:
    """A call of a function, or of a method by its name, with autocast off for a kind of device, as a target of a graph."""

    def __init__(self, target: Callable[..., Any] | str, device: str) -> None:
        self.target, self.device = target, device
        name = target if isinstance(target, str) else getattr(target, "__name__", "call")
        self.__name__ = self.__qualname__ = f"{name}_without_autocast"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device, enabled=False):
            if isinstance(self.target, str):
                return getattr(args[0], self.target)(*args[1:], **kwargs)
            return self.target(*args, **kwargs)
