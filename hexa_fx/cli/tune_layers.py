"""Measures the tiles of a known model's layer on the GPU at hand, for `hexa-fx tune`."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

import torch

from hexa_fx import ops
from hexa_fx.cli.model_layers import MODELS, layer_of
from hexa_fx.errors import InputError
from hexa_fx.ir import FfnSpec


@dataclass(frozen=True)
class Sizes:
    """One layer, and the tokens that it takes.

    Args:
        tokens, experts, top_k, hidden, inner: T, E, k, D, I.
        spec: the form of its experts, with gate and up in one tensor.
    """

    tokens: int
    experts: int
    top_k: int
    hidden: int
    inner: int
    spec: FfnSpec

    def bytes(self, dtype: torch.dtype) -> int:
        """What a training step of it holds, roughly: weights, their gradients, and some six tensors of routed rows."""
        weights = 3 * self.experts * self.hidden * self.inner
        rows = self.tokens * self.top_k * (2 * self.hidden + 4 * self.inner)
        return int((2 * weights + rows) * dtype.itemsize)

    def fitting(self, free: int, dtype: torch.dtype) -> Sizes:
        """The layer with as many experts as fit, and as many rows an expert, of which tiles are a function.

        Raises:
            InputError: not even `top_k` experts fit.
        """
        sizes = self
        while sizes.bytes(dtype) > free:
            experts = sizes.experts // 2
            if experts < self.top_k:
                raise InputError(
                    f"{self.tokens} tokens: {free / 2**30:.1f} GiB of the device's memory are too few; give fewer --tokens"
                )
            sizes = replace(sizes, experts=experts, tokens=max(self.tokens * experts // self.experts, 1))
        return sizes


def sizes_of(model: str, tokens: int) -> Sizes:
    """The layer of a model of `MODELS`, whatever the case of its name.

    Raises:
        InputError: there is no such model.
    """
    by_lower = {name.lower(): name for name in MODELS}
    if model.lower() not in by_lower:
        near = difflib.get_close_matches(model.lower(), by_lower, n=2, cutoff=0.3)
        hint = f"; did you mean {' or '.join(by_lower[each] for each in near)}?" if near else ""
        raise InputError(f"the sizes of {model!r} are not known{hint or '.'} There are {', '.join(MODELS)}")
    experts, top_k, hidden, inner, forms = MODELS[by_lower[model.lower()]]
    return Sizes(tokens, experts, top_k, hidden, inner, forms[0])


def run_layer(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> None:
    """One forward and backward of the layer, on random weights and a random routing."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=device).requires_grad_()

    s = sizes
    call = layer_of(s.spec, experts=s.experts, top_k=s.top_k, hidden=s.hidden, inner=s.inner, dtype=dtype).call
    x, w1, w2 = random(s.tokens, s.hidden), random(*call.w1.shape), random(*call.w2.shape)
    ids = torch.rand(s.tokens, s.experts, device=device).topk(s.top_k).indices
    gates = torch.rand(s.tokens, s.top_k, device=device).requires_grad_()
    y = ops.moe_ffn(x, ids, gates, w1, None, None, None, w2, None, s.spec)
    y.backward(torch.randn_like(y))
