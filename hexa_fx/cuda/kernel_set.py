"""Every kernel that a layer may ever launch, whatever the number of tokens: what to build before anybody waits for it.

A kernel depends on a number of tokens only through buckets and a few limits of rows per expert. So the layer's own programs run
on tensors without data at one number of tokens in each interval between them, and what they would launch is collected.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from hexa_fx import jit
from hexa_fx.codegen.family_block_sm90 import FAMILY
from hexa_fx.codegen.family_decode import MOST_SLOTS, SLOTS, SUMMED_SLOTS
from hexa_fx.codegen.family_gemm_sm90 import CLUSTER_ROWS, ROW_LIMITS
from hexa_fx.codegen.family_rows import ACTIVATE, COMBINE, QUANTIZE
from hexa_fx.codegen.spec import KernelSpec
from hexa_fx.cuda.calls import chosen, kind_of, planned
from hexa_fx.cuda.choosing import Card, card_of, on_forget
from hexa_fx.cuda.decode import MOST_TOKENS as MOST_DECODED
from hexa_fx.cuda.fp8 import quantize_weight_fp8
from hexa_fx.cuda.layer import PROGRAMS, WHEN_NEW
from hexa_fx.cuda.packed import MOST_BUCKET
from hexa_fx.cuda.places import STEPS
from hexa_fx.cuda.rows import ONE_BLOCK_SLOTS
from hexa_fx.errors import KernelError
from hexa_fx.ops import fp8_weights, library
from hexa_fx.ops import moe_ffn_fp8 as fp8
from hexa_fx.ops.listed import Listed, Places
from hexa_fx.ops.moe_ffn_autograd import LAYERS, Layer
from hexa_fx.ops.table_fp8 import MoeFfnFp8Forward
from hexa_fx.ops.table_layers import OPERANDS, SOURCES_OPERANDS, MoeFfn, MoeFfnSources

log = logging.getLogger(__name__)

MOST_TOKENS = 65536
"""Tokens of one call up to which every kernel is in a layer's set."""


@dataclass(frozen=True)
class FfnLayer:
    """A layer of experts as kernels see it.

    Args:
        call: of `hexa::moe_ffn` or `hexa::moe_ffn_sources`, with any number of tokens. Only shapes, strides and types count.
        grads: operands that training wants gradients of.
        added: the types of buffers (``main_grad``) that gradients are added to, by operand.
        summed: the same in a further micro-batch, with ``.grad`` (`hexa_fx.ops.grad_sums`).
    """

    call: MoeFfn | MoeFfnSources
    grads: frozenset[str] = frozenset(OPERANDS)
    added: Mapping[str, torch.dtype] = field(default_factory=dict)
    summed: Mapping[str, torch.dtype] = field(default_factory=dict)

    @property
    def needs(self) -> list[bool]:
        """Of each differentiable operand, whether its gradient is wanted."""
        return [name in self.grads and getattr(self.call, name) is not None for name in self.call.differentiable]

    @property
    def buffers(self) -> list[Tensor | None]:
        """Of each differentiable operand but the first, what its gradient is added to, or None."""
        given = ((name, getattr(self.call, name)) for name in self.call.differentiable[1:])
        return [
            without_data(t.shape, self.added[name]) if t is not None and name in self.added else None
            for name, t in given
        ]


def frozen(call: MoeFfnSources) -> FfnLayer:
    """A layer of which training wants the gradients of factors, biases and tokens."""
    return FfnLayer(call, frozenset(SOURCES_OPERANDS) - {"w1", "w3", "w2"})


def kernel_set(layer: FfnLayer, card: Card, training: bool = True, most: int = MOST_TOKENS) -> tuple[KernelSpec, ...]:
    """Every kernel that calls of a layer with 1 to `most` tokens launch, in the order in which growing calls need them.

    Needs no device, no compiler and no data, and takes some hundredths of a second.

    Args:
        layer: of which only shapes, strides and types count.
        card: what kernels are chosen for, see `hexa_fx.cuda.choosing`. Chosen are those of `most` aligned addresses.
        training: also those of forward and backward of training.
        most: tokens.

    Raises:
        KernelError: no kernel runs on such a card, or takes these operands.
    """
    found: dict[KernelSpec, None] = {}
    for tokens in token_counts(layer.call, most):
        found.update(dict.fromkeys(launched(layer, card, tokens, training)))
    return tuple(found)


def token_counts(call: MoeFfn | MoeFfnSources, most: int) -> list[int]:
    """The fewest tokens of each interval in which all calls take the same kernels."""
    experts, top_k = call.w1.shape[0], call.top_k_index.shape[1]
    buckets = [experts << power for power in range((most * top_k // experts).bit_length() + 1)]
    limits = [0, *buckets, *(experts * rows for rows in ROW_LIMITS), MOST_DECODED * top_k]
    limits += [ONE_BLOCK_SLOTS, *SLOTS, *SUMMED_SLOTS, MOST_SLOTS]
    limits += [experts << MOST_BUCKET] if isinstance(call, MoeFfnSources) else []
    return sorted({tokens for limit in limits if (tokens := limit // top_k + 1) <= most})


def launched(layer: FfnLayer, card: Card, tokens: int, training: bool = True) -> list[KernelSpec]:
    """The kernels that a layer launches at a number of tokens, in order."""
    o = with_tokens(layer.call, tokens)
    of = LAYERS["moe_ffn_sources" if isinstance(o, MoeFfnSources) else "moe_ffn"]
    return _of_programs(layer, card, training, o, of, of.name)


def _of_programs(
    layer: FfnLayer, card: Card, training: bool, o: Any, of: Layer, name: str, *taken: Callable[[Any], Any]
) -> list[KernelSpec]:
    """Of a layer's programs. taken: what they take in place of the operands of forward and backward, if that is something else."""
    forward, backward = taken or (lambda o: o, lambda o: o)
    found = _planned(PROGRAMS[name], forward(o), card)
    if not training:
        return found
    y, *kept = library.record_of(f"{of.name}_forward")._make(o).results()
    saved = dict(zip(of.kept, kept)) | ({"h": None} if o.recompute_h else {})
    back = backward(o.to(of.gradients, dy=y, top_k=o.top_k, needs=layer.needs, **saved))
    found += _planned(PROGRAMS[f"{name}_forward"], forward(o), card)
    return found + _planned(PROGRAMS[f"{name}_backward"], (*back, *layer.buffers), card)


def _planned(function: Callable[..., Any], args: Sequence[Any], card: Card) -> list[KernelSpec]:
    return [kernel.spec for kernel in planned(function, args, card, chosen()).kernels]


def fp8_kernel_set(layer: FfnLayer, card: Card, training: bool = True) -> tuple[KernelSpec, ...]:
    """The kernels that a layer launches in FP8 block compute besides those of its exact form, at any number of tokens.

    Of them only products of rows depend on that number (`hexa_fx.cuda.fp8.cluster_of`). None on a card that FP8 products do
    not run on.

    Args:
        layer, card, training: as for `kernel_set`.
    """
    if not card.is_hopper:
        return ()
    experts, top_k = layer.call.w1.shape[0], layer.call.top_k_index.shape[1]
    counts = 1, CLUSTER_ROWS * experts // top_k + 1
    found = [spec for tokens in counts for spec in _launched_in_fp8(layer, card, tokens, training)]
    return tuple(spec for spec in dict.fromkeys(found) if spec.family in (FAMILY, QUANTIZE, ACTIVATE, COMBINE))


def _launched_in_fp8(layer: FfnLayer, card: Card, tokens: int, training: bool) -> list[KernelSpec]:
    o = with_tokens(layer.call, tokens).to(MoeFfnFp8Forward, cached=False)
    first, second = (o.w1, o.w3, o.layout1, o.glu), (o.w2, None, o.layout2, "none")
    found, copies = [], []
    for w, w3, layout, glu in (first, second):
        copies.append(fp8_weights.empty(w, layout, glu, training))
        found += _planned(quantize_weight_fp8, (*copies[-1], w, w3, layout, glu), card)
    taken = (lambda o: fp8.of_forward(o, *copies)), (lambda o: fp8.of_backward(o, *copies))
    return found + _of_programs(layer, card, training, o, fp8.LAYER, "quantized_ffn", *taken)


def with_tokens(call: MoeFfn | MoeFfnSources, tokens: int) -> Any:
    """A call with so many tokens, which have no data."""

    def of(t: Any) -> Any:
        return None if t is None else without_data((tokens, *t.shape[1:]), t.dtype)

    rows = {name: of(getattr(call, name)) for name in ("x", "top_k_index", "top_k_weights")}
    return call._replace(**rows)


def without_data(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of which only shape, strides and type count."""
    return torch.empty(shape, dtype=dtype, device="meta")


def listed_without_data(weight: Tensor, parts: int) -> Listed:
    """A weight (E, N, K) as one of listed experts, each of which has a matrix for each part."""
    experts, lines, columns = weight.shape
    matrices = [without_data((lines // parts, columns), weight.dtype)] * experts
    made = Listed([matrices] * parts)
    made.places = Places(0, without_data((parts, experts), torch.int32), STEPS[0] // weight.element_size())
    return made


_seen: set[tuple[object, ...]] = set()
on_forget(_seen.clear)


def kind_of_layer(call: MoeFfnSources) -> tuple[object, ...]:
    """Everything but tokens, factors of additions and data: what a layer's kernels follow from."""
    kind, *_ = kind_of(with_tokens(call._replace(alphas=[]), 1))
    return tuple(kind)


def _request_once(args: tuple[Any, ...]) -> None:
    o = MoeFfnSources._make(args)
    kind = o.x.device.index, *kind_of_layer(o)
    if kind not in _seen:
        _seen.add(kind)
        request(o, card_of(o.x.device.index))


WHEN_NEW |= dict.fromkeys(("moe_ffn_sources", "moe_ffn_sources_forward"), _request_once)


def request(call: MoeFfnSources, card: Card) -> Thread:
    """Requests every kernel that calls like this one launch, at any number of tokens. Returns the thread that finds out which.

    Args:
        call: of which only types, shapes and strides count; nothing of it is kept.
        card: what kernels are chosen for.
    """
    layer = frozen(MoeFfnSources._make(map(_without_data, call)))
    thread = Thread(target=request_now, args=(layer, card), name="hexa_fx kernel set", daemon=True)
    thread.start()
    return thread


def request_now(layer: FfnLayer, card: Card) -> None:
    """Requests every kernel of a layer. Where there are none, its operators fall back and say so."""
    try:
        jit.builder().request(kernel_set(layer, card))
    except (KernelError, OSError) as error:
        log.debug("no kernels are built ahead: %s", error)


def _without_data(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_without_data(one) for one in value]
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
