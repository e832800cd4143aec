"""What kind of call a block gets: so small that its own code is faster, or differentiated in a way that operators are not."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling


def is_small(limit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this is a plain CPU call whose first argument is a tensor of at most ``limit`` elements.

    Blocks that are fast in their own code ask this before every call, and looking up a name in the module ``torch`` takes
    microseconds. So it asks only what is needed: a tracer must see the operators, and must not compare sizes.
    """
    if not limit or is_compiling():
        return False
    first = args[0] if args else next(iter(kwargs.values()), None)
    return type(first) is Tensor and first.numel() <= limit and first.is_cpu and not _len_torch_dispatch_stack()


def differentiated_by_function() -> bool:
    """Whether torch.func.grad, vjp, jvp or forward-mode AD is active. The operators only support backward."""
    if is_compiling():
        return False
    if forward_ad._current_level >= 0:
        return True
    stack = get_interpreter_stack() if _are_functorch_transforms_active() else None
    return any(level.key() in (TransformType.Grad, TransformType.Jvp) for level in stack or ())


def call_sizes(training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Everything that size conditions can depend on. If it is the same, they need not be tried again."""
    values = (*args, *kwargs, *kwargs.values())
    return training, *(value.shape if isinstance(value, Tensor) else id(value) for value in values)
