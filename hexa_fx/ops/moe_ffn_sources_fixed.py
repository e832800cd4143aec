"""``hexa::moe_ffn_sources_fixed``: to `hexa::moe_ffn_sources` what `hexa::moe_ffn_fixed` is to `hexa::moe_ffn`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _any_requires_grad, _AutoDispatchBelowAutograd

from hexa_fx.ops import library
from hexa_fx.ops.fixed_order import fixed_order
from hexa_fx.ops.moe_ffn_sources import CAST, INPUTS, MoeFfnSourcesFunction, fake, fake_forward
from hexa_fx.ops.sources_arguments import check

_OPS = torch.ops.hexa

library.define(f"moe_ffn_sources_fixed({INPUTS}) -> Tensor")
library.define(
    f"moe_ffn_sources_fixed_forward({INPUTS}) -> (Tensor y, Tensor h, Tensor u1, Tensor u3, Tensor u2, Tensor v, Tensor inv, "
    "Tensor offs)"
)


def fixed(*args: Any) -> Tensor:
    """Kernel for any device."""
    with fixed_order():
        return _OPS.moe_ffn_sources.default(*args)  # type: ignore[no-any-return]


def _fixed_forward(*args: Any) -> tuple[Tensor, ...]:
    with fixed_order():
        return _OPS.moe_ffn_sources_forward.default(*args)  # type: ignore[no-any-return]


class _MoeFfnSourcesFixed(MoeFfnSourcesFunction):
    """Another forward, and the backward of `hexa::moe_ffn_sources`."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        with _AutoDispatchBelowAutograd():
            return MoeFfnSourcesFunction.kept(ctx, args, *_OPS.moe_ffn_sources_fixed_forward.default(*args))


def _autograd(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
    if is_grad_enabled() and _any_requires_grad(*args):
        return _MoeFfnSourcesFixed.apply(*args)
    with _AutoDispatchBelowAutograd():
        return _OPS.moe_ffn_sources_fixed.default.redispatch(keyset & torch._C._after_autograd_keyset, *args)


library.register_fake("moe_ffn_sources_fixed", fake, check)
library.register_kernel("moe_ffn_sources_fixed", "any", fixed)
library.register_autocast("moe_ffn_sources_fixed", cast=CAST)
library.register_fake("moe_ffn_sources_fixed_forward", fake_forward, check)
library.register_kernel("moe_ffn_sources_fixed_forward", "any", _fixed_forward)
library.register_autograd_kernel("moe_ffn_sources_fixed", _autograd)
