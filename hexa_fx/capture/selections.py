"""Notes, in a run of a whole model, the modules whose code selects by index, which MoE blocks do to choose experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from hexa_fx import operations as ops
from hexa_fx.capture import overlooked
from hexa_fx.capture.memory import memory_of
from hexa_fx.isolation.choices import choosing_call, numbers_intervals
from hexa_fx.isolation.module_tree import modules_of

_INTEGERS = (torch.int64, torch.int32)
_WHOLE_NUMBERS = (*_INTEGERS, torch.int16, torch.int8, torch.uint8)


@dataclass(repr=False)
class Selections(TorchFunctionMode):
    """The mode that notes them.

    Args:
        model: which will run.
    """

    model: nn.Module
    stack: list[str] = field(default_factory=list)
    """Paths of the modules that run, outermost first."""
    selecting: set[str] = field(default_factory=set)
    chained: set[str] = field(default_factory=set)
    """Lists in which a member was given another member's output."""
    called: set[str] = field(default_factory=set)
    """Modules that ran."""
    used: set[int] = field(default_factory=set)
    """Parameters that functions of torch were given, by id."""
    runs: overlooked.Runs = field(default_factory=overlooked.Runs)

    def __post_init__(self) -> None:
        super().__init__()
        self._tables = set(map(memory_of, _whole_numbers_of(self.model)))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, ops.canonical(getattr(func, "__name__", ""))
        if is_compiling():  # as torch.cond() does, which the compiler follows through this code, too
            return func(*args, **kwargs)
        if (name in ops.ORDERS or name in ("where", "nonzero")) and self.stack:
            self.runs.compare(self.stack[-1])
        given = (*args, *kwargs.values())
        self.used.update(id(each) for each in given if isinstance(each, nn.Parameter))
        self.used.update(
            id(each) for some in given if type(some) in (list, tuple) for each in some if isinstance(each, nn.Parameter)
        )
        result = func(*args, **kwargs)
        if self.stack and (_selects(name, args, result) or self._finds_ids(name, args, kwargs)):
            self.selecting.add(self.stack[-1])
        if name in ops.BEST:
            self.runs.choose(result)
            call = choosing_call(func, args, kwargs)
            if call is not None and self.stack:
                self.runs.candidates.setdefault(self.stack[-1], set()).add(call.size)
        if name in ops.CUTS and name != "unbind" and self.stack:
            self.runs.cut(self.stack[-1], name, args[0], result)
        if name == "embedding" and self.stack:
            self.runs.look_up(self.stack[-1], args[0])
        return result

    def _finds_ids(self, name: str, args: Any, kwargs: Any) -> bool:
        """Whether whole numbers are looked up in a table of whole numbers that a module keeps: a token's expert by its id, say."""
        if name not in ops.LOOK_UPS:
            return False
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if len(tensors) < 2 or any(tensor.dtype not in _WHOLE_NUMBERS for tensor in tensors):
            return False
        return any(type(tensor) is torch.Tensor and memory_of(tensor) in self._tables for tensor in tensors)


def _whole_numbers_of(model: nn.Module) -> Iterator[torch.Tensor]:
    """Tensors of whole numbers among the model's buffers and attributes."""
    for module in modules_of(model):
        for value in (*module._buffers.values(), *vars(module).values()):
            if type(value) is torch.Tensor and value.dtype in _WHOLE_NUMBERS and value.dim() > 0:
                yield value


def _selects(name: str, args: Any, result: Any) -> bool:
    """Whether a function of torch selects by index."""
    # remainders of what weights are packed in, and of fractions, are no selections: those of positions and ids are
    codes = name == "remainder" and getattr(args[0], "dtype", torch.int64) not in _INTEGERS
    if name in ops.BY_INDEX and not codes:
        return True
    # numpy may choose by what it is given
    return numbers_intervals(name, args, result) or name in ("numpy", "__array__")
