"""How autograd runs layers (`hexa::moe_ffn`, `hexa::moe_ffn_sources`, `hexa::moe_ffn_fp8`): through operators, or by their kernels
directly.

A compiler, a dispatch mode or a tensor subclass sees a layer's ``_forward`` and ``_backward`` as operators. On plain tensors with
nothing of that kind active, kernels are called directly, because torch's dispatcher takes as long to reach a Python kernel as a
small layer takes to run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice, zip_longest
from operator import itemgetter
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled

from hexa_fx.errors import InputError
from hexa_fx.ops import library, main_grad
from hexa_fx.ops.fixed_order import fixed_order
from hexa_fx.ops.grad_sums import owner_of
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
        fixed: whether a token's bits are the same in any batch.
        backward: what computes gradients on plain tensors; None for what runs the operator.
        one_by_one: whether kernels of a CPU make a gradient for each tensor of a list.
    """

    name: str
    record: Any
    gradients: Any
    fixed: bool = False
    backward: Callable[..., Any] | None = None
    one_by_one: bool = True

    @property
    def operator(self) -> str:
        """Name of the operator for inference."""
        return f"{self.name}_fixed" if self.fixed else self.name

    @property
    def kept(self) -> list[str]:
        """What forward returns besides y."""
        _, *kept = re.findall(r"Tensor (\w+)", library.record_of(f"{self.name}_forward").returns)
        return kept


_DENSE = Layer("moe_ffn", MoeFfn, MoeFfnBackward)
_SOURCES = Layer("moe_ffn_sources", MoeFfnSources, MoeFfnSourcesBackward)
LAYERS = {each.operator: each for layer in (_DENSE, _SOURCES) for each in (layer, replace(layer, fixed=True))}
"""By their operators for inference."""


class LayerFunction(DirectFunction):
    """The autograd function of a layer. It keeps x if something needs it, h unless it is computed again, routing and operands.

    Behind the operands come the tensors of those that are listed.
    """

    @staticmethod
    def forward(ctx: Any, layer: Layer, plain: bool, *args: Any) -> Tensor:
        o, listed = layer.record.split(args)
        with _AutoDispatchBelowAutograd(), fixed_order() if plain and layer.fixed else _AS_IT_IS:
            name = f"{layer.name if plain else layer.operator}_forward"
            y, *kept = run(name, *o) if plain else library.overload(name)(*o)
        _, _, *wanted = ctx.needs_input_grad
        marks: _Marks = {}
        if listed:
            needs, of_listed = layer.record.split(wanted)
            marks = _marks_of(o, of_listed)
            wanted = needs._replace(**{name: any(each) for name, (_, each) in marks.items()})
        values = [*o, *kept, o.top_k]
        how = _how_kept(layer, tuple(map(type, values)), tuple(wanted), o.recompute_h)
        biases: _Biases = {}
        for name, place in how.biases:
            bias = values[place]
            biases[name] = bias, versions(bias)
            values[place] = main_grad.shape_only(bias)
        values += how.constants
        form: list[Any] = [*how.form(values)]
        several: list[Tensor] = []
        many: list[int] = []
        for place in how.lists:
            value = form[place]
            tensors = value.tensors if type(value) is Listed else value
            if tensors and isinstance(tensors[0], Tensor):
                several += tensors
                many.append(place)
                form[place] = _Many(len(tensors), value.of([]).of if type(value) is Listed else list)
        ctx.save_for_backward(*several, *how.tensors(values))
        ctx.kept = layer, how, form, many, marks, biases
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (layer, how, form, many, listed, biases) = grads, ctx.kept
        values, plain = _with_saved(how, form, many, ctx.saved_tensors), library.is_plain_tensor(dy)
        values[how.dy] = dy
        if plain and values[how.h] is not None:
            values[how.h] = [values[how.h]]  # the backward program pops it and frees it after its last use
            ctx.maybe_clear_saved_tensors()  # unless the graph is retained
        o = layer.gradients._make(values)
        if is_grad_enabled():  # these gradients may be derived again
            o = o._replace(**_unwritten(biases))
        if listed and not plain:
            o = o._make(map(dense, o))
        edges = ctx.next_functions  # made anew each time, of all tensors of lists
        owned = _as_owned(o, listed, edges) if listed and plain else o
        name, names, needs = f"{layer.name}_backward", layer.record.differentiable, o.needs
        into = _into(owned, listed) if listed and plain and (layer.one_by_one or dy.is_cuda) else {}
        others = [need and name not in into for name, need in zip(names, needs)] if into else needs

        def call(*buffers: Tensor | None) -> list[Tensor]:
            if not plain:
                return library.overload(name)(*o)  # type: ignore[no-any-return]
            if into:
                buffers = tuple(into.get(name, buffer) for name, buffer in zip_longest(names[1:], buffers))
            return run(name, *o, *buffers) if layer.backward is None else layer.backward(*o, *buffers)  # type: ignore[no-any-return]

        nodes = [edges[at][0] if at >= 0 else None for at in how.nodes]
        found = main_grad.gradients(call, how.operands(o), nodes, others, plain)
        if not listed:
            return how.given((*found, None))  # type: ignore[no-any-return]
        by_name = dict(zip(names, found))
        found = [None if name in listed else grad for name, grad in by_name.items()]
        return (*how.given((*found, None)), *_given_to_listed(owned, listed, into, by_name))


_AS_IT_IS = nullcontext()
_Biases = dict[str, tuple[Any, list[int]]]
"""Biases of which only the shape is kept, and their versions, by operand."""


def _with_saved(how: _Kept, form: Sequence[Any], many: Sequence[int], saved: Sequence[Tensor]) -> list[Any]:
    """``form`` with what was saved."""
    values, each = [*form], iter(saved)
    for place in many:
        values[place] = form[place].made(list(islice(each, form[place].many)))
    for place, tensor in zip(how.saved, each):
        values[place] = tensor
    return values


def _unwritten(biases: _Biases) -> dict[str, Any]:
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


def _as_owned(o: Any, listed: _Marks, edges: Sequence[tuple[Any, int]]) -> Any:
    """The operands with lists of the parameters themselves, where what was saved is something else, as under checkpoints.

    edges: to where autograd takes gradients; the last ones are of tensors of lists.
    """
    found, at = {}, len(edges) - sum(len(wanted) for _, wanted in listed.values())
    for name, (_, wanted) in listed.items():
        weight, each = getattr(o, name), edges[at : at + len(wanted)]
        at += len(wanted)
        if weight.tensors and owner_of(each[0][0], weight.tensors[0]) is not weight.tensors[0]:
            found[name] = weight.of([owner_of(node, tensor) for (node, _), tensor in zip(each, weight.tensors)])
    return o._replace(**found)


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


class _Kept(NamedTuple):
    """What backward is given of a call, found once for all calls of a kind, since a small layer takes no longer than finding it.

    Args:
        form: picks the operands of backward among the operands of forward, what that kept, top_k and ``constants``; None where a
            tensor is saved.
        tensors: picks the tensors that are saved.
        saved: their places in ``form``.
        constants: what is the same in all calls.
        lists: places in ``form`` of lists, perhaps of tensors.
        biases: those of which only the shape is needed, and their places.
        operands: picks the differentiable operands without x among those of backward.
        given: picks what autograd is given for each argument among the gradients of all differentiable operands, and None.
        nodes: of each of ``operands``, where it is among the tensors that autograd was given; -1 for none.
        dy, h: places in ``form``.
    """

    form: Callable[[Sequence[Any]], tuple[Any, ...]]
    tensors: Callable[[Sequence[Any]], tuple[Tensor, ...]]
    saved: tuple[int, ...]
    constants: tuple[Any, ...]
    lists: tuple[int, ...]
    biases: tuple[tuple[str, int], ...]
    operands: Callable[[Any], tuple[Tensor | None, ...]]
    given: Callable[[Sequence[Tensor | None]], tuple[Tensor | None, ...]]
    nodes: tuple[int, ...]
    dy: int
    h: int


@lru_cache(maxsize=1024)
def _how_kept(layer: Layer, kinds: tuple[type, ...], wanted: tuple[bool, ...], recompute_h: bool) -> _Kept:
    """What backward is given; kinds: of the operands of forward, what that kept, and top_k. wanted: gradients, of operands."""
    record, gradients = layer.record, layer.gradients
    count, names = len(record._fields), record.differentiable
    needs, places = record._make(wanted), record._make(range(count))
    none, marks = range(len(kinds), len(kinds) + 2)
    keeps_x = places._replace(recompute_h=recompute_h).keeps_x(needs)
    dropped = (*(() if keeps_x else _OF_X), *(_OF_H if recompute_h else ()))
    given = {**dict(zip(layer.kept, range(count, len(kinds)))), **dict.fromkeys(dropped, none)}
    found = places.to(gradients, top_k=len(kinds) - 1, needs=marks, **given)
    form = [none if place is None else place for place in found]
    saved = [at for at, place in enumerate(form) if place < len(kinds) and issubclass(kinds[place], Tensor)]
    grads = [names.index(name) if name in names else len(names) for name in record._fields]
    tensors = [at for at, kind in enumerate(kinds[:count]) if issubclass(kind, Tensor)]
    return _Kept(
        itemgetter(*(none if at in saved else place for at, place in enumerate(form))),
        itemgetter(*(form[at] for at in saved)),
        tuple(saved),
        (None, [*record.pick(*names)(needs)]),
        tuple(at for at, place in enumerate(form) if place < len(kinds) and kinds[place] in (list, Listed)),
        tuple(
            (name, getattr(places, name))
            for name in main_grad.shapes_only(needs, recompute_h)
            if kinds[getattr(places, name)] is not NoneType
        ),
        gradients.pick(*names[1:]),
        itemgetter(len(names), len(names), *grads),
        tuple(tensors.index(at) if (at := getattr(places, name)) in tensors else -1 for name in names[1:]),
        *map(gradients._fields.index, ("dy", "h")),
    )


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
    with _AutoDispatchBelowAutograd(), fixed_order() if layer.fixed else _AS_IT_IS:
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
