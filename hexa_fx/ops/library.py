"""Defines the ``hexa::`` operators and looks up their kernels.

An operator has one record of operands (`hexa_fx.ops.table`), at most one autograd formula, and one kernel per device:

* CPU kernels are registered with `kernel` (dispatch key ``CPU``);
* every other device runs the generic one of ``any`` (dispatch key ``CompositeExplicitAutograd``), which a device's own
  kernels override simply by being registered, here or with ``torch.library.impl("hexa::esmm", "CUDA")``.

A registered kernel is reached in two ways. ``torch.ops.hexa.esmm(...)`` goes through torch's dispatcher and checks its arguments.
The programs that `hexa::moe_ffn` runs are checked as a whole, so they call what `kernel_for` returns directly.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from hexa_fx.errors import InputError
from hexa_fx.ops.cpu import multiplies_in_float32
from hexa_fx.ops.listed import Listed
from hexa_fx.ops.records import Operands, described, schema
from hexa_fx.torch_private import (
    DispatchKey,
    DispatchKeySet,
    OpOverload,
    _add_batch_dim,
    _after_ADInplaceOrView_keyset,
    _after_autograd_keyset,
    _are_functorch_transforms_active,
    _AutoDispatchBelowAutograd,
    _get_tracing_state,
    _is_any_autocast_enabled,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
    _remove_batch_dim,
    _vmapmode_decrement_nesting,
    _vmapmode_increment_nesting,
    is_legacy_batchedtensor,
    peek_interpreter_stack,
    under_vmap,
    untraced,
    without_autocast,
)

NAMESPACE = "hexa"

Kernel = Callable[..., Any]
R = TypeVar("R", bound=Operands)
F = TypeVar("F", bound=Kernel)

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_KERNELS: dict[tuple[str, str], Kernel] = {}
_CHECKED: dict[tuple[str, str], Kernel] = {}
_AUTOCAST: dict[tuple[str, str], Kernel] = {}
_RECORDS: dict[str, type[Operands]] = {}
FORMULAS: dict[str, Formula] = {}
_AUTOCAST_DEVICES = ("cpu", "cuda")
_STRIDED = torch.strided
_AFTER_AUTOGRAD = _after_autograd_keyset
_BELOW_AUTOGRAD = _after_ADInplaceOrView_keyset
_PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None), int, float, bool, str, tuple, list})
_DENSE = (DispatchKey.CPU, DispatchKey.CUDA)

kernel_generation = 0
"""Grows with every `register_kernel`: what was bound to kernels before is bound again."""


def operator(
    name: str, autocast: bool = False, or_float32: bool = False, differentiable: bool = True
) -> Callable[[type[R]], type[R]]:
    """Decorates the record of ``hexa::<name>``, from which the operator's schema, check, fake and more follow.

    Args:
        name: without the namespace.
        autocast: under autocast it behaves like torch.nn.functional.linear: the operands that their forms say are cast to the
            autocast dtype (float64 and packed weights are left alone), and it then runs with autocast off. Of operands that may
            have different dtypes only the first is cast.
        or_float32: a CPU that multiplies the autocast dtype by way of float32 takes them in float32 if one of them is, and casts
            the results: nothing is cast down to be raised again.
        differentiable: whether a formula for autograd follows (`register_autograd`). Else a gradient raises.
    """

    def decorate(record: type[R]) -> type[R]:
        _LIBRARY.define(schema(record, name), tags=(torch.Tag.pt2_compliant_tag,))
        _RECORDS[name] = record
        forms = [operand.form for operand in record.operands]
        written = sum(form.written for form in forms)
        if written:
            _register_mutation(name, written)
        else:
            _register_batched(name, functools.partial(overload, name))
        torch.library.register_fake(f"{NAMESPACE}::{name}", functools.partial(_fake, name, record), lib=_LIBRARY)
        if not differentiable:
            _refuse_double_backward(name)
        if autocast:
            places = [record._fields.index(operand.name) for operand in record.operands if operand.form.cast]
            cast = frozenset(places if record.mixed is None else places[:1])
            for device in _AUTOCAST_DEVICES:
                run = _autocast_kernel(name, device, cast, or_float32 and device == "cpu")
                _LIBRARY.impl(name, run, f"Autocast{device.upper()}", with_keyset=True)
        return record

    return decorate


def _fake(name: str, record: type[Operands], *args: Any) -> Any:
    o = record(*args)
    if record.checked:
        o.check(name)
    return o.results()


def names() -> list[str]:
    """Of all operators."""
    return sorted(_RECORDS)


def record_of(name: str) -> type[Operands]:
    """The record of ``hexa::<name>``."""
    return _RECORDS[name]


def overload(name: str) -> OpOverload:
    """The operator ``hexa::<name>``."""
    packet = getattr(torch.ops.hexa, name)
    result: OpOverload = packet.default
    return result


def wrapper(name: str, **defaults: Any) -> Callable[..., Any]:
    """A Python function that calls ``hexa::<name>``, documented by its record. ``defaults``: of arguments that may be left out."""
    run, record = overload(name), _RECORDS[name]
    kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    parameters = [
        inspect.Parameter(field, kind, default=defaults.get(field, empty), annotation=record.types[field])
        for field in record._fields
    ]
    signature = inspect.Signature(parameters)

    def call(*args: Any, **more: Any) -> Any:
        if more or len(args) != len(parameters):
            bound = signature.bind(*args, **more)
            bound.apply_defaults()
            args = bound.args
        return run(*args)

    call.__name__ = call.__qualname__ = name
    raises = "Raises:\n    InputError: they do not fit together."
    call.__doc__ = f"{inspect.getdoc(record)}\n\nOperands:\n{described(record)}\n\n{raises}"
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def register_kernel(name: str, device: str, run: Kernel) -> None:
    """Makes ``run`` the implementation of ``hexa::<name>`` on one device type.

    Args:
        name: without the namespace.
        device: ``cpu``, ``cuda``, ..., or ``any`` for devices without a kernel of their own.
        run: takes the schema's arguments in order. Runs below autograd and outside autocast.
    """
    _register(name, device, run, lambda o: run(*o))


def kernel(name: str, *devices: str) -> Callable[[F], F]:
    """Decorates an implementation of ``hexa::<name>`` on some device types, which takes the operator's record."""
    record = _RECORDS[name]

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def run(*args: Any) -> Any:
            return function(record(*args))

        for device in devices:
            _register(name, device, run, function)
        return function

    return decorate


def _register(name: str, device: str, run: Kernel, of_record: Kernel) -> None:
    """run: takes arguments. of_record: the same of a record, which was checked."""
    global kernel_generation
    record = _RECORDS[name]

    @functools.wraps(run)
    def checked(*args: Any) -> Any:
        if not record.checked:
            with without_autocast():
                return run(*args)
        o = record(*args)
        o.check(name)
        with without_autocast():
            return of_record(o)

    kernel_generation += 1
    _KERNELS[name, device], _CHECKED[name, device] = run, checked
    _LIBRARY.impl(name, checked, "CompositeExplicitAutograd" if device == "any" else device.upper())


def checked_kernel(name: str, device: str) -> Kernel:
    """A kernel that checks its arguments, and runs outside autocast."""
    return _CHECKED[name, device]


def kernel_for(name: str, device: str) -> Kernel:
    """The kernel of ``hexa::<name>`` on a device type, or the operator itself if torch's dispatcher has to choose."""
    return _KERNELS.get((name, device)) or overload(name)


class Kernels:
    """The operators by the kernels of a device type, as `torch.ops.hexa` has them by its dispatcher: ``Kernels("cpu").esmm``."""

    def __init__(self, device: str) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Kernel:
        return kernel_for(name, self._device)


def register_autograd(name: str, backward: Kernel, setup_context: Kernel | None = None) -> None:
    """Registers the autograd formula of ``hexa::<name>`` (see torch.library.register_autograd)."""
    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup_context, lib=_LIBRARY)


class Formula:
    """The gradients of an operator.

    Args:
        record: of its operands.
        gradients: takes these, of each whether it needs a gradient, and the gradients of the results; gives gradients by name.
        kept_for: operands that are only kept for the gradient of another, or for none.
    """

    def __init__(
        self, record: Any, gradients: Callable[..., Mapping[str, Any]], kept_for: Mapping[str, str | None]
    ) -> None:
        self.record, self.gradients, place = record, gradients, record._fields.index
        self._kept_for = [(place(name), None if by is None else place(by)) for name, by in kept_for.items()]

    def keep(self, ctx: Any, inputs: tuple[Any, ...], output: Any = None) -> None:
        """Keeps the operands in an autograd function's context."""
        needs, values = ctx.needs_input_grad, [*inputs]
        for place, by in self._kept_for:
            if by is None or not needs[by]:
                values[place] = None
        saved = [place for place, value in enumerate(values) if isinstance(value, Tensor)]
        ctx.save_for_backward(*[values[place] for place in saved])
        for place in saved:
            values[place] = None
        ctx.static = values, saved

    def kept(self, ctx: Any) -> Any:
        """The operands, and of each whether it needs a gradient. Under a checkpoint they are computed again now."""
        values, saved = [*ctx.static[0]], ctx.static[1]
        for place, tensor in zip(saved, ctx.saved_tensors):
            values[place] = tensor
        return self.record._make(values), self.record._make(ctx.needs_input_grad)

    def backward(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """What autograd is given for every argument."""
        return self.record.by_argument(**self.gradients(*self.kept(ctx), *grads))  # type: ignore[no-any-return]


def formula(name: str, **kept_for: str | None) -> Callable[[F], F]:
    """Decorates the gradients of ``hexa::<name>``, as `Formula` has them."""

    def decorate(gradients: F) -> F:
        assert not _RECORDS[name].defaults, "torch leaves out what is a default"
        made = FORMULAS[name] = Formula(_RECORDS[name], gradients, kept_for)
        register_autograd(name, made.backward, made.keep)
        return gradients

    return decorate


def _refuse_double_backward(name: str) -> None:
    """Makes the backward of ``hexa::<name>``, which is itself a gradient, raise instead of giving a wrong result."""

    def backward(ctx: Any, *grads: Tensor) -> None:
        raise InputError(
            f"hexa::{name} has no second derivative: gradients of gradients (create_graph=True) do not reach through packed "
            "weights, adapters and FP8; run the original module where you need them (hexa_fx.undo_)"
        )

    register_autograd(name, backward)


def _register_mutation(name: str, buffers: int) -> None:
    """Tells autograd that ``hexa::<name>`` writes to its first arguments, as torch.library.custom_op does."""

    def bump(keyset: DispatchKeySet, *args: Any) -> Any:
        torch.autograd.graph.increment_version([a for a in islice(args, buffers) if a is not None])
        return overload(name).redispatch(keyset & _BELOW_AUTOGRAD, *args)

    _LIBRARY.impl(name, bump, "ADInplaceOrView", with_keyset=True)


def register_autograd_kernel(name: str, kernel: Kernel) -> None:
    """Registers a kernel on the Autograd key itself. Its first argument is the dispatch keyset."""
    _LIBRARY.impl(name, kernel, "Autograd", with_keyset=True)


def below_autograd(operator: OpOverload, keyset: DispatchKeySet, args: tuple[Any, ...]) -> Any:
    """An operator where no gradient is wanted, from its kernel on the Autograd key."""
    with _AutoDispatchBelowAutograd():
        return operator.redispatch(keyset & _AFTER_AUTOGRAD, *args)


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


def is_eager(args: Sequence[Any], cuda: bool = False) -> bool:
    """As `is_plain`, asked outside torch's dispatcher: whether a call may bypass it unnoticed.

    The functions used here are bound when this module is imported: between matmuls, looking them up in ``torch`` and ``torch._C``
    misses the caches and takes microseconds.

    Args:
        args: of an operator, of which the first is a tensor.
        cuda: whether a CUDA device is allowed besides the CPU.
    """
    return not _len_torch_function_stack() and is_unseen(args, cuda)


def is_unseen(args: Sequence[Any], cuda: bool = False) -> bool:
    """As `is_eager`, but that modes which see functions of torch, as a default device is one, may be active."""
    if is_compiling() or not _PLAIN.issuperset(map(type, args)):
        return False
    first, *_ = args
    return (first.is_cpu or (cuda and first.is_cuda)) and not (
        _len_torch_dispatch_stack()
        or _is_any_autocast_enabled()
        or peek_interpreter_stack() is not None
        or _get_tracing_state() is not None
        or first.layout is not _STRIDED
    )


def _autocast_kernel(name: str, device: str, cast: frozenset[int], or_float32: bool) -> Kernel:
    def cast_and_run(run: Callable[..., Any], *args: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)
        wide = or_float32 and multiplies_in_float32(dtype) and any(_is_float32(args[i]) for i in cast)
        cast_args = [_autocast(a, torch.float32 if wide else dtype) if i in cast else a for i, a in enumerate(args)]
        with without_autocast():
            result = run(*cast_args)
            return tree_map(lambda value: _autocast(value, dtype), result) if wide else result

    _AUTOCAST[name, device] = cast_and_run
    return lambda _keyset, *args: cast_and_run(overload(name), *args)


def under_autocast(name: str, device: str, run: Callable[..., Any], args: Sequence[Any]) -> Any:
    """What runs ``hexa::<name>`` on a device type, under autocast: ``run`` on operands that are cast as the operator's are."""
    return _AUTOCAST[name, device](run, *args)


def _is_float32(value: Any) -> bool:
    return isinstance(value, Tensor | Listed) and value.dtype == torch.float32


def _autocast(value: Any, dtype: torch.dtype) -> Any:
    number = isinstance(value, Tensor | Listed) and value.dtype.is_floating_point and value.dtype.itemsize not in (1, 8)
    return value.to(dtype) if number else value


def _register_batched(name: str, overload: Callable[[], OpOverload]) -> None:
    """Registers rules for `torch.vmap` and for the older one of torch.autograd: one call for each sample.

    Blocks run their own code in a forward under a transform. What comes here is a backward of many gradients at once
    (``torch.autograd.grad(..., is_grads_batched=True)``, ``torch.autograd.functional.jacobian(..., vectorize=True)``, or a
    `torch.vmap` around ``torch.autograd.grad``): kernels write into memory of their own, which no batching rule of torch's can
    follow.
    """
    for key, kernel in {"FuncTorchBatched": _under_vmap, "Batched": _under_autograds}.items():
        _LIBRARY.impl(name, functools.partial(kernel, overload), key, with_keyset=True)


def _under_vmap(overload: Callable[[], OpOverload], _keyset: DispatchKeySet, *args: Any) -> Any:
    def rule(info: Any, dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        leaves, spec = tree_flatten(args)
        results = _each(overload(), leaves, tree_flatten(dims)[0], info.batch_size, spec)
        return results, tree_map(lambda _: 0, results)

    return under_vmap(rule, overload(), args)


def _under_autograds(overload: Callable[[], OpOverload], _keyset: DispatchKeySet, *args: Any) -> Any:
    level = _vmapmode_increment_nesting() - 1
    _vmapmode_decrement_nesting()
    leaves, spec = tree_flatten(args)
    dims = [0 if isinstance(leaf, Tensor) and is_legacy_batchedtensor(leaf) else None for leaf in leaves]
    leaves = [leaf if dim is None else _remove_batch_dim(leaf, level, 1, 0) for leaf, dim in zip(leaves, dims)]
    size = next(len(leaf) for leaf, dim in zip(leaves, dims) if dim is not None)
    return tree_map(lambda found: _add_batch_dim(found, 0, level), _each(overload(), leaves, dims, size, spec))


def _each(overload: OpOverload, leaves: Sequence[Any], dims: Sequence[int | None], size: int, spec: Any) -> Any:
    """The results of all samples, stacked in their first dimension."""
    found = []
    for number in range(size):
        sample = [leaf if dim is None else leaf.select(dim, number) for leaf, dim in zip(leaves, dims)]
        found.append(overload(*tree_unflatten(sample, spec)))
    return tree_map(lambda *same: torch.stack(same), *found)


class DirectFunction(torch.autograd.Function):
    """`torch.autograd.Function` for functions that transforms cannot pass through anyway, as they define no ``setup_context``.

    Torch first unwraps arguments that are left over from a transform which has ended. Its operators do that too.

    Where code that is compiled calls ``backward()``, a compiler would compile this one's too.

    Raises:
        InputError: a transform is active.
    """

    def __init_subclass__(cls) -> None:
        untraced(cls.backward)

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if _are_functorch_transforms_active():
            raise InputError(
                "torch.func (grad, jacrev, vjp) does not go through operators of hexa_fx: use backward() or torch.autograd.grad, "
                "or the original module"
            )
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]
