"""Tensors that a run writes to and that were there before it, such as counts on an object, and what they held.

Parameters are among them: a first call may fold a factor into a weight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from hexa_fx.isolation.module_state import fill, is_like
from hexa_fx.isolation.module_tree import named_tensors
from hexa_fx.torch_private import is_functorch_wrapped_tensor

_OPERATORS = "set setitem iadd isub imul itruediv ifloordiv idiv imod ipow iand ior ixor array".split()
_EXCHANGES = ("__set__", "__set_data__")
"""Functions that give a tensor other memory, or other properties, and write to none."""
_WRITES = frozenset(("numpy", *_EXCHANGES, *(f"__{name}__" for name in _OPERATORS)))
"""Functions that write to a tensor, or give its memory to numpy, which may."""
_ONLY_NAMED_SO = "requires_grad_"
"""Not one, by its name: gradients are kept by `gradients_kept`."""
WITH_STATISTICS = frozenset({"batch_norm", "instance_norm"})
"""Functions that write to the running statistics that they are given."""
_SMALL = 1 << 16
_NOT_MADE = frozenset(("__get__", "from_numpy", "as_tensor", "asarray", "frombuffer"))
"""Functions that may give a tensor, or the memory of an array, that was there before."""


@contextmanager
def tensors_restored(root: nn.Module, with_parameters: Callable[[], object] = lambda: None) -> Iterator[None]:
    """A context at whose end tensors that were there before have their own memory and numbers again.

    What torch's functions are about to write to is copied, and nothing else. ``with_parameters`` is called if the tree's parameters
    are among it: a flag that a parameter is set up may lie anywhere.
    """
    mode = _Writes(root)
    try:
        with mode, gradients_kept(root):
            yield
    finally:
        mode.restore()
        if mode.wrote_parameters:
            with_parameters()


@contextmanager
def gradients_kept(root: nn.Module) -> Iterator[None]:
    """A context at whose end the tree's parameters have the gradients that they had, and want one as before."""
    before = [(p, p.grad, p.requires_grad) for p in named_tensors(root, "_parameters").values()]
    try:
        yield
    finally:
        for parameter, gradient, wanted in before:
            if parameter.requires_grad != wanted:
                parameter.requires_grad_(wanted)
            if parameter.grad is not gradient:
                parameter.grad = gradient


@contextmanager
def parameters_restored(
    root: nn.Module, about_to_write: Callable[[Tensor], object]
) -> Iterator[Callable[[str, Any, Any], None]]:
    """As `tensors_restored`, of the tree's parameters alone, for a run that somebody else sees, who calls what this gives.

    It takes name, args and kwargs of a function of torch before that runs. ``about_to_write`` is told of the parameters.
    """
    writes = _Writes(root, about_to_write)
    try:
        yield writes.before
    finally:
        writes.restore()


def put_back(held: Iterable[tuple[Tensor, Tensor]], written: Container[int]) -> None:
    """Gives tensors the copies of what they ``held`` before a run. ``written``: where storages are that functions of torch wrote
    to; small tensors may have been written to by numpy as well."""
    for tensor, value in held:
        if is_functorch_wrapped_tensor(tensor):  # of a transform that is over
            continue
        small = value.numel() <= _SMALL
        if not is_like(tensor, value) or _storage(tensor) in written or (small and not torch.equal(tensor, value)):
            fill(tensor, value)


class _Writes(TorchFunctionMode):
    """Saves tensors before functions write to them, but for those that were made meanwhile."""

    def __init__(self, root: nn.Module, parameters_to: Callable[[Tensor], object] | None = None) -> None:
        super().__init__()
        self.wrote_parameters, self._told = False, parameters_to
        self._saved: dict[Any, tuple[Tensor, Tensor, Tensor | None]] = {}
        self._made: set[int] = set()  # memory that is used again is again of a tensor that is made
        self._at: dict[int, list[Tensor]] = defaultdict(list)
        for parameter in named_tensors(root, "_parameters").values():
            if place := _storage(parameter):
                self._at[place].append(parameter)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if is_compiling():  # what torch.cond() compiles writes to none
            return func(*args, **kwargs)
        self.before(name, args, kwargs)
        result = func(*args, **kwargs)
        if name not in _NOT_MADE:
            self._make(result, args)
        return result

    def before(self, name: str, args: Any, kwargs: Any) -> None:
        """Saves what a function of torch is about to write to."""
        target = kwargs.get("out")
        in_place = name.endswith("_") and not name.endswith("__") and name != _ONLY_NAMED_SO
        if name in _WRITES or in_place or kwargs.get("inplace") is True:
            target = args[0] if args else kwargs.get("input", kwargs.get("tensor"))
        elif kwargs.get("max_norm") is not None:  # of an embedding, which scales the rows that it looks up
            target = args[1]
        elif name in WITH_STATISTICS:
            target = [item for item in (*args[1:], *kwargs.values()) if not isinstance(item, nn.Parameter)]
        # properties other than data, or memory that holds the same
        keeps_numbers = name == "__set__" or (name in _EXCHANGES and _have_the_same_numbers(args))
        for tensor in target if isinstance(target, (list, tuple)) else (target,):
            if isinstance(tensor, Tensor):
                self._about_to_write(tensor, name, keeps_numbers)

    def _about_to_write(self, tensor: Tensor, name: str, keeps_numbers: bool) -> None:
        place = _storage(tensor)
        parameters = self._at.get(place, ())
        self.wrote_parameters |= bool(parameters)
        if self._told is not None and not keeps_numbers:
            for parameter in parameters:
                self._told(parameter)
        if parameters or (place and place not in self._made and self._told is None):
            for written in parameters or (tensor,):
                self._save(written, numbers=name not in _EXCHANGES)

    def _save(self, tensor: Tensor, numbers: bool) -> None:
        key = tensor.data_ptr(), tensor.shape, tensor.stride(), None if numbers else id(tensor)
        _, data, value = self._saved.get(key, (tensor, tensor.data, None))
        self._saved[key] = tensor, data, data.clone() if numbers and value is None else value

    def _make(self, result: Any, args: Any) -> None:
        made = {_storage(item) for item in (result if isinstance(result, (list, tuple)) else (result,))} - self._made
        if made and not made <= {0}:
            self._made |= made - {0, *map(_storage, args)}

    def restore(self) -> None:
        """Puts back what was saved, the first last: others may lie in the same memory."""
        for tensor, data, value in reversed(self._saved.values()):
            if value is not None:
                data.copy_(value)
            if (tensor.data_ptr(), tensor.shape) != (data.data_ptr(), data.shape):
                tensor.data = data


def _have_the_same_numbers(args: Any) -> bool:
    """Whether a tensor's numbers stay when it gets another one's memory, as where ``module.to(dtype)`` is called in a forward."""
    tensor, other = args if len(args) == 2 else (args[0], None)
    if not isinstance(other, Tensor) or tensor.shape != other.shape or tensor.device != other.device or tensor.is_meta:
        return False
    return tensor.data_ptr() == other.data_ptr() or torch.equal(tensor.detach().to(other.dtype), other.detach())


def _storage(tensor: Any) -> int:
    """Where a tensor's storage is; 0 if it has none, or it is no tensor."""
    if not isinstance(tensor, Tensor) or tensor.is_meta or is_functorch_wrapped_tensor(tensor):
        return 0
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return 0
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
