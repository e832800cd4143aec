"""A mode for backward under which the gradients of large weights stay sums of products."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.fx.immutable_collections import immutable_list

from hexa_fx import ops  # defines the operators
from hexa_fx.isolation import upcast_weight
from hexa_fx.isolation.lazy_gradient import LazyGradient, run
from hexa_fx.isolation.outer_products import PLAIN, NotAPlace, Term, sketch, sketch_of_dense, sketches
from hexa_fx.isolation.upcast_weight import LEAST_BYTES, UpcastWeight
from hexa_fx.ops.dispatch_mode import DispatchMode

_ATEN = torch.ops.aten


@torch.no_grad()
def compared(gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """What of gradients is compared: of upcast weights' their products with random directions, of others all."""
    single = {
        number: term
        for number, (gradient, parameter) in enumerate(zip(gradients, parameters))
        if isinstance(parameter, UpcastWeight) and isinstance(gradient, LazyGradient) and (term := _matrix(gradient))
    }
    sketched = dict(zip(single, sketches([*single.values()])))
    each = enumerate(zip(gradients, parameters))
    return [sketched[n] if n in sketched else _compared(*pair) for n, pair in each]


def _compared(gradient: Tensor | None, parameter: Tensor) -> Tensor | None:
    if not isinstance(parameter, UpcastWeight):
        return gradient.filled() if isinstance(gradient, LazyGradient) else gradient
    if gradient is None:
        return None
    if not isinstance(gradient, LazyGradient):
        return sketch_of_dense(gradient)
    try:
        return sketch(gradient.terms, gradient.shape, gradient.device)
    except NotAPlace:
        return sketch_of_dense(gradient.filled())


def _matrix(gradient: LazyGradient) -> Term | None:
    """The one product that a matrix's gradient is, as those of listed experts are; of no rows where there is none."""
    if gradient.dim() != 2 or len(gradient.terms) > 1:
        return None
    rows, width = gradient.shape
    left, right = (torch.empty(size, dtype=torch.float64, device=gradient.device) for size in ((rows, 0), (0, width)))
    term = gradient.terms[0] if gradient.terms else Term(left, right, (0, 0), PLAIN)
    if term.steps == tuple(reversed(PLAIN)):
        term = Term(term.right.t(), term.left.t(), term.starts, PLAIN)
    return term if term.steps == PLAIN and term.extents == tuple(gradient.shape) and not any(term.starts) else None


def lazy_gradients(leaves: Iterable[Tensor]) -> AbstractContextManager[Any]:
    """The mode under which to differentiate by ``leaves``; no mode if no upcast weight is among them."""
    upcast = [leaf for leaf in leaves if isinstance(leaf, UpcastWeight)]
    return LazyGradients(upcast) if upcast else nullcontext()


class LazyGradients(DispatchMode):
    """A mode for backward: large products of few rows, and zeros of an upcast weight's shape, become `LazyGradient`s.

    Args:
        weights: the upcast weights, whose limit on copies counts for gradients too.
    """

    def __init__(self, weights: Sequence[UpcastWeight]) -> None:
        super().__init__()
        self._limit = weights[0].limit
        self._shapes = {tuple(weight.shape) for weight in weights if weight.dim() > 2}
        self._shapes |= {(*shape[:-2], shape[-1], shape[-2]) for shape in self._shapes}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = _kinds((*args, *kwargs.values()) if kwargs else args)
        if LazyGradient in given:
            return run(func, args, kwargs)
        if UpcastWeight in given:
            with nullcontext() if upcast_weight.is_product(func) else self:  # a product's result is small
                return upcast_weight.run(func, args, kwargs)
        made = _MAKERS.get(func)
        return func(*args, **kwargs) if made is None else made(self, func, args, kwargs)

    def is_large(self, shape: Sequence[int]) -> bool:
        """Whether a float64 tensor of this shape must not be filled, or is the gradient of an upcast weight."""
        return tuple(shape) in self._shapes or 8 * math.prod(shape) > max(self._limit, LEAST_BYTES)

    def gradient(self, shape: Sequence[int], terms: list[Term], device: torch.device) -> LazyGradient:
        """A lazy gradient with the mode's limit."""
        return LazyGradient(shape, terms, device, self._limit)


def _kinds(values: Iterable[Any]) -> set[type]:
    """Of an operation's arguments, also in lists; without pytree, which takes longer than a small operation."""
    kinds = {*map(type, values)}
    if not kinds.isdisjoint(_LISTS):
        kinds.update(*(_kinds(value) for value in values if type(value) in _LISTS))
    return kinds


_LISTS = frozenset({list, tuple, torch.Size, immutable_list})


def _product(mode: LazyGradients, func: Any, args: Any, kwargs: Any) -> Any:
    a, b = args
    shape = (*a.shape[:-1], b.shape[-1])
    if a.dtype != torch.float64 or _is_dense(shape, a, b):
        return func(*args, **kwargs)
    if a.dim() == 2:  # of no rows for experts without tokens
        terms = [Term(a, b, (0, 0), PLAIN)] if len(b) else []
        return mode.gradient(shape, terms, a.device)
    terms = [Term(left, right, (e, 0, 0), ((0, 0), *PLAIN)) for e, (left, right) in enumerate(zip(a, b))]
    return mode.gradient(shape, terms, a.device)


def _is_dense(shape: Sequence[int], a: Tensor, b: Tensor) -> bool:
    """Whether a product of matrices is small, or no larger than they are."""
    return 8 * math.prod(shape) < LEAST_BYTES or math.prod(shape) < 2 * (a.numel() + b.numel())


def _zeros(mode: LazyGradients, func: Any, args: Any, kwargs: Any) -> Any:
    like = args[0] if isinstance(args[0], Tensor) else None
    shape = args[0] if like is None else like.shape if func is _ATEN.zeros_like.default else args[1]
    dtype = kwargs.get("dtype") or (torch.get_default_dtype() if like is None else like.dtype)
    if dtype != torch.float64 or not mode.is_large(shape):
        return func(*args, **kwargs)
    device = kwargs.get("device") or (torch.device("cpu") if like is None else like.device)
    return mode.gradient(shape, [], torch.device(device))


def _expert_products(mode: LazyGradients, func: Any, args: Any, kwargs: Any) -> Any:
    """``hexa::estmm``: the gradient of a stack, expert by expert."""
    x, g, x_index, g_index, offs, top_k, layout = args
    experts, width, out = len(offs) - 1, x.shape[1], g.shape[1]
    shape = (experts, out, width) if layout == "nk" else (experts, width, out)
    if x.dtype != torch.float64 or 8 * math.prod(shape) < LEAST_BYTES:
        return func(*args, **kwargs)
    x, g = _gathered(x, x_index, top_k), _gathered(g, g_index, top_k)
    terms = []
    for expert, (start, end) in enumerate(pairwise(offs.tolist())):
        if start < end:
            left, right = (g, x) if layout == "nk" else (x, g)
            terms.append(Term(left[start:end].t(), right[start:end], (expert, 0, 0), ((0, 0), *PLAIN)))
    return mode.gradient(shape, terms, x.device)


def _gathered(rows: Tensor, index: Tensor | None, top_k: int) -> Tensor:
    return rows if index is None else rows[torch.div(index, top_k, rounding_mode="floor").long()]


_MAKERS: dict[Any, Callable[..., Any]] = {
    _ATEN.mm.default: _product,
    _ATEN.bmm.default: _product,
    _ATEN.zeros.default: _zeros,
    _ATEN.zeros_like.default: _zeros,
    _ATEN.new_zeros.default: _zeros,
    ops.library.overload("estmm"): _expert_products,
}
