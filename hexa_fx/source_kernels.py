"""Has the kernels of packed weights and of adapters built in the background, from the moment that an installed block reads such.

Those of dense weights are requested while a block is analysed (`hexa_fx.passes.kernel_requests`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hexa_fx.formats.quantized_weight import QuantizedWeight
from hexa_fx.inspection.block_report import BlockReport
from hexa_fx.inspection.stages import FfnCase
from hexa_fx.ir import FfnSpec
from hexa_fx.isolation.module_tree import device_of
from hexa_fx.ops.records import DENSE
from hexa_fx.ops.rows import columns_of, flip
from hexa_fx.ops.table_layers import MoeFfnSources
from hexa_fx.packed import packed_weights
from hexa_fx.runtime.forward import HexaForward

Ranks = Mapping[tuple[int, str], int]


USUAL_RANK = 16
"""Adapters of this rank or a smaller one launch the same kernels."""


def request_kernels_of_sources(blocks: Iterable[BlockReport], ranks: Ranks) -> None:
    """Requests what blocks on a CUDA device launch for weights that are no plain tensors, at any number of tokens. Whoever trains
    packed weights puts adapters on them: what those of a usual rank launch is requested after all else.

    Args:
        blocks: of a report of an installed model.
        ranks: of adapters, by the block's ``id`` and the parameter's name.
    """
    seen: set[tuple[object, ...]] = set()
    found = [
        (b.case, b.forward, _added(b.forward, ranks)) for b in blocks if b.forward is not None and b.case is not None
    ]
    for case, forward, added in found:
        _request(case, forward, added, seen)
    for case, forward, added in found:
        if packed_weights(forward.module) and not added:
            _request(case, forward, {name: USUAL_RANK for name in ("w1", "w3", "w2") if name in case.operands}, seen)


def _request(case: FfnCase, forward: HexaForward, added: Mapping[str, int], seen: set[tuple[object, ...]]) -> None:
    device, packed = device_of(forward.module), packed_weights(forward.module)
    if device is None or not (packed or added):
        return
    from hexa_fx.cuda.choosing import card_of  # imports CUTLASS's Python
    from hexa_fx.cuda.kernel_set import frozen, kind_of_layer, request_now

    layer = layer_of(case.spec, case.operands, packed, added)
    kind = device.index, *kind_of_layer(layer)
    if kind not in seen:  # blocks of a kind launch the same
        seen.add(kind)
        request_now(frozen(layer), card_of(device.index or 0))


def _added(forward: HexaForward, ranks: Ranks) -> dict[str, int]:
    """Ranks by operand."""
    paths = list(next((each.matrices for each in forward.specialisations if each.matrices), {}))
    operands = ("w1", "w3", "w2") if len(paths) == 3 else ("w1", "w2")
    found = {name: ranks.get((id(forward.module), path)) for name, path in zip(operands, paths)}
    return {name: rank for name, rank in found.items() if rank}


def layer_of(
    spec: FfnSpec, operands: Mapping[str, Tensor], packed: Sequence[QuantizedWeight], ranks: Mapping[str, int]
) -> MoeFfnSources:
    """A call of `hexa::moe_ffn_sources` on tensors without data.

    Args:
        spec: the expert.
        operands: of `hexa::moe_ffn`, with dense weights, by name; absent ones are left out.
        packed: the weights that are packed, which are told by their shapes.
        ranks: of what is added to w1, w3 or w2, as PEFT stores and trains it.
    """
    from hexa_fx.cuda.kernel_set import without_data  # imports CUTLASS's Python

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
