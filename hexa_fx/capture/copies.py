"""Copies arguments, so that one run of a block cannot change what the next one is given."""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

Copied = TypeVar("Copied")


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
        return deepcopied(value, {})
    except Exception:
        return value


def deepcopied(value: Copied, memo: dict[int, Any]) -> Copied:
    """As `copy.deepcopy`, which raises an error at tensors that autograd computed, such as a loss that the last forward left on
    its module: the copy shares them.
    """
    if isinstance(value, nn.Module):
        held = itertools.chain.from_iterable(module.__dict__.values() for module in value.modules())
        # a module's dicts of hooks, of which copy rebuilds each as an object: two thirds of the time for a list of experts
        memo |= {id(each): type(each)() for each in held if type(each) in _DICTS and not each}
    with _SharedResults():
        return copy.deepcopy(value, memo)


_DICTS = (dict, OrderedDict)


class _SharedResults(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[0]
        return func(*args, **(kwargs or {}))
