"""Runs code in float64 even where it asks for float32, so that a comparison sees its meaning and not its rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_LOWER = frozenset({torch.float32, torch.float16, torch.bfloat16})
_CASTS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}
_UPCAST = frozenset({torch.dtype, tuple, list, dict})
GROUPED = frozenset({"grouped_mm", "_grouped_mm"})


class InFloat64(TorchFunctionMode):
    """A mode that raises every lower floating dtype a call asks for to float64, and gives grouped_mm a float64 version.

    Args:
        own: dtype that the tensors had originally. A cast of them to another dtype gives a copy here too, since code may write
            to it.
    """

    def __init__(self, own: torch.dtype) -> None:
        super().__init__()
        self._own = own

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
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
        if not isinstance(result, torch.Tensor):
            return result
        return result.double() if result.dtype in _LOWER and _is_of_no_tensors(args, kwargs) else result


def _is_of_no_tensors(*given: Any) -> bool:
    """Whether a call made its result out of no tensors, and so in a dtype that it does not name, as ``torch.zeros(3)`` does."""
    return not any(isinstance(value, torch.Tensor) for value in pytree.tree_leaves(given))


def upcast(value: Any) -> Any:
    """The arguments of a call, with lower floating dtypes replaced by float64."""
    kind = type(value)
    if kind is torch.dtype:
        return torch.float64 if value in _LOWER else value
    if isinstance(value, dict) and value:  # torch.fx has a class of its own
        return {key: upcast(item) for key, item in value.items()}
    if kind in (tuple, list) and not _UPCAST.isdisjoint(map(type, value)):
        return kind([upcast(item) for item in value])
    return value


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
