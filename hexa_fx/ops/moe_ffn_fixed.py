"""``hexa::moe_ffn_fixed`` and ``hexa::moe_ffn_sources_fixed``: layers in which a token's result has the same bits in any batch.

They are `hexa::moe_ffn` and `hexa::moe_ffn_sources`, but take no way that depends on the number of tokens (the dense one, another
tile), with or without gradients. Gradients are those of the layers; they are sums over tokens, so that their bits depend on the
batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hexa_fx.ops import library
from hexa_fx.ops.fixed_order import fixed_order
from hexa_fx.ops.library import Check, Kernel
from hexa_fx.ops.moe_ffn import INPUTS, KEPT, check, fake, fake_forward, inference, training
from hexa_fx.ops.moe_ffn_autograd import ByExpertOrder
from hexa_fx.ops.moe_ffn_sources import CAST, SOURCES_INPUTS, SOURCES_KEPT, MoeFfnSourcesFunction
from hexa_fx.ops.moe_ffn_sources import fake as fake_sources
from hexa_fx.ops.moe_ffn_sources import fake_forward as fake_sources_forward
from hexa_fx.ops.sources_arguments import check as check_sources
from hexa_fx.torch_private import _AutoDispatchBelowAutograd

_OPS = torch.ops.hexa


class _MoeFfnFixed(ByExpertOrder):
    """Another forward, and the backward of `hexa::moe_ffn`."""

    @staticmethod
    def forward(ctx: Any, plain: bool, *args: Any) -> Tensor:
        with _AutoDispatchBelowAutograd():
            return ByExpertOrder.kept(ctx, args, *_OPS.moe_ffn_fixed_forward.default(*args))


class _MoeFfnSourcesFixed(MoeFfnSourcesFunction):
    """Another forward, and the backward of `hexa::moe_ffn_sources`."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        with _AutoDispatchBelowAutograd():
            return MoeFfnSourcesFunction.kept(ctx, args, *_OPS.moe_ffn_sources_fixed_forward.default(*args))


def _define(schema: str, run: Kernel, fake: Kernel, check: Check) -> None:
    """An operator that is ``run`` in a fixed order, on any device."""

    def fixed(*args: Any) -> Any:
        with fixed_order():
            return run(*args)

    name = schema.partition("(")[0]
    library.define(schema)
    library.register_fake(name, fake, check)
    library.register_kernel(name, "any", fixed)


def _differentiable(name: str, function: Kernel, cast: Sequence[int]) -> None:
    library.register_autocast(name, cast=cast)
    library.register_autograd_function(name, function)


_define(f"moe_ffn_fixed({INPUTS}) -> Tensor", inference, fake, check)
_define(f"moe_ffn_fixed_forward({INPUTS}) -> {KEPT}", training, fake_forward, check)
_differentiable("moe_ffn_fixed", partial(_MoeFfnFixed.apply, False), (0, 3, 4, 5, 6, 7, 8))

_define(f"moe_ffn_sources_fixed({SOURCES_INPUTS}) -> Tensor", _OPS.moe_ffn_sources.default, fake_sources, check_sources)
_define(
    f"moe_ffn_sources_fixed_forward({SOURCES_INPUTS}) -> {SOURCES_KEPT}",
    _OPS.moe_ffn_sources_forward.default,
    fake_sources_forward,
    check_sources,
)
_differentiable("moe_ffn_sources_fixed", _MoeFfnSourcesFixed.apply, CAST)
