"""Copies arguments, so that one run of a block cannot change what the next one is given."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


def copied(value: Any) -> Any:
    """A copy that a run may change freely: tensors are detached, objects such as a growing cache are copied deeply.

    Modules are shared, and so is an object that cannot be copied.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) in (tuple, list):
        return type(value)(copied(item) for item in value)
    if type(value) is dict:
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, (nn.Module, type, int, float, str, bool, type(None))):
        return value
    try:
        return copy.deepcopy(value)
    except Exception:
        return value
