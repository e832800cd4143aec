"""The kernels that a layer launches in FP8 block compute besides those of its exact form; as `hexa_fx.cuda.kernel_set`.

Of them only products that gather depend on a number of tokens (`hexa_fx.cuda.fp8.cluster_of`). Reindexing and sums over rows are
those of the exact form.
"""

from __future__ import annotations

import torch

from hexa_fx.codegen.family_block_sm90 import FAMILY
from hexa_fx.codegen.family_rows_fp8 import ACTIVATE, COMBINE, QUANTIZE
from hexa_fx.codegen.spec import KernelSpec
from hexa_fx.codegen.tiles_sm90 import CLUSTER_ROWS
from hexa_fx.cuda.choosing import Card, collect
from hexa_fx.cuda.kernel_set import FfnLayer, OnCard
from hexa_fx.ops.fp8_arguments import Arguments
from hexa_fx.ops.moe_ffn_fp8 import run
from hexa_fx.ops.moe_ffn_fp8_backward import backward


def fp8_kernel_set(layer: FfnLayer, card: Card, training: bool = True) -> tuple[KernelSpec, ...]:
    """Every such kernel; none on a card that FP8 products do not run on. Needs no device, no compiler and no data.

    Args:
        layer: see `hexa_fx.cuda.kernel_set.layer_of`.
        card: what kernels are chosen for.
        training: also those of forward and backward of training.
    """
    if not card.is_hopper:
        return ()
    with collect(card) as specs, torch.no_grad(), OnCard():
        for tokens in (1, CLUSTER_ROWS * layer.w1.shape[0] // layer.top_k + 1):
            args, needs, buffers = layer.call(tokens)
            o = Arguments._make((*args, False, None, None))
            run(o, transposed=False, keep_h=False)
            if training:
                y, h, *kept = run(o, transposed=True, keep_h=not o.recompute_h)
                backward(y, o.x, None if o.recompute_h else h, *kept, *args[2:], False, layer.top_k, needs, *buffers)
    return tuple(spec for spec in dict.fromkeys(specs) if spec.family in (FAMILY, QUANTIZE, ACTIVATE, COMBINE))
