"""Every kernel that a layer may ever launch, whatever the number of tokens: what to build before anybody waits for it.

A kernel depends on a number of tokens only through buckets and a few limits of rows per expert. So the layer's own programs run
on tensors without data at one number of tokens in each interval between them, and what they would launch is collected.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hexa_fx.codegen.spec import KernelSpec
from hexa_fx.codegen.tiles_sm90 import ROW_LIMITS
from hexa_fx.cuda.choosing import Card, collect
from hexa_fx.cuda.rows import ONE_BLOCK_SLOTS
from hexa_fx.ir import FfnSpec
from hexa_fx.ops.program import OPERANDS, programs

MOST_TOKENS = 65536
"""Tokens of one call up to which every kernel is in a layer's set."""


@dataclass(frozen=True)
class FfnLayer:
    """A layer of experts as kernels see it: `hexa::moe_ffn` without its tokens.

    Args:
        spec: the expert.
        top_k: experts per token.
        w1, b1, w3, b3, w2, b2: the operator's weights, of which only shapes, strides and types count (see `meta_like`).
        index: element type of expert ids.
        gates: element type of routing weights; None if there are none.
        grads: operands that training wants gradients of, of `OPERANDS`.
        added: of these, the ones whose gradients are added to buffers (``main_grad``).
    """

    spec: FfnSpec
    top_k: int
    w1: Tensor
    w2: Tensor
    w3: Tensor | None = None
    b1: Tensor | None = None
    b3: Tensor | None = None
    b2: Tensor | None = None
    index: torch.dtype = torch.int64
    gates: torch.dtype | None = torch.float32
    grads: frozenset[str] = frozenset(OPERANDS)
    added: frozenset[str] = frozenset()

    @property
    def experts(self) -> int:
        """E."""
        return self.w1.shape[0]

    @property
    def weights(self) -> tuple[Tensor | None, ...]:
        """In the order of the operator."""
        return self.w1, self.b1, self.w3, self.b3, self.w2, self.b2


def layer_of(
    spec: FfnSpec,
    *,
    experts: int,
    top_k: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype = torch.bfloat16,
    biases: bool = False,
    index: torch.dtype = torch.int64,
    gates: torch.dtype | None = torch.float32,
) -> FfnLayer:
    """A layer with contiguous weights of these sizes: E experts, D = `hidden`, I = `inner`."""
    columns = 2 * inner if spec.glu in ("concat", "interleaved") else inner

    def weight(layout: str, inputs: int, outputs: int) -> Tensor:
        shape = (outputs, inputs) if layout == "nk" else (inputs, outputs)
        return torch.empty((experts, *shape), dtype=dtype, device="meta")

    def bias(width: int) -> Tensor | None:
        return torch.empty((experts, width), dtype=dtype, device="meta") if biases else None

    split = spec.glu == "split"
    return FfnLayer(
        spec,
        top_k,
        w1=weight(spec.layout1, hidden, columns),
        w2=weight(spec.layout2, inner, hidden),
        w3=weight(spec.layout1, hidden, inner) if split else None,
        b1=bias(columns),
        b3=bias(inner) if split else None,
        b2=bias(hidden),
        index=index,
        gates=gates,
    )


def kernel_set(layer: FfnLayer, card: Card, training: bool = True, most: int = MOST_TOKENS) -> tuple[KernelSpec, ...]:
    """Every kernel that calls of a layer with 1 to `most` tokens launch, in the order in which growing calls need them.

    Needs no device, no compiler and no data, and takes some hundredths of a second.

    Args:
        layer: see `layer_of`.
        card: what kernels are chosen for, see `hexa_fx.cuda.choosing`. Chosen are those of `most` aligned addresses.
        training: also those of forward and backward of training.
        most: tokens.
    """
    found: dict[KernelSpec, None] = {}
    for tokens in token_counts(layer.experts, layer.top_k, most):
        with collect(card) as specs, torch.no_grad():
            _run(layer, tokens, training)
        found.update(dict.fromkeys(specs))
    return tuple(found)


def token_counts(experts: int, top_k: int, most: int) -> list[int]:
    """The fewest tokens of each interval in which all calls take the same kernels."""
    buckets = [experts << power for power in range((most * top_k // experts).bit_length() + 1)]
    limits = (*buckets, *(experts * rows for rows in ROW_LIMITS), ONE_BLOCK_SLOTS)
    return sorted({tokens for limit in (0, *limits) if (tokens := limit // top_k + 1) <= most})


def _run(layer: FfnLayer, tokens: int, training: bool) -> None:
    """The layer's programs at a number of tokens. Their launches are collected."""

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    spec, dtype = layer.spec, layer.w1.dtype
    hidden = layer.w2.shape[1] if spec.layout2 == "nk" else layer.w2.shape[2]
    x, index = empty(tokens, hidden, dtype=dtype), empty(tokens, layer.top_k, dtype=layer.index)
    gates = None if layer.gates is None else empty(tokens, layer.top_k, dtype=layer.gates)
    given = (True, gates is not None, *(weight is not None for weight in layer.weights))
    static = (spec.activation, spec.glu, spec.params, spec.layout1, spec.layout2, spec.recompute_h)
    programs(static, given, (False,) * len(given), False, "cuda").forward(x, index, gates, *layer.weights)
    if not training:
        return
    needs = tuple(name in layer.grads and there for name, there in zip(OPERANDS, given, strict=True))
    added = tuple(name in layer.added for name in OPERANDS[1:])
    both = programs(static, given, needs, True, "cuda", added)
    y, *saved = both.forward(x, index, gates, *layer.weights)
    h = None if spec.recompute_h else [saved.pop(0)]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    operands = (gates, *layer.weights)
    buffers = [
        empty(*t.shape, dtype=wide) if add and t is not None else None for add, t in zip(added, operands, strict=True)
    ]
    both.backward(y, x, h, *saved, *operands, layer.top_k, *buffers)
