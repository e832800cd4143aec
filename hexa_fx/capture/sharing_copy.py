"""The copy of a model that `hexa_fx.optimize` rewrites."""

from __future__ import annotations

import logging
from typing import Any, TypeVar

import torch
from torch import nn

from hexa_fx.capture.copies import copied, deepcopied
from hexa_fx.errors import InputError
from hexa_fx.isolation.contents import is_of_other_library
from hexa_fx.isolation.held_objects import MODULE_STATE, is_object

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
