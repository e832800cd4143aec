"""What kind of call a block gets: so small that its own code is faster, one that operators cannot stand for, one that nobody may
analyse while it runs, or one that was analysed and is left to the block's own code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from hexa_fx.ir import PythonRead
from hexa_fx.isolation.contents import is_of_other_library
from hexa_fx.isolation.purity import is_users
from hexa_fx.isolation.read_values import Unreadable
from hexa_fx.runtime.attribute_guards import AttributeGuards
from hexa_fx.runtime.guards import GuardMiss, OwnCodeOnly, SizeMiss
from hexa_fx.torch_private import (
    TransformType,
    _are_functorch_transforms_active,
    _current_graph_task_id,
    _get_current_function_mode_stack,
    _get_tracing_state,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
    _top_saved_tensors_default_hooks,
    get_interpreter_stack,
    is_forward_mode,
)

_TRANSFORMS = (TransformType.Grad, TransformType.Jvp, TransformType.Vmap)
_TRANSFORMED = "torch.func.grad, torch.vmap and forward-mode derivatives go through its own code only"


def is_small(limit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this is a plain CPU call whose first argument is a tensor of at most ``limit`` elements.

    Blocks that are fast in their own code ask this before every call, and looking up a name in the module ``torch`` takes
    microseconds. So it asks only what is needed: a tracer must see the operators, and must not compare sizes.
    """
    if not limit or is_compiling():
        return False
    first = args[0] if args else next(iter(kwargs.values()), None)
    return type(first) is Tensor and first.numel() <= limit and first.is_cpu and not _len_torch_dispatch_stack()


def foreign_weight(block: nn.Module, weights: Iterable[Sequence[str]]) -> str:
    """What operators cannot read among these parameters, each by names of the modules on the way and its own, since it is of
    another library's class; empty if they can read all."""
    for path in weights:
        owner: nn.Module | None = block
        *above, name = path
        for child in above:
            owner = None if owner is None else owner._modules.get(child)
        weight = None if owner is None else owner._parameters.get(name)
        if type(weight) is not nn.Parameter and is_foreign(weight):
            return f"{'.'.join(path)} is {said_of(weight)}"
    return ""


def reason_for_own_code(traced: bool) -> str:
    """Why operators cannot stand for a block's own code in this call; empty if they can.

    They support backward only, know nothing of `torch.vmap`, and a `TorchFunctionMode` of the user's would not see the functions
    that they stand for. ``traced``: by a compiler.
    """
    if (traced or _get_tracing_state() is not None) and torch.onnx.is_in_onnx_export():
        return "it is exported to ONNX, which has no operator that stands for it"
    if traced:
        return ""
    if is_forward_mode():
        return _TRANSFORMED
    stack = get_interpreter_stack() if _are_functorch_transforms_active() else None
    if any(level.key() in _TRANSFORMS for level in stack or ()):
        return _TRANSFORMED
    if _len_torch_function_stack() and any(is_users(type(m).__module__) for m in _get_current_function_mode_stack()):
        return "a TorchFunctionMode is active, which is to see the functions that its own code calls"
    return ""


def is_foreign(weight: Any) -> bool:
    """Whether a tensor is of a class of another library that holds other tensors, as quantisers have."""
    return hasattr(type(weight), "__tensor_flatten__") and is_of_other_library(weight)


def said_of(weight: Any) -> str:
    """What a foreign tensor is, and what helps."""
    return (
        f"now a {type(weight).__module__}.{type(weight).__name__}, which only the block's own code reads; "
        "hexa_fx.quantize_experts_ packs dense experts for the operators"
    )


def why_not_analysed(rewritten_before: bool = False) -> str:
    """Why a call cannot be analysed while it runs, which another one may be; empty if it can.

    Args:
        rewritten_before: whether a call that backward runs again ran rewritten, if it is one.
    """
    if not rewritten_before and _current_graph_task_id() != -1:
        return "backward runs it again, as a checkpoint does, which has to do what was done before"
    if _get_tracing_state() is not None or _len_torch_dispatch_stack():
        return "it is traced"
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is recorded; call the model once before"
    return reason_for_own_code(is_compiling())


def call_kind(training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What a call is like, but for its sizes: mode, autocast, and kinds of arguments."""
    devices = {value.device.type for value in (*args, *kwargs.values()) if isinstance(value, Tensor)}
    cast = [(d, torch.get_autocast_dtype(d)) for d in sorted(devices) if torch.is_autocast_enabled(d)]
    return training, *cast, *map(_kind, args), *((name, _kind(value)) for name, value in kwargs.items())


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor):
        return type(value), value.dtype, value.dim(), value.device.type
    return value if type(value) in (bool, int, float, str, NoneType) else type(value)


def call_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Rows of the longest floating tensor."""
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    return max((t.shape[:-1].numel() for t in tensors if t.is_floating_point() and t.dim()), default=0)


def saving_is_counted() -> bool:
    """Whether somebody counts what is saved for backward, as checkpoints do: a call that is made again has to save as much."""
    return _top_saved_tensors_default_hooks(True) is not None


class RefusedKind:
    """A kind of call, by what it is like and by what its code read, and why it runs the block's own code.

    Args:
        reads: what the code read from Python; if it reads something else, the kind is another. What may change without a trace
            says nothing.
        own_forward: the forward that the block's instance had of its own.
        enough: calls of more tokens than this say as much as any larger one. A smaller call says nothing of larger ones.
        missed: what the sizes of the call did not meet, if that is why it was analysed: it holds for calls of which that is said.
        calls: how many calls it holds for; None for all.
    """

    def __init__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        reason: str,
        reads: Sequence[PythonRead] = (),
        own_forward: Callable[..., Any] | None = None,
        enough: int = 0,
        missed: str = "",
        calls: int | None = None,
    ) -> None:
        self.kind, self.reason = call_kind(bool(module.training), args, kwargs), reason
        self.missed = missed
        tokens = call_tokens(args, kwargs)
        self.tokens = tokens if tokens < enough and not missed else None
        reads = [read for read in reads if not isinstance(read.value, Unreadable)]
        self.attributes = AttributeGuards(module, (), reads, (), own_forward)
        self.hooked = self._hooked_now()  # which may be the reason; None until it is known
        self._left, self.lasted = calls, calls

    @property
    def is_over(self) -> bool:
        """Whether it has held for as many calls as it should."""
        return self._left is not None and self._left <= 0

    def holds(self, kind: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any], missed: str = "") -> bool:
        """Whether a call, of which ``kind`` is what it is like, is of this kind. Counts it if it is."""
        if self.is_over or self.missed not in ("", missed) or self.kind != kind:
            return False
        if self.tokens is not None and call_tokens(args, kwargs) > self.tokens:
            return False
        hooked = self._hooked_now()
        self.hooked = hooked if self.hooked is None else self.hooked
        if hooked is None or hooked is not self.hooked:
            return False
        self._left = None if self._left is None else self._left - 1
        return True

    def _hooked_now(self) -> bool | None:
        """Whether modules have hooks; None if the code would read something else."""
        try:
            self.attributes.check()
        except OwnCodeOnly:
            return True
        except GuardMiss:
            return None
        return False


def said_of_sizes(miss: GuardMiss | None) -> str:
    """What the sizes of a call did not meet, if that is why a specialisation does not take it."""
    return str(miss) if isinstance(miss, SizeMiss) else ""
