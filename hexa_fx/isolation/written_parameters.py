"""Parameters that a run writes to, such as a weight that its first call folds a factor into, and what they held before."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hexa_fx.isolation.module_tree import named_tensors

_SET = frozenset(("__set__", "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ipow__"))


@contextmanager
def parameters_restored(root: nn.Module, with_them: Callable[[], object]) -> Iterator[None]:
    """A context at whose end the parameters of a tree have their own memory and numbers again.

    What torch's functions are about to write to is copied, and nothing else. ``with_them`` is called if anything was: a flag that
    a parameter is set up may lie anywhere.
    """
    mode = _Writes(root)
    try:
        with mode:
            yield
    finally:
        if mode.restore():
            with_them()


class _Writes(TorchFunctionMode):
    """Saves parameters before functions write to them."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self._saved: dict[int, tuple[Tensor, Tensor, Tensor | None]] = {}
        self._at: dict[int, list[Tensor]] = defaultdict(list)
        for parameter in named_tensors(root, "_parameters").values():
            if place := _storage(parameter):
                self._at[place].append(parameter)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, target = getattr(func, "__name__", ""), kwargs.get("out") if kwargs else None
        if name in _SET or (name.endswith("_") and not name.endswith("__")):
            target = args[0] if args else None
        if isinstance(target, Tensor):
            for parameter in self._at.get(_storage(target), ()):
                self._save(parameter, numbers=name != "__set__")
        return func(*args, **(kwargs or {}))

    def _save(self, parameter: Tensor, numbers: bool) -> None:
        _, data, value = self._saved.get(id(parameter), (parameter, parameter.data, None))
        self._saved[id(parameter)] = parameter, data, data.clone() if numbers and value is None else value

    def restore(self) -> bool:
        """Puts back what was saved, and says whether anything was."""
        for parameter, data, value in self._saved.values():
            if value is not None:
                data.copy_(value)
            if (parameter.data_ptr(), parameter.shape) != (data.data_ptr(), data.shape):
                parameter.data = data
        return bool(self._saved)


def _storage(tensor: Tensor) -> int:
    """Where a tensor's storage is; 0 if it has none."""
    if tensor.is_meta or type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return 0
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
