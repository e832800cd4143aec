"""Optimizers in checkpoints: their state by the names of parameters, of one optimizer or of several."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.optimizer import Optimizer

from hexa_fx.distributed.shards import ShardedParameter
from hexa_fx.distributed.slice_states import check_element_wise, is_slice
from hexa_fx.errors import InputError

log = logging.getLogger(__name__)

Optimizers = Optimizer | Sequence[Optimizer] | None
"""One optimizer, several that share out the model's parameters, or none."""


def listed(optimizer: Optimizers) -> tuple[Optimizer, ...]:
    """All of them."""
    if optimizer is None:
        return ()
    return (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer)


def state_by_name(
    model: nn.Module, optimizers: Sequence[Optimizer], cut: Mapping[str, ShardedParameter]
) -> dict[str, Any]:
    """State and groups of all optimizers. Gradients are put aside, or an optimizer without state would not get any.

    Raises:
        InputError: an optimizer has a parameter that the model does not name. PlanError: it keeps something of a slice that is not
            of the slice's shape.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    held = [parameter for group in groups for parameter in group["params"]]
    if not {id(parameter) for parameter in held} <= {id(parameter) for parameter in model.parameters()}:
        raise InputError("the optimizer has a parameter that the model does not name: build it on this model")
    gradients = [parameter.grad for parameter in held]
    for parameter in held:
        parameter.grad = None
    try:
        found: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizers))
    finally:
        for parameter, gradient in zip(held, gradients):
            parameter.grad = gradient
    for name, shard in cut.items():
        if is_slice(shard) or len(shard.chunks) > 1:  # else a DTensor, which says what it is
            check_element_wise(found["state"].get(name, {}), shard)
    return found


def without_unsaved(found: dict[str, Any], model: nn.Module, path: str | os.PathLike[str]) -> dict[str, Any]:
    """State and groups, without the state of parameters of which a checkpoint has none: they had no gradient, or were frozen.

    If it has none of any, everything, which then misses.

    Raises:
        InputError: the checkpoint has state of a parameter of which these optimizers, which made steps, have none.
    """
    state, saved = found["state"], _saved(path)
    unsaved = [name for name in state if name not in saved]
    if len(unsaved) == len(state):
        return found
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    held = (name for group in found["param_groups"] for name in group["params"])
    new = next((name for name in held if name in trained & saved and name not in state), None)
    if new is not None:
        raise InputError(
            f"the checkpoint {os.fspath(path)!r} has optimizer state of {new!r}, of which this optimizer has none after its steps: "
            "load into a new optimizer"
        )
    if unsaved:
        log.warning(
            "the checkpoint %s has no optimizer state of %r and %d more parameters, which had no gradient then: it begins anew",
            *(os.fspath(path), unsaved[0], len(unsaved) - 1),
        )
    return found | {"state": {name: values for name, values in state.items() if name in saved}}


def _saved(path: str | os.PathLike[str]) -> set[str]:
    """Of which parameters a checkpoint has state. Other names among these do no harm."""
    names, place = set(), "optimizer.state."
    for key in FileSystemReader(path).read_metadata().state_dict_metadata:
        parts = key.removeprefix(place).split(".") if key.startswith(place) else []
        names |= {".".join(parts[:end]) for end in range(1, len(parts))}
    return names


def give_back(model: nn.Module, optimizers: Sequence[Optimizer], found: dict[str, Any]) -> None:
    """Hands loaded state to the optimizers; those of whose parameters nothing was loaded have none afterwards."""
    set_optimizer_state_dict(model, optimizers, found, options=StateDictOptions(strict=False))
