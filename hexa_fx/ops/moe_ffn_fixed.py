"""``hexa::moe_ffn_fixed`` and ``hexa::moe_ffn_sources_fixed``: layers in which a token's result has the same bits in any batch.

They are `hexa::moe_ffn` and `hexa::moe_ffn_sources`, but take no way that depends on the number of tokens (the dense one, another
tile), with or without gradients. Gradients are those of the layers; they are sums over tokens, so that their bits depend on the
batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hexa_fx.ops import library
from hexa_fx.ops.fixed_order import fixed_order
from hexa_fx.ops.moe_ffn import inference, training
from hexa_fx.ops.moe_ffn_autograd import ByExpertOrder
from hexa_fx.ops.moe_ffn_sources import MoeFfnSourcesFunction
from hexa_fx.torch_private import _AutoDispatchBelowAutograd

_OPS = torch.ops.hexa


class _MoeFfnFixed(ByExpertOrder):
    """Another forward, and the backward of `hexa::moe_ffn`."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        with _AutoDispatchBelowAutograd():
            return ByExpertOrder.kept(ctx, args, *_OPS.moe_ffn_fixed_forward.default(*args))


class _MoeFfnSourcesFixed(MoeFfnSourcesFunction):
    """Another forward, and the backward of `hexa::moe_ffn_sources`."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        with _AutoDispatchBelowAutograd():
            return MoeFfnSourcesFunction.kept(ctx, args, *_OPS.moe_ffn_sources_fixed_forward.default(*args))


def _fixed(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def fixed(o: Any) -> Any:
        with fixed_order():
            return run(o)

    return fixed


library.kernel("moe_ffn_fixed", "any")(_fixed(inference))
library.kernel("moe_ffn_fixed_forward", "any")(_fixed(training))
library.register_autograd_function("moe_ffn_fixed", _MoeFfnFixed.apply)

library.kernel("moe_ffn_sources_fixed", "any")(_fixed(lambda o: _OPS.moe_ffn_sources.default(*o)))
library.kernel("moe_ffn_sources_fixed_forward", "any")(_fixed(lambda o: _OPS.moe_ffn_sources_forward.default(*o)))
library.register_autograd_function("moe_ffn_sources_fixed", _MoeFfnSourcesFixed.apply)
