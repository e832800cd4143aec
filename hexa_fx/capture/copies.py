"""Copies arguments, so that one run of a block cannot change what the next one is given, and the model that `optimize` rewrites."""

from __future__ import annotations

import copy
import logging
import types
from collections import OrderedDict
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hexa_fx.contexts import attributes_set
from hexa_fx.errors import InputError
from hexa_fx.isolation.contents import is_of_other_library
from hexa_fx.isolation.lookup import MODULE_STATE, is_object
from hexa_fx.isolation.module_tree import is_unit_of_fsdp, modules_of
from hexa_fx.isolation.shadow import rebound

Copied = TypeVar("Copied")


def copied(value: Any) -> Any:
    """A copy that a run may change freely: tensors have no past, though a gradient if they want one; objects such as a growing
    cache are copied deeply.

    Modules are shared, and so is an object that cannot be copied.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().requires_grad_(value.requires_grad).clone()
    if type(value) in (tuple, list):
        return type(value)(copied(item) for item in value)
    if type(value) is dict:
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, (nn.Module, type, int, float, str, bool, type(None))):
        return value
    try:
        return deepcopied(value, {})
    except Exception:
        return value


def deepcopied(value: Copied, memo: dict[int, Any]) -> Copied:
    """As `copy.deepcopy`, which raises an error at tensors that autograd computed, such as a loss that the last forward left on
    its module: the copy shares them. So it does functions that torch.jit compiled, as `copy` shares other functions; those that
    modules hold, as in place of a forward, close over what is copied.
    """
    with _SharedResults(), attributes_set(torch.jit.ScriptFunction, __deepcopy__=lambda self, memo: self):
        if isinstance(value, nn.Module):
            _copy_gathered(value, memo)
        made = copy.deepcopy(value, memo)
    for own in map(vars, modules_of(made) if isinstance(made, nn.Module) and made is not value else ()):
        held = [(name, value) for name, value in own.items() if type(value) is types.FunctionType]
        own.update((name, rebound(value, memo)) for name, value in held)
    return made


def _copy_gathered(root: nn.Module, memo: dict[int, Any]) -> None:
    """Puts copies of the units of FSDP2 in a tree whose weights are gathered, as in a call, into ``memo``: as they were before
    `fully_shard`."""
    units = [m for m in modules_of(root) if is_unit_of_fsdp(m) and id(m) not in memo]
    gathered = [m for m in units if not any(type(p.data).__name__ == "DTensor" for p in m.parameters())]
    for module in gathered:
        kind: Any = type(module).__bases__[1]
        memo[id(module)] = kind.__new__(kind)
    for module in gathered:
        memo[id(module)].__dict__.update(copy.deepcopy(_without_fsdp(module, memo), memo))


def _without_fsdp(module: nn.Module, memo: dict[int, Any]) -> dict[str, Any]:
    """What a unit of FSDP2 holds but for FSDP2's state, and the hooks by which it gathers and frees weights."""
    found = {
        name: type(held)((key, hook) for key, hook in held.items() if not _is_of_fsdp(hook))
        if type(held) in (dict, OrderedDict)
        else held
        for name, held in module.__getstate__().items()
        if not name.startswith("__composable_api_state_key")
    }
    memo.setdefault(id(memo), []).append(found)  # as `copy` does: ids in a memo are of what lives
    return found


def _is_of_fsdp(hook: Any) -> bool:
    return str(getattr(getattr(hook, "hook", hook), "__module__", "")).startswith("torch.distributed.fsdp")


class _SharedResults(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[0]
        return func(*args, **(kwargs or {}))


log = logging.getLogger(__name__)
Model = TypeVar("Model", bound=nn.Module)


def sharing_copy(model: Model) -> Model:
    """A copy that shares parameters, buffers, and whatever cannot be copied (process groups, locks) with ``model``."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    # Gradients do not reach the parameters of a copied one.
    shared |= {id(module): module for module in model.modules() if isinstance(module, torch.jit.ScriptModule)}
    # What a quantiser keeps beside its weights is set up with them, by the first call of either model.
    for module in model.modules():
        if any(is_of_other_library(p) for p in module._parameters.values() if p is not None):
            kept = (value for name, value in vars(module).items() if name not in MODULE_STATE)
            shared |= {id(value): value for value in kept if is_object(value)}
    try:
        return deepcopied(model, dict(shared))
    except Exception as error:  # whatever an object raises that cannot be copied
        log.info("copying the model: %s; what cannot be copied is shared", error)
    held = [value for module in model.modules() for value in vars(module).values()]
    shared |= {id(value): value for value in held if not isinstance(value, nn.Module) and copied(value) is value}
    try:
        return deepcopied(model, shared)
    except Exception as error:
        raise InputError(f"the model cannot be copied ({error}); hexa_fx.optimize_ rewrites it in place") from error
