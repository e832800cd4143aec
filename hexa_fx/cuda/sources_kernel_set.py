"""Every kernel that `hexa::moe_ffn_sources` may ever launch for a layer, as `hexa_fx.cuda.kernel_set` has them of `hexa::moe_ffn`.

The layer's programs run on tensors without data, whose operators choose kernels and launch none, at one number of tokens in each
interval in which they choose the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hexa_fx.codegen.spec import KernelSpec
from hexa_fx.cuda.choosing import Card
from hexa_fx.cuda.kernel_set import MOST_TOKENS, collected_on, token_counts, with_tokens, without_data
from hexa_fx.cuda.packed import MOST_BUCKET
from hexa_fx.cuda.packed_layer import moe_ffn_sources
from hexa_fx.ir import FfnSpec
from hexa_fx.ops.moe_ffn_sources import backward, training
from hexa_fx.ops.projection import DENSE
from hexa_fx.ops.quantized_weight import QuantizedWeight
from hexa_fx.ops.rows import columns_of, flip
from hexa_fx.ops.table_layers import SOURCES_OPERANDS, MoeFfnSources, MoeFfnSourcesBackward, MoeFfnSourcesForward


def layer_of(
    spec: FfnSpec, operands: Mapping[str, Tensor], packed: Sequence[QuantizedWeight], ranks: Mapping[str, int]
) -> MoeFfnSources:
    """A call of the operator on tensors without data.

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


def sources_kernel_set(
    layer: MoeFfnSources, card: Card, train: bool = True, most: int = MOST_TOKENS
) -> tuple[KernelSpec, ...]:
    """Every kernel that calls of a layer with 1 to `most` tokens launch. Needs no device, no compiler and no data.

    Args:
        layer: see `layer_of`.
        card: what kernels are chosen for.
        train: also those of forward and backward of training, with frozen weights.
        most: tokens.

    Raises:
        KernelError: there is no kernel for these operands.
    """
    few = (layer.w1.shape[0] << MOST_BUCKET) // layer.top_k_index.shape[1] + 1
    found: dict[KernelSpec, None] = {}
    for tokens in sorted({*token_counts(layer, most), min(few, most)}):
        found.update(dict.fromkeys(launched(layer, card, tokens, train)))
    return tuple(found)


def launched(layer: MoeFfnSources, card: Card, tokens: int, train: bool = True) -> list[KernelSpec]:
    """The kernels that a layer launches at a number of tokens, in order."""
    o = with_tokens(layer, tokens)
    with collected_on(card) as specs:
        moe_ffn_sources(o)
        if train:
            y, *kept = training(o.to(MoeFfnSourcesForward))
            frozen = ("w1", "w3", "w2")
            given = dict(zip(("h", "u1", "u3", "u2", "v", "inv", "offs"), kept), dy=y, top_k=o.top_k)
            if o.recompute_h:
                given |= {"h": None}
            needs = [name not in frozen and getattr(o, name) is not None for name in SOURCES_OPERANDS]
            backward(o.to(MoeFfnSourcesBackward, **given, needs=needs))
    return specs
