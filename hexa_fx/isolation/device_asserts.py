"""Errors on the host for what a CUDA kernel can only assert: a failed assertion there ends a process's use of the device.

Trial runs give code numbers that it may not be made for. On a CPU torch's operators check indices and raise; on a GPU they stop the
device for good, the user's model with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from hexa_fx.ops.dispatch_mode import DispatchMode

_KNOWN = frozenset({"aten", "prims", "prim", "hexa"})
_is_cuda = attrgetter("is_cuda")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


def no_device_asserts(module: nn.Module) -> AbstractContextManager[Any]:
    """The mode for a trial run of a module that is on a GPU; no mode for others."""
    held = chain(module.parameters(), module.buffers()) if torch.cuda.is_initialized() else ()
    return RaisesOnHost() if any(map(_is_cuda, held)) else nullcontext()


class RaisesOnHost(DispatchMode):
    """Before an operator of torch runs, its indices are compared with what they point into; each comparison waits for the device.

    Raises:
        IndexError: an index is out of range, or integers reach an operator of another library, whose checks nobody knows.
        RuntimeError: probabilities are none.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        check = _CHECKS.get(func.overloadpacket._qualified_op_name.removeprefix("aten::").strip("_"))
        if check is not None:
            check(*args, **kwargs)
        elif func.namespace not in _KNOWN and any(_is_index(value) for value in (*args, *kwargs.values())):
            raise IndexError(f"no unusual integers are given to {func}, which may not check them")
        return func(*args, **kwargs)


def _is_index(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in _INTEGERS


def _within(index: Tensor, low: int, high: int) -> None:
    if not index.numel():
        return
    least, most = torch.stack(torch.aminmax(index.detach())).tolist()
    if least < low or most >= high:
        raise IndexError(f"index {least if least < low else most} is out of bounds for a size of {high}")


def _size(tensor: Tensor, dim: int) -> int:
    return tensor.shape[dim] if tensor.dim() else 1


def _along(self: Tensor, dim: int, index: Tensor, *_: Any, **__: Any) -> None:
    _within(index, 0, _size(self, dim))


def _along_from_end(self: Tensor, dim: int, index: Tensor, *_: Any, **__: Any) -> None:
    _within(index, -_size(self, dim), _size(self, dim))


def _places(self: Tensor, indices: Sequence[Tensor | None], *_: Any, **__: Any) -> None:
    dim = 0
    for index in indices:
        if index is None:
            dim += 1
        elif index.dtype in (torch.bool, torch.uint8):
            dim += index.dim()
        else:
            _within(index, -self.shape[dim], self.shape[dim])
            dim += 1


def _flat(self: Tensor, index: Tensor, *_: Any, **__: Any) -> None:
    _within(index, -self.numel(), self.numel())


def _rows(weight: Tensor, indices: Tensor, *_: Any, **__: Any) -> None:
    _within(indices, 0, weight.shape[0])


def _classes(self: Tensor, target: Tensor, weight: Any = None, reduction: Any = 1, ignore_index: int = -100) -> None:
    _within(target[target != ignore_index], 0, self.shape[min(1, self.dim() - 1)])


def _repeats(self: Tensor, repeats: Any = None, *_: Any, **__: Any) -> None:
    counts = repeats if isinstance(repeats, Tensor) else self
    if _is_index(counts):
        _within(counts, 0, 1 << 62)


def _groups(self: Tensor, mat2: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> None:
    if offs is None:
        return
    ends = [0, *offs.tolist()]
    size = self.shape[0] if mat2.dim() == 3 and self.dim() == 2 else mat2.shape[1] if self.dim() == 3 else self.shape[1]
    if ends != sorted(ends) or ends[-1] > size:
        raise IndexError(f"groups end at {ends[1:]}, of {size} rows")


def _distribution(self: Tensor, *_: Any, **__: Any) -> None:
    if not bool((self >= 0).all() & self.isfinite().all()):
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
    if self.numel() and not bool((self.sum(-1) > 0).all()):
        raise RuntimeError("invalid multinomial distribution (sum of probabilities <= 0)")


def _bernoulli(self: Tensor, p: Any = None, *_: Any, **__: Any) -> None:
    values = p if isinstance(p, Tensor) else self if p is None else None
    if values is not None and values.numel() and not bool(((values >= 0) & (values <= 1)).all()):
        raise RuntimeError("Expected p_in >= 0 && p_in <= 1 to be true, but got false")


def _asserted(self: Tensor, *_: Any, **__: Any) -> None:
    if not bool(self.any()):
        raise RuntimeError("Expected Tensor with single nonzero value, but got zero")


_CHECKS: dict[str, Callable[..., None]] = {
    "gather": _along,
    "scatter": _along,
    "scatter_add": _along,
    "scatter_reduce": _along,
    "index_add": _along,
    "index_copy": _along,
    "index_reduce": _along,
    "index_select": _along,
    "index_fill": _along_from_end,
    "index": _places,
    "index_put": _places,
    "index_put_impl": _places,
    "unsafe_index": _places,
    "unsafe_index_put": _places,
    "take": _flat,
    "put": _flat,
    "embedding": _rows,
    "embedding_bag": _rows,
    "embedding_bag_forward_only": _rows,
    "nll_loss_forward": _classes,
    "nll_loss2d_forward": _classes,
    "repeat_interleave": _repeats,
    "grouped_mm": _groups,
    "multinomial": _distribution,
    "bernoulli": _bernoulli,
    "assert_async": _asserted,
}
"""By an operator's name without underscores around it."""
