"""How autograd runs layers (`hexa::moe_ffn`, `hexa::moe_ffn_sources`, `hexa::moe_ffn_fp8`): through operators, or by their kernels
directly.

A compiler, a dispatch mode or a tensor subclass sees a layer's ``_forward`` and ``_backward`` as operators. On plain tensors with
nothing of that kind active, kernels are called directly, because torch's dispatcher takes as long to reach a Python kernel as a
small layer takes to run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import islice, zip_longest
from operator import itemgetter
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled

from hexa_fx.errors import InputError
from hexa_fx.ops import library, main_grad
from hexa_fx.ops.fixed_order import fixed_order
from hexa_fx.ops.library import DirectFunction
from hexa_fx.ops.listed import Listed, dense, tensors_of, versions, wanted_of
from hexa_fx.ops.table_layers import PARAMETERS, MoeFfn, MoeFfnBackward, MoeFfnSources, MoeFfnSourcesBackward
from hexa_fx.torch_private import DispatchKeySet, _any_requires_grad, _AutoDispatchBelowAutograd, is_forward_mode

_OPS = torch.ops.hexa
_on_cuda: dict[str, Callable[..., Any]] = {}


@dataclass(frozen=True, eq=False)  # compared by identity, which is quick to look up by
class Layer:
    """A layer as autograd sees it.

    Args:
        name: of the operators for inference, forward and backward, without their ends.
        record: of the first two.
        gradients: of the last.
        kept: what forward returns besides y.
        fixed: whether a token's bits are the same in any batch.
        backward: what computes gradients on plain tensors; None for what runs the operator.
        one_by_one: whether kernels of a CPU make a gradient for each tensor of a list.
    """

    name: str
    record: Any
    gradients: Any
    kept: tuple[str, ...]
    fixed: bool = False
    backward: Callable[..., Any] | None = None
    one_by_one: bool = True

    @property
    def operator(self) -> str:
        """Name of the operator for inference."""
        return f"{self.name}_fixed" if self.fixed else self.name


_ROUTING = ("v", "inv", "offs")
_DENSE = Layer("moe_ffn", MoeFfn, MoeFfnBackward, ("h", *_ROUTING))
_SOURCES = Layer("moe_ffn_sources", MoeFfnSources, MoeFfnSourcesBackward, ("h", "u1", "u3", "u2", *_ROUTING))
LAYERS = {each.operator: each for layer in (_DENSE, _SOURCES) for each in (layer, replace(layer, fixed=True))}
"""By their operators for inference."""


class LayerFunction(DirectFunction):
    """The autograd function of a layer. It keeps x if something needs it, h unless it is computed again, routing and operands.

    Behind the operands come the tensors of those that are listed.
    """

    @staticmethod
    def forward(ctx: Any, layer: Layer, plain: bool, *args: Any) -> Tensor:
        o, listed = layer.record.split(args)
        with _AutoDispatchBelowAutograd(), fixed_order() if plain and layer.fixed else nullcontext():
            name = f"{layer.name if plain else layer.operator}_forward"
            y, *kept = run(name, *o) if plain else library.overload(name)(*o)
        (_, _, *wanted), ctx.listed = ctx.needs_input_grad, {}
        if listed:
            needs, of_listed = layer.record.split(wanted)
            ctx.listed = _marks_of(o, of_listed)
            wanted = needs._replace(**{name: any(each) for name, (_, each) in ctx.listed.items()})
        values = [*o, *kept, o.top_k]
        how = _how_kept(layer, tuple(map(type, values)), tuple(wanted), o.recompute_h)
        ctx.biases = {}
        for name, place in how.biases:
            bias = values[place]
            ctx.biases[name] = bias, versions(bias)
            values[place] = main_grad.shape_only(bias)
        values += how.constants
        form: list[Any] = [*how.form(values)]
        several: list[Tensor] = []
        for place in how.lists:
            value = form[place]
            tensors = value.tensors if type(value) is Listed else value
            if tensors and isinstance(tensors[0], Tensor):
                several += tensors
                form[place] = _Many(len(tensors), value.of([]).of if type(value) is Listed else list)
        ctx.save_for_backward(*several, *how.tensors(values))
        ctx.layer, ctx.how, ctx.form, ctx.several = layer, how, form, bool(several)
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy, layer, how, values, saved = grads[0], ctx.layer, ctx.how, ctx.form, iter(ctx.saved_tensors)
        if ctx.several:
            values = [
                value.made(list(islice(saved, value.many))) if type(value) is _Many else value for value in values
            ]
        values = [next(saved) if value is _ONE else value for value in values]
        saved, plain = None, library.is_plain_tensor(dy)
        values[how.dy] = dy
        if plain and values[how.h] is not None:
            values[how.h] = [values[how.h]]  # the backward program pops it and frees it after its last use
            ctx.maybe_clear_saved_tensors()  # unless the graph is retained
        o = layer.gradients._make(values)
        if is_grad_enabled():  # these gradients may be derived again
            o = o._replace(**_unwritten(ctx.biases))
        if not plain and ctx.listed:
            o = o._make(map(dense, o))
        name, names = f"{layer.name}_backward", layer.record.differentiable
        operands = _differentiable(layer.gradients, *names[1:])(o)
        into, needs = _into(o, ctx.listed) if ctx.listed and plain and (layer.one_by_one or dy.is_cuda) else {}, o.needs
        others = [need and name not in into for name, need in zip(names, needs)] if into else needs

        def call(*buffers: Tensor | None) -> list[Tensor]:
            if not plain:
                return library.overload(name)(*o)  # type: ignore[no-any-return]
            if into:
                buffers = tuple(into.get(name, buffer) for name, buffer in zip_longest(names[1:], buffers))
            return run(name, *o, *buffers) if layer.backward is None else layer.backward(*o, *buffers)  # type: ignore[no-any-return]

        found = dict(zip(names, main_grad.gradients(call, operands, others, plain)))
        given = layer.record.by_argument(**{name: grad for name, grad in found.items() if name not in ctx.listed})
        return None, None, *given, *_given_to_listed(o, ctx.listed, into, found)


def _unwritten(biases: dict[str, tuple[Any, list[int]]]) -> dict[str, Any]:
    """Biases of which only the shape was kept, as they were given.

    Raises:
        InputError: one was written to meanwhile.
    """
    for name, (bias, before) in biases.items():
        if versions(bias) != before:
            raise InputError(
                f"{name} was written to between forward and a backward with create_graph=True, which reads it"
            )
    return {name: bias for name, (bias, _) in biases.items()}


class _Many(NamedTuple):
    """So many tensors, and what is made of them."""

    many: int
    made: Callable[[list[Tensor]], Any]


_Marks = dict[str, tuple[Sequence[int], Sequence[bool]]]
"""By listed operand, the sizes of its parts, and of each of its tensors whether it wants a gradient."""


def _marks_of(o: Any, marks: Sequence[bool]) -> _Marks:
    left = iter(marks)
    listed = [(name, value) for name, value in zip(o._fields, o) if type(value) is Listed]
    return {name: (value.sizes, list(islice(left, len(value.tensors)))) for name, value in listed}


def _into(o: Any, listed: _Marks) -> dict[str, Any]:
    """What takes the gradients of listed operands: each tensor's own, or on a GPU a stack if gradients go on to buffers."""
    marked = [(name, getattr(o, name), wanted) for name, (_, wanted) in listed.items() if any(wanted)]
    if not o.dy.is_cuda:
        return {name: main_grad.ListedGradients(name, weight, wanted) for name, weight, wanted in marked}
    stacks = ((name, main_grad.zeros_for(weight, wanted)) for name, weight, wanted in marked if name in PARAMETERS)
    return {name: stack for name, stack in stacks if stack is not None}


def _given_to_listed(
    o: Any, listed: _Marks, into: dict[str, Any], found: dict[str, Tensor | None]
) -> list[Tensor | None]:
    """Gradients of all tensors of listed operands."""
    given: list[Tensor | None] = []
    for name, (sizes, wanted) in listed.items():
        taken, operand = into.get(name), getattr(o, name)
        grad = found.get(name) if taken is None else taken
        if isinstance(taken, main_grad.ListedGradients):
            given += taken.results()
        elif grad is None:
            given += [None] * len(wanted)
        elif type(operand) is Listed:
            given += main_grad.shares(name, operand, wanted, grad)
        else:
            given += wanted_of(grad, sizes, wanted)
    return given


_ONE = object()
"""What stands for a tensor while it is saved."""


class _Kept(NamedTuple):
    """What backward is given of a call, found once for all calls of a kind, since a small layer takes no longer than finding it.

    Args:
        form: picks the operands of backward among the operands of forward, what that kept, top_k and ``constants``; `_ONE` where a
            tensor is saved.
        tensors: picks the tensors that are saved.
        constants: what is the same in all calls.
        lists: places in ``form`` of lists, perhaps of tensors.
        biases: those of which only the shape is needed, and their places.
        dy, h: places in ``form``.
    """

    form: Callable[[Sequence[Any]], tuple[Any, ...]]
    tensors: Callable[[Sequence[Any]], tuple[Tensor, ...]]
    constants: tuple[Any, ...]
    lists: tuple[int, ...]
    biases: tuple[tuple[str, int], ...]
    dy: int
    h: int


@lru_cache(maxsize=1024)
def _how_kept(layer: Layer, kinds: tuple[type, ...], wanted: tuple[bool, ...], recompute_h: bool) -> _Kept:
    """What backward is given; kinds: of the operands of forward, what that kept, and top_k. wanted: gradients, of operands."""
    count, needs = len(layer.record._fields), layer.record._make(wanted)
    places = layer.record._make(range(count))
    one, none, marks = range(len(kinds), len(kinds) + 3)
    keeps_x = places._replace(recompute_h=recompute_h).keeps_x(needs)
    dropped = (*(() if keeps_x else _OF_X), *(_OF_H if recompute_h else ()))
    given = {**dict(zip(layer.kept, range(count, len(kinds)))), **dict.fromkeys(dropped, none)}
    found = places.to(layer.gradients, top_k=len(kinds) - 1, needs=marks, **given)
    form = [none if place is None else place for place in found]
    tensors = [place for place in form if place < len(kinds) and issubclass(kinds[place], Tensor)]
    return _Kept(
        itemgetter(*(one if place in tensors else place for place in form)),
        itemgetter(*tensors),
        (_ONE, None, [*_differentiable(layer.record)(needs)]),
        tuple(at for at, place in enumerate(form) if place < len(kinds) and kinds[place] in (list, Listed)),
        tuple(
            (name, getattr(places, name))
            for name in main_grad.shapes_only(needs, recompute_h)
            if kinds[getattr(places, name)] is not NoneType
        ),
        *map(layer.gradients._fields.index, ("dy", "h")),
    )


@cache
def _differentiable(record: Any, *names: str) -> Callable[[Any], tuple[Any, ...]]:
    """A function of operands that gives those of these names, or else those that are differentiable."""
    return record.pick(*(names or record.differentiable))  # type: ignore[no-any-return]


_OF_X, _OF_H = ("x", "xq", "xs"), ("h", "hs")


def autograd(layer: Layer, keyset: DispatchKeySet, *args: Any) -> Any:
    """A layer's operator on the Autograd key."""
    if is_forward_mode():
        raise InputError(
            f"hexa::{layer.operator} has no forward-mode derivative (torch.func.jvp, torch.autograd.forward_ad); use backward, or "
            "the original module"
        )
    if library.is_plain(keyset):
        return plain(layer, args)
    if is_grad_enabled() and _any_requires_grad(*args):
        return LayerFunction.apply(layer, False, *args)
    return library.below_autograd(library.overload(layer.operator), keyset, args)


def plain(layer: Layer, args: tuple[Any, ...]) -> Any:
    """A layer with autograd, where nothing but autograd has to see it."""
    if is_grad_enabled() and _any_requires_grad(*args):
        return LayerFunction.apply(layer, True, *args)
    return _without_gradients(layer, args)


def listed(layer: Layer, *args: Any) -> Any:
    """As `plain`, with operands that are listed."""
    if is_grad_enabled():
        tensors = tensors_of(args)
        if _any_requires_grad(*args, *tensors):
            return LayerFunction.apply(layer, True, *args, *tensors)
    return _without_gradients(layer, args)


def _without_gradients(layer: Layer, args: tuple[Any, ...]) -> Any:
    with _AutoDispatchBelowAutograd():
        if not layer.fixed:
            return run(layer.name, *args)
        with fixed_order():
            return run(layer.name, *args)


def run(name: str, *args: Any) -> Any:
    """Runs an operator of a layer on plain tensors."""
    return on_device(name, library.checked_kernel(name, "any"), *args)


def on_device(name: str, general: Callable[..., Any], *args: Any) -> Any:
    """Runs a layer on plain tensors: as their device does, or as ``general`` does on any. name: as `register_on_cuda` takes it."""
    first, *_ = args
    return _on_cuda[name](general, *args) if first.is_cuda and name in _on_cuda else general(*args)


def register_on_cuda(name: str, kernel: Callable[..., Any]) -> None:
    """Registers what runs a layer on plain CUDA tensors.

    Args:
        name: ``moe_ffn``, ``moe_ffn_forward``, ``moe_ffn_backward``, or of ``moe_ffn_sources``, which are operators; or of
            ``quantized_ffn`` (`hexa_fx.ops.moe_ffn_fp8`).
        kernel: takes the general implementation, then the layer's arguments, unchecked.
    """
    _on_cuda[name] = kernel


for _name, _layer in LAYERS.items():
    library.register_autograd_kernel(_name, partial(autograd, _layer))
