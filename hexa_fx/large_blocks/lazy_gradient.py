"""Gradients of large weights that stay sums of products while autograd takes them from a product back to the parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.fx.immutable_collections import immutable_list
from torch.utils import _pytree as pytree

from hexa_fx import ops  # defines the operators
from hexa_fx.isolation.size import LEAST_BYTES
from hexa_fx.large_blocks import upcast_weight
from hexa_fx.large_blocks.outer_products import (
    PLAIN,
    NotAPlace,
    Places,
    Term,
    filled,
    reshaped,
    sketch,
    sketch_of_dense,
    sketches,
)
from hexa_fx.large_blocks.upcast_weight import UpcastWeight, written
from hexa_fx.ops.rows import contiguous_strides
from hexa_fx.torch_private import DispatchMode, _disabled_torch_function_impl

_ATEN = torch.ops.aten


class LazyGradient(torch.Tensor):
    """A float64 tensor that is a sum of products of matrices. Operations that do not keep it one get it filled.

    Args:
        shape: of the gradient.
        terms: the products. The list may grow, since backward formulas write to the zeros that they start with.
        device: where the products are.
        limit: bytes up to which it may be filled.
    """

    terms: list[Term]
    limit: int
    _places: dict[tuple[int, int], Places]
    __torch_function__ = _disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, shape: Sequence[int], terms: list[Term], device: torch.device, limit: int) -> LazyGradient:
        made: LazyGradient = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, tuple(shape), strides=contiguous_strides(shape), dtype=torch.float64, device=device
        )
        made.terms, made.limit = terms, limit
        made._places = {}
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyGradient({tuple(self.shape)}, {len(self.terms)} products)"

    def like(self, shape: Sequence[int], terms: list[Term]) -> LazyGradient:
        """Another one on the same device."""
        return LazyGradient(shape, terms, self.device, self.limit)

    def between(self, dim: int, start: int, stop: int) -> list[Term]:
        """What lies between two indices of a dimension, counted from the first of them."""
        key = dim, len(self.terms)
        if key not in self._places:
            self._places[key] = Places(self.terms, dim)
        cut = (self.terms[number].cut(dim, start, stop) for number in self._places[key].near(start, stop))
        return [term for term in cut if term is not None]

    def filled(self) -> Tensor:
        """The tensor itself; raises `TooLarge` if it must not be made."""
        return filled(self.terms, self.shape, self.device, self.limit)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation below autograd that is given a `LazyGradient`."""
    keep = _KEEPERS.get(func)
    if keep is not None:
        try:
            return keep(*args, **kwargs)
        except NotAPlace:
            pass
    if keep is None and func._can_decompose():
        return func.decompose(*args, **kwargs)
    if any(isinstance(value, LazyGradient) for value in written(func, args, kwargs)):
        raise NotImplementedError(f"{func} writes to a gradient that is kept as products")
    args, kwargs = pytree.tree_map_only(LazyGradient, LazyGradient.filled, (args, kwargs))
    return func(*args, **kwargs)


def _permute(grad: LazyGradient, order: Sequence[int]) -> LazyGradient:
    order = [dim % grad.dim() for dim in order]
    terms = [term.with_dims([term.dims[dim] for dim in order]) for term in grad.terms]
    return grad.like([grad.shape[dim] for dim in order], terms)


def _transpose(grad: LazyGradient, one: int, two: int) -> LazyGradient:
    order = list(range(grad.dim()))
    order[one], order[two] = order[two], order[one]
    return _permute(grad, order)


def _view(grad: LazyGradient, shape: Sequence[int], *strides: Any, **kwargs: Any) -> LazyGradient:
    known = math.prod(size for size in shape if size >= 0)
    new = [grad.numel() // max(1, known) if size < 0 else size for size in shape]
    return grad.like(new, [part for term in grad.terms for part in reshaped(term, grad.shape, new)])


def _unsqueeze(grad: LazyGradient, dim: int) -> LazyGradient:
    dim %= grad.dim() + 1
    return _embedded(grad, [*grad.shape[:dim], 1, *grad.shape[dim:]], dim, 0)


def _embedded(grad: LazyGradient, shape: Sequence[int], dim: int, index: int) -> LazyGradient:
    """The gradient at one index of a new dimension."""
    terms = [term.with_dims([*term.dims[:dim], (index, (0, 0)), *term.dims[dim:]]) for term in grad.terms]
    return grad.like(shape, terms)


def _select_backward(grad: LazyGradient, shape: Sequence[int], dim: int, index: int) -> LazyGradient:
    dim %= len(shape)
    return _embedded(grad, shape, dim, index % shape[dim])


def _slice_backward(
    grad: LazyGradient, shape: Sequence[int], dim: int, start: int, end: int, step: int
) -> LazyGradient:
    dim, start = dim % len(shape), slice(start, end, step).indices(shape[dim % len(shape)])[0]
    terms = []
    for term in grad.terms:
        dims = term.dims
        first, (by_row, by_column) = dims[dim]
        dims[dim] = (start + step * first, (step * by_row, step * by_column))
        terms.append(term.with_dims(dims))
    return grad.like(shape, terms)


def _select(grad: LazyGradient, dim: int, index: int) -> LazyGradient:
    dim %= grad.dim()
    return _squeeze(_narrow(grad, dim, index % grad.shape[dim], 1), dim)


def _squeeze(grad: LazyGradient, dim: int) -> LazyGradient:
    dim %= grad.dim()
    if grad.shape[dim] != 1:
        return grad
    terms = [term.with_dims([*term.dims[:dim], *term.dims[dim + 1 :]]) for term in grad.terms]
    return grad.like([*grad.shape[:dim], *grad.shape[dim + 1 :]], terms)


def _narrow(grad: LazyGradient, dim: int, start: int, length: int) -> LazyGradient:
    shape = [*grad.shape[:dim], length, *grad.shape[dim + 1 :]]
    return grad.like(shape, grad.between(dim, start, start + length))


def _slice(
    grad: LazyGradient, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> LazyGradient:
    if step != 1:
        raise NotAPlace
    dim %= grad.dim()
    low, high, _ = slice(start, end).indices(grad.shape[dim])
    return _narrow(grad, dim, low, max(0, high - low))


def _split(grad: LazyGradient, sizes: int | Sequence[int], dim: int = 0) -> list[LazyGradient]:
    dim %= grad.dim()
    if isinstance(sizes, int):
        sizes = [min(sizes, grad.shape[dim] - start) for start in range(0, grad.shape[dim], sizes)]
    return [_narrow(grad, dim, start, size) for start, size in zip((0, *accumulate(sizes)), sizes)]


def _unbind(grad: LazyGradient, dim: int = 0) -> list[LazyGradient]:
    """As many gradients as the dimension is long. Most products are of one of them, and are given to it at once."""
    dim %= grad.dim()
    shape = [*grad.shape[:dim], *grad.shape[dim + 1 :]]
    parts: list[list[Term]] = [[] for _ in range(grad.shape[dim])]
    for term in grad.terms:
        if any(term.steps[dim]):
            return [_select(grad, dim, index) for index in range(grad.shape[dim])]
        parts[term.starts[dim]].append(term.with_dims([*term.dims[:dim], *term.dims[dim + 1 :]]))
    return [grad.like(shape, terms) for terms in parts]


def _add(one: Any, two: Any, alpha: float = 1) -> Any:
    if alpha != 1 or not isinstance(one, LazyGradient) or not isinstance(two, LazyGradient) or one.shape != two.shape:
        raise NotAPlace
    return one.like(one.shape, [*one.terms, *two.terms])


def _cat(grads: Sequence[Any], dim: int = 0) -> LazyGradient:
    first = next(grad for grad in grads if isinstance(grad, LazyGradient))
    dim %= first.dim()
    terms, start = [], 0
    for grad in grads:
        for term in _terms_of(grad):
            dims = term.dims
            dims[dim] = (dims[dim][0] + start, dims[dim][1])
            terms.append(term.with_dims(dims))
        start += grad.shape[dim]
    return first.like([*first.shape[:dim], start, *first.shape[dim + 1 :]], terms)


def _terms_of(grad: Tensor) -> list[Term]:
    """The products of a gradient. Autograd fills parts that have none with zeros."""
    if isinstance(grad, LazyGradient):
        return grad.terms
    if bool(grad[(slice(1),) * grad.dim()].any() if not any(grad.stride()) else grad.any()):
        raise NotAPlace
    return []


def _stack(grads: Sequence[Any], dim: int = 0) -> LazyGradient:
    return _cat(
        [_unsqueeze(grad, dim) if isinstance(grad, LazyGradient) else grad.unsqueeze(dim) for grad in grads], dim
    )


def _sum(grad: LazyGradient, dims: Sequence[int], keepdim: bool = False, **kwargs: Any) -> LazyGradient:
    """A sum over dimensions along which every product has one index: the gradient of `expand`."""
    summed = sorted({dim % grad.dim() for dim in dims}, reverse=True)
    if any(any(term.steps[dim]) for term in grad.terms for dim in summed):
        raise NotAPlace
    shape, terms = list(grad.shape), grad.terms
    for dim in summed:
        shape[dim] = 1
        terms = [term.moved(dim, 0) for term in terms]
    result = grad.like(shape, terms)
    for dim in () if keepdim else summed:
        result = _squeeze(result, dim)
    return result


def _same(grad: LazyGradient, *args: Any, **kwargs: Any) -> LazyGradient:
    return grad.like(grad.shape, grad.terms)


def _put(grad: Any, indices: Sequence[Any], values: Any, accumulate: bool = False, *unsafe: Any) -> Any:
    """Gradients of gathered experts, added to zeros: ``grad[index] += values``."""
    if not isinstance(grad, LazyGradient) or not isinstance(values, LazyGradient) or not accumulate:
        raise NotAPlace
    if indices[0] is None or any(index is not None for index in indices[1:]) or indices[0].dtype == torch.bool:
        raise NotAPlace
    return _added_at(grad, 0, indices[0], values)


def _index_add(grad: Any, dim: int, index: Tensor, values: Any, *, alpha: float = 1) -> Any:
    if not isinstance(grad, LazyGradient) or not isinstance(values, LazyGradient) or alpha != 1:
        raise NotAPlace
    return _added_at(grad, dim % grad.dim(), index, values)


def _added_at(grad: LazyGradient, dim: int, index: Tensor, values: LazyGradient) -> LazyGradient:
    if index.dim() != 1:
        raise NotAPlace
    targets = index.tolist()
    if any(any(term.steps[dim]) for term in values.terms):
        raise NotAPlace
    grad.terms += [term.moved(dim, targets[term.starts[dim]] % grad.shape[dim]) for term in values.terms]
    return grad


_KEEPERS: dict[Any, Callable[..., Any]] = {
    _ATEN.t.default: lambda grad: _transpose(grad, 0, 1),
    _ATEN.transpose.int: _transpose,
    _ATEN.permute.default: _permute,
    _ATEN.view.default: _view,
    _ATEN._unsafe_view.default: _view,
    _ATEN._reshape_alias.default: _view,
    _ATEN.unsqueeze.default: _unsqueeze,
    _ATEN.squeeze.dim: _squeeze,
    _ATEN.select_backward.default: _select_backward,
    _ATEN.slice_backward.default: _slice_backward,
    _ATEN.select.int: _select,
    _ATEN.slice.Tensor: _slice,
    _ATEN.split.Tensor: _split,
    _ATEN.split_with_sizes.default: _split,
    _ATEN.unbind.int: _unbind,
    _ATEN.add.Tensor: _add,
    _ATEN.cat.default: _cat,
    _ATEN.stack.default: _stack,
    _ATEN.sum.dim_IntList: _sum,
    _ATEN.detach.default: _same,
    _ATEN.alias.default: _same,
    _ATEN.clone.default: _same,
    _ATEN._to_copy.default: _same,
    _ATEN.new_zeros.default: lambda grad, shape, **kwargs: grad.like(shape, []),
    _ATEN.zeros_like.default: lambda grad, **kwargs: grad.like(grad.shape, []),
    _ATEN.index_put.default: _put,
    _ATEN.index_put_.default: _put,
    _ATEN._index_put_impl_.default: _put,
    _ATEN.index_add.default: _index_add,
    _ATEN.index_add_.default: _index_add,
}


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


def lazy_gradients(leaves: Iterable[Tensor]) -> LazyGradients:
    """The mode under which to differentiate by ``leaves``, among which there are upcast weights."""
    return LazyGradients([leaf for leaf in leaves if isinstance(leaf, UpcastWeight)])


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
