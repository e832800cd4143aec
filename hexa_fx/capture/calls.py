"""What the recorder makes of a call into torch: whether and how it is recorded, what it writes to, and where it was made."""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import traceback
import types
from typing import Any

import torch
import torch.fx
from torch import nn
from torch.utils._pytree import tree_leaves

from hexa_fx.capture import functional
from hexa_fx.capture.symint import SYMBOLIC, SymbolicSize
from hexa_fx.ir import SourceLocation
from hexa_fx.isolation.purity import asking_frame, is_users, module_name
from hexa_fx.torch_private import OpOverload, TensorBase, _maybe_get_opdef, is_functorch_wrapped_tensor

METADATA = frozenset(
    "dtype device layout is_cuda requires_grad ndim is_cpu is_leaf grad_fn is_sparse is_quantized is_meta names "
    "is_mps itemsize is_xpu is_mkldnn grad _base _version output_nr is_nested".split()
)

SETS_DATA = "__set_data__"
"""What ``tensor.data = ...`` is called here, as all settings of properties have one name."""

SETS_GRADIENT = "requires_grad_"
"""What ``tensor.requires_grad = ...`` is called, too."""

_UNRECORDED = frozenset(
    "is_grad_enabled dim is_floating_point is_contiguous data_ptr element_size get_device "
    "__hash__ is_complex is_autocast_enabled get_autocast_dtype "
    "requires_grad_ finfo is_inference ndimension are_deterministic_algorithms_enabled is_signed is_same_size "
    "_is_view is_pinned __set__ __set_data__ __delete__ register_hook register_post_accumulate_grad_hook retain_grad".split()
)


TEXTS = frozenset({"__repr__", "__format__"})
"""What makes a text of a tensor: it says its numbers to the host."""

DECISIONS = TEXTS | frozenset("__bool__ __int__ __float__ __index__ __contains__ item tolist numpy __array__".split())

KEPT = frozenset({"item", "tolist", "__bool__", "__contains__", "__int__", "__index__", "__float__"})
"""Decisions whose result a graph's node keeps."""

_NAMES = (
    "getitem add sub mul truediv floordiv matmul neg and or invert eq ne lt le gt ge iadd isub imul itruediv ior iand"
)
_OPERATORS = {name: getattr(operator, name) for name in (f"__{word}__" for word in _NAMES.split())}
_OPERATORS["__setitem__"] = functional.set_item


_MEMORY = frozenset("untyped_storage storage storage_offset".split())
_PYTHON = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial, nn.Module)


class UnreadableTensor(Exception):
    """A tensor whose values cannot be read as those of a dense one, or code that reads the memory behind one."""


def check_readable(tensor: torch.Tensor) -> None:
    """Raises `UnreadableTensor` unless a tensor is dense and not hidden by torch.func."""
    if is_functorch_wrapped_tensor(tensor):
        raise UnreadableTensor(
            "its experts run inside torch.func (vmap or grad), which hides the numbers; experts that torch.bmm or "
            "einsum multiplies can be rewritten"
        )
    if tensor.is_nested or tensor.layout != torch.strided:
        raise UnreadableTensor(
            f"it computes with {'nested' if tensor.is_nested else 'sparse'} tensors; only dense ones are rewritten"
        )


def as_plain(value: Any) -> Any:
    """``value`` with symbolic numbers, and what stands for types of numbers, replaced by plain ones, for the call that is made."""
    if isinstance(value, SYMBOLIC):
        return value.node.value
    if isinstance(value, slice):
        return slice(as_plain(value.start), as_plain(value.stop), as_plain(value.step))
    if isinstance(value, dict):
        return {key: as_plain(item) for key, item in value.items()}
    if isinstance(value, SymbolicSize):
        return tuple(as_plain(item) for item in value)
    if type(value) in (tuple, list, torch.Size):
        return type(value)(as_plain(item) for item in value)
    return next((kind for kind in (int, float) if value == kind), value) if isinstance(value, type) else value


def is_bookkeeping(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a call neither computes a tensor nor decides anything. Raises `UnreadableTensor` if no graph shows what follows."""
    if name in _MEMORY:
        raise UnreadableTensor(
            f"it asks for the memory behind tensors ({name}()), of which a graph says nothing; ask for sizes instead"
        )
    if name in _UNRECORDED or "set_grad" in name or "autocast" in name:
        return True
    if any(isinstance(given, _PYTHON) for given in (*args, *kwargs.values())):
        raise UnreadableTensor(_HANDED.format(name))
    if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((args, kwargs))):
        return False
    return not hasattr(torch, name) and not hasattr(torch.nn.functional, name)


def name_of(func: Any) -> str:
    """By what name a function that a mode is told of goes."""
    name = getattr(func, "__name__", "")
    if func == vars(TensorBase)["requires_grad"].__set__:
        return SETS_GRADIENT
    return SETS_DATA if func == vars(TensorBase)["data"].__set__ else name


def python_kernels(func: Any) -> dict[str | None, Any] | None:
    """Of an operator that `torch.library.custom_op` makes of Python code, and which writes to no argument, that code by device."""
    operator = getattr(func, "default", func)
    found = _maybe_get_opdef(operator) if isinstance(operator, OpOverload) else None
    return None if found is None or operator._schema.is_mutable else found._backend_fns


def fx_target(func: Any, name: str) -> tuple[str, Any]:
    if name in _OPERATORS:
        return "call_function", _OPERATORS[name]
    # what ``**`` calls is a wrapper of a method that has no import path
    wraps = getattr(func, "__module__", "") == "torch._tensor" and hasattr(torch.Tensor, name)
    return ("call_method", name) if wraps or getattr(torch.Tensor, name, None) is func else ("call_function", func)


def written_tensor(name: str, args: Any, kwargs: Any, result: Any) -> torch.Tensor | None:
    """The tensor that an in-place call wrote into; None for other calls."""
    if isinstance(kwargs.get("out"), torch.Tensor):
        return kwargs["out"]  # type: ignore[no-any-return]
    if not args or not isinstance(args[0], torch.Tensor):
        return None
    target: torch.Tensor = args[0]
    in_place_name = name.endswith("_") and not name.endswith("__")
    in_place_operator = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    returns_target = result is target and (in_place_name or in_place_operator or bool(kwargs.get("inplace")))
    return target if name == "__setitem__" or returns_target else None


def exchanges(name: str, args: Any) -> bool:
    """Whether a call gives a tensor the memory of another one of its shape: ``x.data = y``."""
    tensors = len(args) == 2 and all(isinstance(item, torch.Tensor) for item in args)
    return name == SETS_DATA and tensors and bool(args[0].shape == args[1].shape)


def keeps_memory(name: str, args: Any) -> bool:
    """Whether a call gives a tensor the memory that it has, as ``x.data += y`` does after it has written there."""
    return exchanges(name, args) and all(
        getattr(args[0], of)() == getattr(args[1], of)() for of in ("data_ptr", "stride", "storage_offset")
    )


def user_location() -> SourceLocation | None:
    """The innermost line of code that belongs neither to torch nor to this package."""
    frame = asking_frame(("torch.", "hexa_fx.capture.", "hexa_fx.isolation.", "contextlib."))
    return None if frame is None else SourceLocation(frame.f_code.co_filename, frame.f_lineno)


def written_at(block: nn.Module, anybodys: bool = False) -> SourceLocation | None:
    """Where the forward of a module's class is written, if it is not torch's, or ``anybodys``; None where there is no source of it,
    or a compiler made the class. The source itself is not read: its file may have been edited since."""
    kind = type(block)
    if issubclass(kind, torch.fx.GraphModule) or not (anybodys or is_users(kind.forward.__module__)):
        return None
    forward = inspect.unwrap(kind.forward)
    file = inspect.getsourcefile(forward) if inspect.isfunction(forward) else None
    if file is None:  # a built-in, or typed into a prompt
        return None
    return SourceLocation(file, forward.__code__.co_firstlineno)


_AS_A_KEY = (
    "it looks numbers up that it has read from tensors (by tolist(), item() or shape; as keys of a dict, in a set, as arguments of "
    "a cached function), and a recorded run knows them for its own tokens alone; leave what is chosen in tensors, as "
    "torch.where(ids == e) does, and make what depends on a size anew"
)


_HANDED = (
    "it hands Python code to {}(), and no recorded graph says what that computes; with both results and torch.where() in place of "
    "torch.cond(), say, it can be rewritten"
)


def why_not_recorded(error: Exception) -> str:
    """A sentence about an error that a block raises while it is recorded: of numbers that are symbolic then, what to do instead."""
    if isinstance(error, UnreadableTensor):
        return str(error)
    if type(error).__name__ == "UncapturedHigherOrderOpError":  # its compiler followed the call into the recorder
        return _HANDED.format("torch.cond")
    return _AS_A_KEY if "unhashable type: non-nested Sym" in str(error) else f"{type(error).__name__}: {error}"


def raised_at(error: BaseException | None) -> SourceLocation | None:
    """The innermost line of the user's code in an error's traceback."""
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__ if error is not None else None):
        if not f"{module_name(frame.f_globals)}.".startswith(("torch.", "hexa_fx.", "contextlib.")):
            found = SourceLocation(frame.f_code.co_filename, line)
    return found


def without_numpy(value: Any) -> Any:
    """A number of numpy, which torch takes as a number of Python's, as one; anything else unchanged."""
    numpy = sys.modules.get("numpy")
    return value.item() if numpy is not None and isinstance(value, numpy.number | numpy.bool_) else value


_TYPE_AS_DTYPE = {bool: torch.bool, float: torch.float64, int: torch.int64}


def as_constant(value: Any) -> Any:
    """A value as it stands in a graph: types of numbers as dtypes, and numbers of numpy's as Python's."""
    return _TYPE_AS_DTYPE.get(value, value) if isinstance(value, type) else without_numpy(value)
