"""What kind of call a block gets: so small that its own code is faster, or one that operators cannot stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_compiling

from hexa_fx.isolation.users_code import is_users
from hexa_fx.torch_private import (
    TransformType,
    _are_functorch_transforms_active,
    _get_current_function_mode_stack,
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


def reason_for_own_code(block: nn.Module, weights: Sequence[str]) -> str:
    """Why operators cannot stand for a block's own code in this call; empty if they can.

    They support backward only, know nothing of `torch.vmap` and of other libraries' tensors, and a `TorchFunctionMode` of the
    user's would not see the functions that they stand for.

    Args:
        weights: paths of parameters that operators read as they are.
    """
    for path in weights:
        owner, name = block, path
        while "." in name and owner is not None:
            child, _, name = name.partition(".")
            owner = owner._modules.get(child)  # type: ignore[assignment]
        weight = None if owner is None else owner._parameters.get(name)
        if type(weight) is not nn.Parameter and is_foreign(weight):
            return f"{path} is {said_of(weight)}"
    if is_compiling():
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
    kind = type(weight)
    return hasattr(kind, "__tensor_flatten__") and kind.__module__.partition(".")[0] not in ("torch", "hexa_fx")


def said_of(weight: Any) -> str:
    """What a foreign tensor is, and what helps."""
    return (
        f"now a {type(weight).__module__}.{type(weight).__name__}, which only the block's own code reads; "
        "hexa_fx.quantize_experts_ packs dense experts for the operators"
    )


def call_sizes(training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Everything that size conditions can depend on. If it is the same, they need not be tried again."""
    values = (*args, *kwargs, *kwargs.values())
    return training, *(value.shape if isinstance(value, Tensor) else id(value) for value in values)


def saving_is_counted() -> bool:
    """Whether somebody counts what is saved for backward, as checkpoints do: a call that is made again has to save as much."""
    return not is_compiling() and _top_saved_tensors_default_hooks(True) is not None
