"""The kernels that a layer launches in FP8 block compute besides those of its exact form; as `hexa_fx.cuda.kernel_set`.

None of them depends on a number of tokens. Reindexing, combining and sums over rows are those of the exact form.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hexa_fx.codegen.family_block_sm90 import FAMILY
from hexa_fx.codegen.family_rows_fp8 import ACTIVATE, QUANTIZE
from hexa_fx.codegen.spec import KernelSpec
from hexa_fx.cuda.choosing import Card, collect
from hexa_fx.cuda.kernel_set import FfnLayer, OnCard
from hexa_fx.ops.fp8_arguments import Arguments
from hexa_fx.ops.moe_ffn_fp8 import run
from hexa_fx.ops.moe_ffn_fp8_backward import backward
from hexa_fx.ops.program import OPERANDS
from hexa_fx.ops.rows import columns_of

_TOKENS = 4096


def fp8_kernel_set(layer: FfnLayer, card: Card, training: bool = True) -> tuple[KernelSpec, ...]:
    """Every such kernel; none on a card that FP8 products do not run on. Needs no device, no compiler and no data.

    Args:
        layer: see `hexa_fx.cuda.kernel_set.layer_of`.
        card: what kernels are chosen for.
        training: also those of forward and backward of training.
    """
    if not card.is_hopper:
        return ()
    spec, dtype, slots = layer.spec, layer.w1.dtype, (_TOKENS, layer.top_k)
    x = _empty(_TOKENS, columns_of(layer.w2, spec.layout2), dtype=dtype)
    gates = None if layer.gates is None else _empty(*slots, dtype=layer.gates)
    static: Any = spec.activation, spec.glu, spec.params, spec.layout1, spec.layout2, spec.recompute_h, False
    operands: Any = (gates, *layer.weights)
    o = Arguments(x, _empty(*slots, dtype=layer.index), *operands, *static)
    with collect(card) as specs, torch.no_grad(), OnCard():
        run(o, transposed=False, keep_h=False)
        if training:
            y, h, *kept = run(o, transposed=True, keep_h=not spec.recompute_h)
            given = dict(zip(OPERANDS, (x, *operands), strict=True))
            needs = [name in layer.grads and t is not None for name, t in given.items()]
            buffers = [
                _empty(*t.shape, dtype=torch.float32) if t is not None and name in layer.added else None
                for name, t in list(given.items())[1:]
            ]
            backward(y, x, None if spec.recompute_h else h, *kept, *operands, *static, layer.top_k, needs, *buffers)
    return tuple(spec for spec in dict.fromkeys(specs) if spec.family in (FAMILY, QUANTIZE, ACTIVATE))


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
