"""A layer of experts: ``hexa::moe_ffn``, a whole MoE feed-forward in one node, which is the canonical form of the rewrite, and
``hexa::moe_ffn_sources``, the same on weights that are packed, have low-rank additions (LoRA), or both.

It is one autograd unit, so that it decides what is saved for backward: x, h (unless ``recompute_h``), the routing and the
weights. Below autograd there are three operators:

* ``moe_ffn`` itself, where no gradient is wanted and h is never kept;
* ``moe_ffn_forward``, which also returns what backward needs;
* ``moe_ffn_backward``.

All run the programs that the layers' compiler makes (`hexa_fx.ops.program`). `hexa_fx.ops.moe_ffn_autograd` is how autograd reaches
them. What ends in ``_fixed`` takes no way that depends on the number of tokens (the dense one, another tile), so that a token's
result has the same bits in any batch; gradients are sums over tokens, whose bits depend on it.

Gradients that are to be derived again (``create_graph=True``), as penalties on gradients, forces and products with a Hessian ask
for, come from the operator ``hexa::moe_ffn_backward``. To derive it, the layer is computed once more, by operators that are derived
as often as it takes, and derived twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from hexa_fx.errors import InputError
from hexa_fx.ir import FfnSpec
from hexa_fx.ops import library
from hexa_fx.ops.activations import activation_forward
from hexa_fx.ops.fixed_order import in_fixed_order
from hexa_fx.ops.listed import Listed
from hexa_fx.ops.program import programs
from hexa_fx.ops.records import INTEGER, shape
from hexa_fx.ops.rows import accumulate_dtype
from hexa_fx.ops.table_layers import (
    OPERANDS,
    PARAMETERS,
    MoeFfn,
    MoeFfnBackward,
    MoeFfnSources,
    MoeFfnSourcesBackward,
    static_of,
)
from hexa_fx.torch_private import _len_torch_dispatch_stack, without_autocast

_OPS = torch.ops.hexa


def moe_ffn(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor | None,
    w1: Tensor,
    b1: Tensor | None,
    w3: Tensor | None,
    b3: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    spec: FfnSpec,
) -> Tensor:
    """``y[t] = sum over s of top_k_weights[t, s] * FFN_{e(t, s)}(x[t])`` (paper, section 3).

    Args:
        x: (T, D).
        top_k_index: (T, k) integer in 0 .. E-1; any other number, such as E or -1, is a slot that contributes nothing. A token
            may name an expert twice.
        top_k_weights: (T, k) in any floating dtype, or None, which means 1.
        w1: first projection, (E, N, D) for ``spec.layout1 == "nk"``, (E, D, N) for ``kn``; N = I, or 2I for glu
            ``concat`` and ``interleaved``.
        b1: (E, N) or None.
        w3, b3: the up projection of glu ``split``, shaped as w1 and b1.
        w2: second projection, (E, D, I) or (E, I, D) as ``spec.layout2`` says.
        b2: (E, D) or None.
        spec: activation, glu, layouts, and whether to recompute h in backward.

    Returns:
        (T, D) in x's dtype (under autocast: in the autocast dtype, as torch.nn.functional.linear).

    Mixed precision: if a weight or bias has an attribute ``main_grad``, a float32 tensor of its shape, its gradient is added to
    that before it is rounded to 16 bits, and ``.grad`` gets none. Not under a compiler. See docs/training.md.

    Saved for backward: x (not if W1 and W3 are frozen), h (not with ``recompute_h``), the routing and the weights.

    Raises:
        InputError: shapes, dtypes or devices do not fit together; a second derivative is asked for where W1 and W3 are frozen;
            with HEXA_FX_CHECKED=1 also for an expert id below 0 or above E.
    """
    y: Tensor = _OPS.moe_ffn.default(x, top_k_index, top_k_weights, w1, b1, w3, b3, w2, b2, *static_of(spec))
    return y


Layer = MoeFfn | MoeFfnSources
Gradients = MoeFfnBackward | MoeFfnSourcesBackward
_PLAIN = frozenset({Tensor, torch.nn.Parameter, Listed, type(None)})


def _device_of(o: Layer | Gradients) -> str:
    """Whose kernels run: plain torch's where a weight is a tensor of another class, which has no memory to point to."""
    return o.w1.device.type if _PLAIN.issuperset([type(getattr(o, name)) for name in PARAMETERS]) else "any"


def _given(o: Layer | Gradients) -> tuple[bool, ...]:
    """Of each differentiable operand of a layer's forward, whether there is one. There is an x, which backward need not keep."""
    _, *names = o.differentiable
    return True, *[getattr(o, name) is not None for name in names]


def forward_on(device: str | None, training: bool, o: Layer) -> Any:
    """The forward program of a device type, by default the operands': y, for training also what backward needs. Arguments are not
    checked.
    """
    of_sources = isinstance(o, MoeFfnSources)
    kind = o.static, _given(o), device or _device_of(o), library.kernel_generation
    found = programs(*kind, () if training else None).forward(*o)
    if not training or not (of_sources or o.recompute_h):
        return found
    y, *kept = found
    left = iter(kept)
    h = o.hidden() if o.recompute_h else next(left)
    if not of_sources:
        return y, h, *left
    # An addition that is not there has a tensor of its own: results of a custom operator may not share one.
    u = [h.new_empty((0, 0)) if a is None else next(left) for a in (o.a1, o.a3, o.a2)]  # type: ignore[union-attr]
    return y, h, *u, *left


def backward_on(device: str | None, record: type[Gradients], args: Iterable[Any], fused: bool = True) -> list[Tensor]:
    """The backward program of a device type. If h is in a list, it is freed after its last use. Buffers may follow the operands."""
    o, buffers = record.split(tuple(args))
    h: Any = o.h if o.h is None or isinstance(o.h, list) else [o.h]
    kind = o.static, _given(o), device or _device_of(o), library.kernel_generation
    program = programs(*kind, tuple(o.needs), tuple([buffer is not None for buffer in buffers]), fused)
    return list(program.backward(*o._replace(h=h), *buffers))


def _register(name: str, gradients: type[Gradients]) -> None:
    """Registers the kernels for any device of a layer's operators."""
    for end, training in (("", False), ("_forward", True)):
        run = partial(forward_on, None, training)
        library.kernel(f"{name}{end}", "any")(run)
        library.kernel(f"{name}_fixed{end}", "any")(in_fixed_order(run))
    library.register_kernel(f"{name}_backward", "any", lambda *args: backward_on(None, gradients, args))


_register("moe_ffn", MoeFfnBackward)
_register("moe_ffn_sources", MoeFfnSourcesBackward)


_GIVEN = ("dy", *OPERANDS)


@library.formula("moe_ffn_backward", h=None)
def _derived_again(o: MoeFfnBackward, _: Any, grads: list[Tensor | None]) -> dict[str, Any]:
    """Gradients of dy, x, routing weights and parameters, from those of the layer's gradients. h follows from x."""
    if o.x is None:
        raise InputError(
            "hexa::moe_ffn: x is not kept where the weights that it is multiplied by are frozen, and a second derivative needs it; "
            "let them require gradients, or run the original module (hexa_fx.undo_)"
        )
    again = torch.is_grad_enabled()
    with torch.enable_grad(), without_autocast():
        given = {name: each.view_as(each) for name in _GIVEN if (each := getattr(o, name)) is not None}
        needed = [given[name] for name, need in zip(OPERANDS, o.needs, strict=True) if need]
        first = torch.autograd.grad(_layer(o._replace(**given)), needed, given["dy"], create_graph=True)
        asked = [
            (value, grad) for value, grad in zip(first, grads, strict=True) if grad is not None and value.requires_grad
        ]
        leaves = {name: each for name, each in given.items() if each.requires_grad}
        values, upstream = zip(*asked) if asked else ((), ())
        found = torch.autograd.grad(values, [*leaves.values()], upstream, create_graph=again, allow_unused=True)
    return {
        **dict(zip(leaves, found)),
        "params": None if o.params else [],
    }  # torch takes an empty list for one of tensors


def _layer(o: MoeFfnBackward) -> Tensor:
    """y of a layer, from its operands and its routing."""
    rows = o.v, o.offs, o.top_k, o.layout1
    h = _OPS.esmm(o.x, o.w1, o.b1, *rows)
    if o.w3 is not None:
        h = torch.cat((h, _OPS.esmm(o.x, o.w3, o.b3, *rows)), 1)
    a = activation_forward(h.to(accumulate_dtype(h.dtype)), o.activation, o.glu, o.params).to(h.dtype)
    y = _OPS.esmm(a, o.w2, o.b2, None, o.offs, 1, o.layout2)
    return _OPS.combine(y, o.top_k_weights, o.inv, o.offs, o.top_k)  # type: ignore[no-any-return]


def experts(
    rows: Tensor,
    counts: Tensor,
    row_weights: Tensor | None,
    w1: Tensor,
    b1: Tensor | None,
    w3: Tensor | None,
    b3: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    spec: FfnSpec,
) -> Tensor:
    """``y[r] = row_weights[r] * FFN_e(rows[r])`` for rows that lie together by expert, which somebody else has dispatched: an
    all-to-all, DeepEP, torchtitan, expert parallelism of any kind. It is `hexa::moe_ffn` of one slot a row.

    Nothing waits for the device, so ``rows`` may be allocated for the most that can arrive: rows after the last one counted are
    never read, whatever they hold, give zeros and get zeros as their gradient.

    Args:
        rows: (R, D), first those of expert 0, then those of expert 1, and so on. Or (S, R, D): one such block from each of S
            senders, each with room of its own.
        counts: integer, rows of each expert, 0 or more and at most R in all, on the device of ``rows``: (E,), or (S, E) for S
            senders, whose rows may also lie right behind one another in an (R, D). No sorting by expert is needed then, nor
            sorting back. Nobody looks at them on a GPU, where one below 0 counts as 0; on a CPU it is refused.
        row_weights: in any floating dtype, one a row, or None, which means 1.
        w1, b1, w3, b3, w2, b2, spec: as for `hexa_fx.ops.moe_ffn`, of the E experts that are here.

    Returns:
        In the order, shape and dtype of ``rows``.

    Raises:
        InputError: shapes, dtypes or devices do not fit together.
    """
    _check(rows, counts, row_weights, w1.shape[0])
    index = _expert_of(rows, counts).reshape(-1, 1)
    weights = None if row_weights is None else row_weights.reshape(-1, 1)
    flat = rows.reshape(-1, rows.shape[-1])
    return moe_ffn(flat, index, weights, w1, b1, w3, b3, w2, b2, spec).reshape(rows.shape)


def _check(rows: Tensor, counts: Tensor, row_weights: Tensor | None, experts: int) -> None:
    op = "hexa_fx.ops.experts"
    if rows.dim() not in (2, 3):
        raise InputError(f"{op}: rows is {shape(rows)}; expected (rows, D) or (senders, rows, D)")
    if not isinstance(counts, Tensor) or counts.device != rows.device:
        found = f"on {counts.device}" if isinstance(counts, Tensor) else f"a {type(counts).__name__}"
        raise InputError(f"{op}: counts is {found}; expected a tensor on {rows.device}, where the rows are")
    dims = (1, 2) if rows.dim() == 2 else (2,)
    fits = counts.dim() in dims and counts.shape[-1] == experts and counts.dtype in INTEGER
    if not fits or (rows.dim() == 3 and counts.shape[0] != rows.shape[0]):
        raise InputError(
            f"{op}: counts is {shape(counts)}; expected integer ({experts},), or one such row for each sender's block"
        )
    seen = type(counts) is Tensor and counts.is_cpu and not is_compiling() and not _len_torch_dispatch_stack()
    if seen and bool((counts < 0).any()):
        raise InputError(f"{op}: counts has {int(counts.min())}; expected the number of rows of each expert, 0 or more")
    if row_weights is None:
        return
    if row_weights.shape != rows.shape[:-1] or not row_weights.is_floating_point():
        raise InputError(
            f"{op}: row_weights is {shape(row_weights)}; expected floating, one a row, {tuple(rows.shape[:-1])}"
        )


def _expert_of(rows: Tensor, counts: Tensor) -> Tensor:
    """Expert of every row; E, which contributes nothing, for rows that nobody counted."""
    number = counts.shape[-1]
    counts = counts.clamp(min=0)
    ends = counts.cumsum(-1) if rows.dim() == 3 else counts.reshape(-1).cumsum(0)
    places = torch.arange(rows.shape[-2], device=rows.device, dtype=ends.dtype)
    run = torch.searchsorted(ends, places.expand(rows.shape[:-1]).contiguous(), right=True)
    return torch.where(run < ends.shape[-1], run % max(number, 1), number)
