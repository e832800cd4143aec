"""``hexa::moe_ffn_fixed``: `hexa::moe_ffn` in which a token's result has the same bits in any batch.

It takes no way that depends on the number of tokens (the dense one, another tile), with or without gradients. Gradients are those
of `hexa::moe_ffn`; they are sums over tokens, so that their bits depend on the batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _any_requires_grad, _AutoDispatchBelowAutograd

from hexa_fx.ops import library
from hexa_fx.ops.fixed_order import fixed_order
from hexa_fx.ops.moe_ffn import STATIC, WEIGHTS, check, fake, fake_forward, inference, training
from hexa_fx.ops.moe_ffn_autograd import ByExpertOrder

_OPS = torch.ops.hexa

library.define(f"moe_ffn_fixed(Tensor x, Tensor top_k_index, Tensor? top_k_weights, {WEIGHTS}, {STATIC}) -> Tensor")
library.define(
    f"moe_ffn_fixed_forward(Tensor x, Tensor top_k_index, Tensor? top_k_weights, {WEIGHTS}, {STATIC}) "
    "-> (Tensor y, Tensor h, Tensor v, Tensor inv, Tensor offs)"
)


def fixed(*args: Any) -> Tensor:
    """Kernel for any device."""
    with fixed_order():
        return inference(*args)


def _fixed_forward(*args: Any) -> tuple[Tensor, ...]:
    with fixed_order():
        return training(*args)


class _MoeFfnFixed(ByExpertOrder):
    """Another forward, and the backward of `hexa::moe_ffn`."""

    @staticmethod
    def forward(ctx: Any, plain: bool, *args: Any) -> Tensor:
        with _AutoDispatchBelowAutograd():
            return ByExpertOrder.kept(ctx, args, *_OPS.moe_ffn_fixed_forward.default(*args))


def _autograd(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
    if is_grad_enabled() and _any_requires_grad(*args):
        return _MoeFfnFixed.apply(library.is_plain(keyset), *args)
    with _AutoDispatchBelowAutograd():
        return _OPS.moe_ffn_fixed.default.redispatch(keyset & torch._C._after_autograd_keyset, *args)


library.register_fake("moe_ffn_fixed", fake, check)
library.register_kernel("moe_ffn_fixed", "any", fixed)
library.register_autocast("moe_ffn_fixed", cast=(0, 3, 4, 5, 6, 7, 8))
library.register_fake("moe_ffn_fixed_forward", fake_forward, check)
library.register_kernel("moe_ffn_fixed_forward", "any", _fixed_forward)
library.register_autograd_kernel("moe_ffn_fixed", _autograd)
