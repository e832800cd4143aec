"""Defines the ``hexa::`` operators and looks up their kernels.

An operator has one schema, one fake and check of its arguments, at most one autograd formula and one autocast rule, and one kernel
per device:

* CPU kernels are registered with `register_kernel` (dispatch key ``CPU``);
* every other device runs the generic `fallback` (dispatch key ``CompositeExplicitAutograd``), which a device's own
  kernels override simply by being registered, here or with ``torch.library.impl("hexa::esmm", "CUDA")``.

A registered kernel is reached in two ways. ``torch.ops.hexa.esmm(...)`` goes through torch's dispatcher and checks its arguments.
The programs that `hexa::moe_ffn` runs are checked as a whole, so they call what `kernel_for` returns directly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling
from torch.utils._pytree import tree_map

from hexa_fx.errors import InputError
from hexa_fx.ops import batched
from hexa_fx.ops.cpu import multiplies_in_float32
from hexa_fx.torch_private import (
    DispatchKey,
    DispatchKeySet,
    OpOverload,
    _after_ADInplaceOrView_keyset,
    _after_autograd_keyset,
    _any_requires_grad,
    _AutoDispatchBelowAutograd,
    _ExcludeDispatchKeyGuard,
    _get_tracing_state,
    _is_any_autocast_enabled,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
    is_legacy_batchedtensor,
    peek_interpreter_stack,
)

NAMESPACE = "hexa"

Kernel = Callable[..., Any]
Check = Callable[..., None]

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_KERNELS: dict[tuple[str, str], Kernel] = {}
_CHECKS: dict[str, Check | None] = {}
_AUTOCAST_DEVICES = ("cpu", "cuda")
_STRIDED = torch.strided
_AFTER_AUTOGRAD = _after_autograd_keyset
_BELOW_AUTOGRAD = _after_ADInplaceOrView_keyset
_PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None)})
_DENSE = (DispatchKey.CPU, DispatchKey.CUDA)
_AUTOCAST_KEYS = DispatchKeySet(DispatchKey.AutocastCPU) | DispatchKeySet(DispatchKey.AutocastCUDA)

kernel_generation = 0
"""Grows with every `register_kernel`: what was bound to kernels before is bound again."""


def define(schema: str) -> None:
    """Defines ``hexa::<schema>``."""
    name = _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    if "!" not in schema:
        batched.register(_LIBRARY, name, functools.partial(overload, name))


def overload(name: str) -> OpOverload:
    """The operator ``hexa::<name>``."""
    packet = getattr(torch.ops.hexa, name)
    result: OpOverload = packet.default
    return result


def register_kernel(name: str, device: str, kernel: Kernel) -> Kernel:
    """Makes ``kernel`` the implementation of ``hexa::<name>`` on one device type.

    Args:
        name: operator name without the namespace. Its fake is registered already.
        device: ``cpu``, ``cuda``, ..., or ``any`` for devices without a kernel of their own.
        kernel: takes the schema's arguments in order. Runs below autograd and outside autocast.

    Returns:
        What was registered: a function that runs the operator's check, then the kernel outside autocast.
    """
    global kernel_generation
    kernel_generation += 1
    _KERNELS[name, device] = kernel
    check = _CHECKS[name]

    @functools.wraps(kernel)
    def checked(*args: Any) -> Any:
        if check is not None:
            check(*args)
        with without_autocast():
            return kernel(*args)

    key = "CompositeExplicitAutograd" if device == "any" else device.upper()
    _LIBRARY.impl(name, checked, key)
    return checked


def kernel_for(name: str, device: str) -> Kernel:
    """The kernel of ``hexa::<name>`` on a device type, or the operator itself if torch's dispatcher has to choose."""
    return _KERNELS.get((name, device)) or overload(name)


def register_fake(name: str, fake: Kernel, check: Check | None = None) -> None:
    """Registers the shape and dtype rule of ``hexa::<name>``, and the check of its arguments.

    Args:
        name: operator name without the namespace.
        fake: takes the schema's arguments and returns empty results.
        check: takes the same arguments and raises on bad ones, before the fake and before every kernel. Skipped when a checked
            program calls a kernel.
    """
    _CHECKS[name] = check

    @functools.wraps(fake)
    def checked(*args: Any) -> Any:
        if check is not None:
            check(*args)
        return fake(*args)

    torch.library.register_fake(f"{NAMESPACE}::{name}", checked, lib=_LIBRARY)


def register_autograd(name: str, backward: Kernel, setup_context: Kernel | None = None) -> None:
    """Registers the autograd formula of ``hexa::<name>`` (see torch.library.register_autograd)."""
    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup_context, lib=_LIBRARY)


def refuse_double_backward(name: str) -> None:
    """Makes the backward of ``hexa::<name>``, which is itself a gradient, raise instead of giving a wrong result."""

    def backward(ctx: Any, *grads: Tensor) -> None:
        raise InputError(
            f"hexa::{name} has no second derivative: gradients of gradients (create_graph=True) do not reach through "
            "an optimized MoE block; run the original module where you need them"
        )

    register_autograd(name, backward)


def register_mutation(name: str, buffers: int) -> None:
    """Tells autograd that ``hexa::<name>`` writes to its first arguments, as torch.library.custom_op does."""

    def bump(keyset: DispatchKeySet, *args: Any) -> Any:
        torch.autograd.graph.increment_version([a for a in args[:buffers] if a is not None])
        return overload(name).redispatch(keyset & _BELOW_AUTOGRAD, *args)

    _LIBRARY.impl(name, bump, "ADInplaceOrView", with_keyset=True)


def register_autograd_kernel(name: str, kernel: Kernel) -> None:
    """Registers a kernel on the Autograd key itself. Its first argument is the dispatch keyset."""
    _LIBRARY.impl(name, kernel, "Autograd", with_keyset=True)


def register_autograd_function(name: str, function: Kernel) -> None:
    """Runs ``function``, of the operator's arguments, where a gradient is wanted, and else ``hexa::<name>`` below autograd."""
    operator = overload(name)

    def autograd(keyset: DispatchKeySet, *args: Any) -> Any:
        if is_grad_enabled() and _any_requires_grad(*args):
            return function(*args)
        return below_autograd(operator, keyset, args)

    register_autograd_kernel(name, autograd)


def below_autograd(operator: OpOverload, keyset: DispatchKeySet, args: tuple[Any, ...]) -> Any:
    """An operator where no gradient is wanted, from its kernel on the Autograd key."""
    with _AutoDispatchBelowAutograd():
        return operator.redispatch(keyset & _AFTER_AUTOGRAD, *args)


def register_autocast(name: str, cast: Sequence[int], or_float32: bool = False) -> None:
    """Under autocast ``hexa::<name>`` behaves like torch.nn.functional.linear.

    Its floating-point arguments at the positions ``cast`` are cast to the autocast dtype (float64 and packed weights are left
    alone), and the operator then runs with autocast off.

    Args:
        or_float32: a CPU that multiplies the autocast dtype by way of float32 takes them in float32 if one of them is, and casts
            the results: nothing is cast down to be raised again.
    """
    for device in _AUTOCAST_DEVICES:
        kernel = _autocast_kernel(name, device, frozenset(cast), or_float32 and device == "cpu")
        _LIBRARY.impl(name, kernel, f"Autocast{device.upper()}", with_keyset=True)


def is_plain(keyset: DispatchKeySet) -> bool:
    """Whether nothing stands between autograd and the kernel: no mode, no tensor subclass, no tracing."""
    return (keyset & _BELOW_AUTOGRAD).highestPriorityTypeId() in _DENSE


def is_plain_tensor(t: Tensor) -> bool:
    """As `is_plain`, for a tensor where no keyset is at hand."""
    return (
        type(t) is Tensor
        and not _len_torch_dispatch_stack()
        and not is_grad_enabled()
        and peek_interpreter_stack() is None
        and not is_legacy_batchedtensor(t)
    )


def is_eager(tensors: Sequence[Tensor | None], cuda: bool = False) -> bool:
    """As `is_plain`, asked outside torch's dispatcher: whether a call may bypass it unnoticed.

    The functions used here are bound when this module is imported: between matmuls, looking them up in ``torch`` and ``torch._C``
    misses the caches and takes microseconds.

    Args:
        tensors: the arguments, of which the first is a tensor.
        cuda: whether a CUDA device is allowed besides the CPU.
    """
    if is_compiling() or _len_torch_function_stack() or not _PLAIN.issuperset(map(type, tensors)):
        return False
    first = tensors[0]
    assert first is not None
    return (first.is_cpu or (cuda and first.is_cuda)) and not (
        _len_torch_dispatch_stack()
        or _is_any_autocast_enabled()
        or peek_interpreter_stack() is not None
        or _get_tracing_state() is not None
        or first.layout is not _STRIDED
    )


def without_autocast() -> _ExcludeDispatchKeyGuard:
    """A context in which torch's operators ignore autocast."""
    return _ExcludeDispatchKeyGuard(_AUTOCAST_KEYS)


def _autocast_kernel(name: str, device: str, cast: frozenset[int], or_float32: bool) -> Kernel:
    def kernel(_keyset: DispatchKeySet, *args: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)
        wide = or_float32 and multiplies_in_float32(dtype) and any(_is_float32(args[i]) for i in cast)
        cast_args = [_autocast(a, torch.float32 if wide else dtype) if i in cast else a for i, a in enumerate(args)]
        with without_autocast():
            result = overload(name)(*cast_args)
            return tree_map(lambda value: _autocast(value, dtype), result) if wide else result

    return kernel


def _is_float32(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float32


def _autocast(value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.itemsize in (1, 8):
        return value
    return value.to(dtype)
