"""Modes under which trial runs of a block's code are made: ended if they do not end, in float64, without assertions on a device,
and with the parts of stacked weights as leaves of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hexa_fx.contexts import attributes_set
from hexa_fx.torch_private import (
    DisableTorchFunction,
    DispatchMode,
    _debug_has_internal_overlap,
    peek_interpreter_stack,
)

MOST_CALLS = 200_000
"""Of torch's functions in one run: what a loop over thousands of tokens, one by one, stays below."""


class Endless(RuntimeError):
    """A run of a block's own code was ended."""


def end_after(calls: int) -> None:
    """Raises `Endless` once code has made more calls than it may."""
    if calls > MOST_CALLS:
        raise Endless(
            f"its own code had not ended after {MOST_CALLS} calls of torch, as in a loop that waits for numbers"
        )


class Bounded(TorchFunctionMode):
    """A mode under which code may call torch's functions so often, and no more: then it raises `Endless`."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._calls += 1
        end_after(self._calls)
        return func(*args, **(kwargs or {}))


_LOWER = frozenset({torch.float32, torch.float16, torch.bfloat16})
_CASTS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}
_UPCAST = frozenset({torch.dtype, tuple, list, dict})
GROUPED = frozenset({"grouped_mm", "_grouped_mm"})
FINFO = torch.finfo


class InFloat64(TorchFunctionMode):
    """A mode that raises every lower floating dtype a call asks for to float64, and gives grouped_mm a float64 version.

    Args:
        own: dtype that the tensors had originally. A cast of them to another dtype gives a copy here too, since code may write
            to it. What code asks of its numbers (``torch.finfo(x.dtype).eps``) is told of this one, since a recorded run holds it.
    """

    def __init__(self, own: torch.dtype) -> None:
        super().__init__()
        self._own, self._thread = own, threading.get_ident()
        self._limits = attributes_set(torch, finfo=self._finfo)

    def _finfo(self, *dtype: torch.dtype) -> torch.finfo:
        here = dtype == (torch.float64,) and threading.get_ident() == self._thread
        return FINFO(self._own) if here else FINFO(*dtype)

    def __enter__(self) -> InFloat64:
        self._limits.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._limits.__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        given = args, kwargs
        if kwargs or not _UPCAST.isdisjoint(map(type, args)):
            args, kwargs = upcast(args), upcast(kwargs)
        if (name in _CASTS or name == "to") and args and isinstance(args[0], torch.Tensor):
            cast = args[0].double() if name in _CASTS else func(*args, **kwargs)
            named = (value for value in (*given[0], *given[1].values()) if isinstance(value, torch.dtype))
            return cast.clone() if cast is args[0] and {_CASTS.get(name), *named} - {None, self._own} else cast
        if name in GROUPED and args[0].dtype == torch.float64 and args[1].dim() == 3:
            return grouped_mm(*args, **kwargs)
        result = func(*args, **kwargs)
        if not isinstance(result, torch.Tensor) or result.dtype not in _LOWER:
            return result
        # out of no tensors, and so in a dtype that the call does not name, as ``torch.zeros(3)`` does
        is_made_anew = not any(isinstance(value, torch.Tensor) for value in pytree.tree_leaves((args, kwargs)))
        return result.double() if is_made_anew else result


def upcast(value: Any) -> Any:
    """The arguments of a call, with lower floating dtypes replaced by float64."""
    return map_aggregate(value, lambda leaf: torch.float64 if type(leaf) is torch.dtype and leaf in _LOWER else leaf)


def grouped_mm(
    rows: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor, bias: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    """(n, K) rows in expert order times (E, K, N). ``offs`` (E,) holds the groups' ends; rows past the last are zero."""
    ends = offs.tolist()
    groups = [(number, start, end) for number, (start, end) in enumerate(zip([0, *ends[:-1]], ends)) if start < end]
    # taken apart at once: the gradient of each ``weight[number]`` would be as large as all of them
    matrices = weight.unbind()
    parts = [rows[start:end] @ matrices[number] for number, start, end in groups or [(0, 0, 0)]]
    return torch.cat([*parts, rows.new_zeros(rows.shape[0] - ends[-1], weight.shape[-1])])


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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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


_CHECKED: dict[str, Callable[..., None]] = {
    "gather scatter scatter_add scatter_reduce index_add index_copy index_reduce index_select": (
        lambda self, dim, index, *_, **__: _within(index, 0, _size(self, dim))
    ),
    "index_fill": lambda self, dim, index, *_, **__: _within(index, -_size(self, dim), _size(self, dim)),
    "index index_put index_put_impl unsafe_index unsafe_index_put": _places,
    "take put": lambda self, index, *_, **__: _within(index, -self.numel(), self.numel()),
    "embedding embedding_bag embedding_bag_forward_only": (
        lambda weight, indices, *_, **__: _within(indices, 0, weight.shape[0])
    ),
    "nll_loss_forward nll_loss2d_forward": (
        lambda self, target, weight=None, reduction=1, ignore_index=-100: _within(
            target[target != ignore_index], 0, self.shape[min(1, self.dim() - 1)]
        )
    ),
    "repeat_interleave": _repeats,
    "grouped_mm": _groups,
    "multinomial": _distribution,
    "bernoulli": _bernoulli,
    "assert_async": _asserted,
}
_CHECKS = {name: check for names, check in _CHECKED.items() for name in names.split()}
"""By an operator's name without underscores around it."""


_TAKES_A_PART = frozenset({"__getitem__", "select", "narrow"})


class WeightSlices(TorchFunctionMode):
    """A mode under which parts taken from ``weights`` are leaves of their own.

    It applies only where that changes no result: to parts that share memory with the weight, do not overlap themselves, and
    are taken with gradients on from weights without hooks. Everything else goes the usual way.
    """

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._weights = {id(weight): weight for weight in weights if _is_plain_leaf(weight)}
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def parts(self) -> list[torch.Tensor]:
        """The leaves that were made, in order of creation."""
        return [part for _, part in self._parts]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        weight = self._weights.get(id(args[0])) if args and getattr(func, "__name__", "") in _TAKES_A_PART else None
        if weight is None or not torch.is_grad_enabled() or peek_interpreter_stack() is not None:
            return func(*args, **kwargs)
        part = func(weight.detach(), *args[1:], **kwargs)
        if not _lies_in(part, weight):
            return func(*args, **kwargs)
        self._parts.append((weight, part.requires_grad_()))
        return part

    def whole(
        self, gradients: Mapping[str, torch.Tensor | None], weights: Mapping[str, torch.Tensor], parts: Sequence[Any]
    ) -> dict[str, torch.Tensor | None]:
        """``gradients`` of ``weights`` by name, with those of the parts added, which come in the order of `parts`."""
        sums: dict[int, torch.Tensor] = {}
        for (weight, part), gradient in zip(self._parts, parts):
            if gradient is None:
                continue
            if id(weight) not in sums:
                sums[id(weight)] = torch.empty_strided(
                    weight.size(), weight.stride(), dtype=weight.dtype, device=weight.device
                ).zero_()
            offset = int(part.storage_offset() - weight.storage_offset())
            sums[id(weight)].as_strided(part.size(), part.stride(), offset).add_(gradient)
        return {name: _sum(gradient, sums.get(id(weights[name]))) for name, gradient in gradients.items()}


def sliced(weights: Iterable[torch.Tensor], gradients: bool) -> AbstractContextManager[WeightSlices | None]:
    """The mode for those of ``weights`` that backward would fill; none where there are none, since it slows every operation."""
    with DisableTorchFunction():  # an outer mode would be told of every expert's weight
        plain = [weight for weight in weights if _is_plain_leaf(weight) and weight.dim() > 2] if gradients else []
    return WeightSlices(plain) if plain else nullcontext()


def _is_plain_leaf(weight: torch.Tensor) -> bool:
    return type(weight) is nn.Parameter and weight.requires_grad and not weight._backward_hooks


def _lies_in(part: Any, weight: torch.Tensor) -> bool:
    """Whether ``part`` lies in ``weight``'s memory without overlapping itself."""
    if not isinstance(part, torch.Tensor) or part.numel() == 0 or part.dtype != weight.dtype:
        return False
    same = part.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    return same and _debug_has_internal_overlap(part) == 0


def _sum(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other
