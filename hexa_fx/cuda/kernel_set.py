"""Every kernel that a layer may ever launch, whatever the number of tokens: what to build before anybody waits for it.

A kernel depends on a number of tokens only through buckets and a few limits of rows per expert. So the layer's own programs run
on tensors without data at one number of tokens in each interval between them, and what they would launch is collected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hexa_fx.codegen.family_block_sm90 import FAMILY
from hexa_fx.codegen.family_decode import MOST_SLOTS, SLOTS, SUMMED_SLOTS
from hexa_fx.codegen.family_rows_fp8 import ACTIVATE, COMBINE, QUANTIZE
from hexa_fx.codegen.spec import KernelSpec
from hexa_fx.codegen.tiles_sm90 import CLUSTER_ROWS, ROW_LIMITS
from hexa_fx.cuda.calls import chosen, planned
from hexa_fx.cuda.choosing import Card, collect
from hexa_fx.cuda.decode import MOST_TOKENS as MOST_DECODED
from hexa_fx.cuda.layer import PROGRAMS
from hexa_fx.cuda.packed import MOST_BUCKET
from hexa_fx.cuda.rows import ONE_BLOCK_SLOTS
from hexa_fx.formats.quantized_weight import QuantizedWeight
from hexa_fx.ir import FfnSpec
from hexa_fx.ops import library
from hexa_fx.ops import moe_ffn_fp8 as fp8
from hexa_fx.ops.dispatch_mode import DispatchMode
from hexa_fx.ops.forms import DENSE
from hexa_fx.ops.moe_ffn_autograd import LAYERS
from hexa_fx.ops.moe_ffn_fp8_backward import backward
from hexa_fx.ops.rows import accumulate_dtype, columns_of, flip
from hexa_fx.ops.table_layers import (
    OPERANDS,
    SOURCES_OPERANDS,
    MoeFfn,
    MoeFfnBackward,
    MoeFfnFp8Backward,
    MoeFfnFp8Forward,
    MoeFfnSources,
    MoeFfnSourcesBackward,
    static_of,
)

MOST_TOKENS = 65536
"""Tokens of one call up to which every kernel is in a layer's set."""


_RECORDS: dict[type[Any], tuple[str, type[Any]]] = {
    MoeFfn: ("moe_ffn", MoeFfnBackward),
    MoeFfnSources: ("moe_ffn_sources", MoeFfnSourcesBackward),
}


@dataclass(frozen=True)
class FfnLayer:
    """A layer of experts as kernels see it.

    Args:
        call: of `hexa::moe_ffn` or `hexa::moe_ffn_sources`, with any number of tokens. Only shapes, strides and types count.
        grads: operands that training wants gradients of.
        added: of these, the ones whose gradients are added to buffers (``main_grad``).
    """

    call: MoeFfn | MoeFfnSources
    grads: frozenset[str] = frozenset(OPERANDS)
    added: frozenset[str] = frozenset()

    @property
    def needs(self) -> list[bool]:
        """Of each differentiable operand, whether its gradient is wanted."""
        return [name in self.grads and getattr(self.call, name) is not None for name in self.call.differentiable]

    @property
    def buffers(self) -> list[Tensor | None]:
        """Of each differentiable operand but the first, what its gradient is added to, or None."""
        given = ((name, getattr(self.call, name)) for name in self.call.differentiable[1:])
        return [
            without_data(t.shape, accumulate_dtype(self.call.x.dtype)) if t is not None and name in self.added else None
            for name, t in given
        ]


def frozen(call: MoeFfnSources) -> FfnLayer:
    """A layer of which training wants the gradients of factors, biases and tokens."""
    return FfnLayer(call, frozenset(SOURCES_OPERANDS) - {"w1", "w3", "w2"})


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
    columns, split = 2 * inner if spec.glu in ("concat", "interleaved") else inner, spec.glu == "split"

    def weight(layout: str, inputs: int, outputs: int) -> Tensor:
        return without_data((experts, *((outputs, inputs) if layout == "nk" else (inputs, outputs))), dtype)

    def bias(width: int) -> Tensor | None:
        return without_data((experts, width), dtype) if biases else None

    call = MoeFfn(
        without_data((1, hidden), dtype),
        without_data((1, top_k), index),
        None if gates is None else without_data((1, top_k), gates),
        weight(spec.layout1, hidden, columns),
        bias(columns),
        weight(spec.layout1, hidden, inner) if split else None,
        bias(inner) if split else None,
        weight(spec.layout2, inner, hidden),
        bias(hidden),
        *static_of(spec),
    )
    return FfnLayer(call)


def sources_layer_of(
    spec: FfnSpec, operands: Mapping[str, Tensor], packed: Sequence[QuantizedWeight], ranks: Mapping[str, int]
) -> MoeFfnSources:
    """A call of `hexa::moe_ffn_sources` on tensors without data.

    Args:
        spec: the expert.
        operands: of `hexa::moe_ffn`, with dense weights, by name; absent ones are left out.
        packed: the weights that are packed, which are told by their shapes.
        ranks: of what is added to w1, w3 or w2, as PEFT stores and trains it.
    """
    made: dict[str, Any] = {name: without_data(t.shape, t.dtype) for name, t in operands.items()}
    layouts = {"w1": spec.layout1, "w3": spec.layout1, "w2": spec.layout2}
    scales: dict[str, list[Tensor]] = {}
    formats = dict.fromkeys(layouts, DENSE)
    for name in layouts:
        found = next((p for p in packed if name in made and p.shape == made[name].shape), None)
        if name in made and name in ranks:
            number, rank = name[1], ranks[name]
            inputs, outputs = columns_of(made[name], flip(layouts[name])), columns_of(made[name], layouts[name])
            experts = made[name].shape[0]
            made[f"a{number}"] = without_data((experts, rank, inputs), torch.float32)
            made[f"c{number}"] = without_data((outputs, rank, experts), torch.float32).permute(2, 0, 1)
        if found is not None:
            made[name], formats[name] = without_data(found.packed.shape, found.packed.dtype), found.format
            scales[name] = [without_data(scale.shape, scale.dtype) for scale in found.scales]
            layouts[name] = flip(layouts[name]) if found.transposed else layouts[name]
    made |= {f"s{name[1]}": scales.get(name, []) for name in layouts}
    made |= {"alphas": [2.0 if name in ranks else 1.0 for name in layouts], "formats": list(formats.values())}
    made |= {**vars(spec), "layout1": layouts["w1"], "layout2": layouts["w2"]}
    return MoeFfnSources._make(map(made.get, MoeFfnSources._fields))


def kernel_set(layer: FfnLayer, card: Card, training: bool = True, most: int = MOST_TOKENS) -> tuple[KernelSpec, ...]:
    """Every kernel that calls of a layer with 1 to `most` tokens launch, in the order in which growing calls need them.

    Needs no device, no compiler and no data, and takes some hundredths of a second.

    Args:
        layer: see `layer_of`.
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
    few = (experts << MOST_BUCKET,) if isinstance(call, MoeFfnSources) else ()
    limits = (
        *few,
        *buckets,
        *(experts * rows for rows in ROW_LIMITS),
        ONE_BLOCK_SLOTS,
        *SLOTS,
        *SUMMED_SLOTS,
        MOST_SLOTS,
        MOST_DECODED * top_k,
    )
    return sorted({tokens for limit in (0, *limits) if (tokens := limit // top_k + 1) <= most})


def launched(layer: FfnLayer, card: Card, tokens: int, training: bool = True) -> list[KernelSpec]:
    """The kernels that a layer launches at a number of tokens, in order."""
    o = with_tokens(layer.call, tokens)
    name, gradients = _RECORDS[type(o)]

    def plan(end: str, *args: Any) -> list[KernelSpec]:
        return [kernel.spec for kernel in planned(PROGRAMS[name + end], args, card, chosen()).kernels]

    found = plan("", *o)
    if not training:
        return found
    _, *kept = library.record_of(f"{name}_forward")._make(o).results()
    saved = dict(zip(LAYERS[name].kept, kept)) | ({"h": None} if o.recompute_h else {})
    given = o.to(gradients, dy=o.x, top_k=o.top_k, needs=layer.needs, **saved)
    return found + plan("_forward", *o) + plan("_backward", *given, *layer.buffers)


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
    with collected_on(card) as specs:
        for tokens in (1, CLUSTER_ROWS * experts // top_k + 1):
            o = with_tokens(layer.call, tokens).to(MoeFfnFp8Forward, cached=False)
            fp8.run(o, transposed=False, keep_h=False)
            if training:
                y, *kept = fp8.run(o, transposed=True, keep_h=not o.recompute_h)
                given = dict(
                    zip(("xq", "xs", "h", "hs", "v", "inv", "offs"), kept), dy=y, top_k=top_k, needs=layer.needs
                )
                if o.recompute_h:
                    given |= {"h": None}
                backward(*o.to(MoeFfnFp8Backward, **given), *layer.buffers)
    return tuple(spec for spec in dict.fromkeys(specs) if spec.family in (FAMILY, QUANTIZE, ACTIVATE, COMBINE))


def with_tokens(call: MoeFfn | MoeFfnSources, tokens: int) -> Any:
    """A call with so many tokens, which have no data."""

    def of(t: Any) -> Any:
        return None if t is None else without_data((tokens, *t.shape[1:]), t.dtype)

    rows = {name: of(getattr(call, name)) for name in ("x", "top_k_index", "top_k_weights")}
    return call._replace(**rows)


@contextmanager
def collected_on(card: Card) -> Iterator[list[KernelSpec]]:
    """A context in which operators of hexa run their CUDA code on tensors without data; yields the kernels that they choose."""
    with collect(card) as specs, torch.no_grad(), _OnCard():
        yield specs


def without_data(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of which only shape, strides and type count."""
    return torch.empty(shape, dtype=dtype, device="meta")


class _OnCard(DispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func.name().partition("::")
        run = library.kernel_for(name, "cuda") if space == library.NAMESPACE else func
        if run is func:
            return func(*args, **(kwargs or {}))
        with self:  # some are made of others
            return run(*args)
