"""Every kernel that a layer may ever launch, whatever the number of tokens: what to build before anybody waits for it.

A kernel depends on a number of tokens only through buckets and a few limits of rows per expert. So the layer's own programs run
on tensors without data at one number of tokens in each interval between them, and what they would launch is collected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hexa_fx.codegen.family_decode import SLOTS, SUMMED_SLOTS
from hexa_fx.codegen.spec import KernelSpec
from hexa_fx.codegen.tiles_sm90 import ROW_LIMITS
from hexa_fx.cuda.calls import chosen, planned
from hexa_fx.cuda.choosing import Card
from hexa_fx.cuda.decode import MOST_TOKENS as MOST_DECODED
from hexa_fx.cuda.layer import PROGRAMS
from hexa_fx.cuda.register import KERNELS, kernel
from hexa_fx.cuda.rows import ONE_BLOCK_SLOTS
from hexa_fx.ir import FfnSpec
from hexa_fx.ops.operands import MoeFfn
from hexa_fx.ops.program import OPERANDS
from hexa_fx.ops.rows import accumulate_dtype, columns_of

MOST_TOKENS = 65536
"""Tokens of one call up to which every kernel is in a layer's set."""


@dataclass(frozen=True)
class FfnLayer:
    """A layer of experts as kernels see it: `hexa::moe_ffn` without its tokens.

    Args:
        spec: the expert.
        top_k: experts per token.
        w1, b1, w3, b3, w2, b2: the operator's weights, of which only shapes, strides and types count.
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

    def call(self, tokens: int) -> Call:
        """A call of it on tensors without data."""
        spec, dtype = self.spec, self.w1.dtype
        x = _empty(tokens, columns_of(self.w2, spec.layout2), dtype=dtype)
        gates = None if self.gates is None else _empty(tokens, self.top_k, dtype=self.gates)
        static = (spec.activation, spec.glu, spec.params, spec.layout1, spec.layout2, spec.recompute_h)
        operands = dict(zip(OPERANDS, (x, gates, *self.weights), strict=True))
        buffers = [
            _empty(*t.shape, dtype=accumulate_dtype(dtype)) if t is not None and name in self.added else None
            for name, t in operands.items()
        ]
        needs = [name in self.grads and t is not None for name, t in operands.items()]
        return Call(
            (x, _empty(tokens, self.top_k, dtype=self.index), gates, *self.weights, *static), needs, buffers[1:]
        )


class Call(NamedTuple):
    """A call of a layer.

    Args:
        args: of `hexa::moe_ffn`.
        needs: of each of `OPERANDS`, whether its gradient is wanted.
        buffers: of each but the first, what it is added to, or None.
    """

    args: tuple[Any, ...]
    needs: list[bool]
    buffers: list[Tensor | None]


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
        return _empty(experts, *shape, dtype=dtype)

    def bias(width: int) -> Tensor | None:
        return _empty(experts, width, dtype=dtype) if biases else None

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
        found.update(dict.fromkeys(launched(layer, card, tokens, training)))
    return tuple(found)


def token_counts(experts: int, top_k: int, most: int) -> list[int]:
    """The fewest tokens of each interval in which all calls take the same kernels."""
    buckets = [experts << power for power in range((most * top_k // experts).bit_length() + 1)]
    limits = (
        *buckets,
        *(experts * rows for rows in ROW_LIMITS),
        ONE_BLOCK_SLOTS,
        *SLOTS,
        *SUMMED_SLOTS,
        MOST_DECODED * top_k,
    )
    return sorted({tokens for limit in (0, *limits) if (tokens := limit // top_k + 1) <= most})


def launched(layer: FfnLayer, card: Card, tokens: int, training: bool = True) -> list[KernelSpec]:
    """The kernels that a layer launches at a number of tokens, in order."""

    def plan(name: str, *args: Any) -> list[KernelSpec]:
        return [kernel.spec for kernel in planned(PROGRAMS[name], args, card, chosen()).kernels]

    args, needs, buffers = layer.call(tokens)
    found = plan("moe_ffn", *args)
    if not training:
        return found
    o = MoeFfn(*args)
    h = None if o.recompute_h else _empty(o.rows, o.width, dtype=o.x.dtype)
    v, inv, offs = (_empty(size, dtype=torch.int32) for size in (o.rows, o.rows, layer.experts + 1))
    found += plan("moe_ffn_forward", *args)
    operands, static = args[2:9], args[9:]
    found += plan("moe_ffn_backward", o.x, o.x, h, v, inv, offs, *operands, layer.top_k, *static, needs, *buffers)
    return found


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class OnCard(TorchDispatchMode):
    """Operators of hexa run their CUDA code on tensors without data."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func.name().partition("::")
        if space != "hexa" or name not in KERNELS:
            return func(*args, **(kwargs or {}))
        with self:  # some are made of others
            return kernel(name)(*args)
