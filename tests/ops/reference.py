"""A small expert layer, its plain definition, and how far two results are apart."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hexa_fx import ops
from hexa_fx.ir import FfnSpec
from hexa_fx.ops.activations import activation_forward

NAMES = ("x", "top_k_weights", "w1", "b1", "w3", "b3", "w2", "b2")
GATED = FfnSpec("silu", "concat")


class Operators(TorchDispatchMode):
    """Names of the hexa operators that run, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "hexa":
            self.seen.append(func._opname)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Layer:
    """Routing (T, k), the operands of moe_ffn in the order of `NAMES`, and the expert."""

    index: Tensor
    operands: tuple[Tensor | None, ...]
    spec: FfnSpec

    def with_spec(self, **changes: Any) -> Layer:
        return Layer(self.index, self.operands, replace(self.spec, **changes))

    def to(self, dtype: torch.dtype) -> Layer:
        operands = (
            None if t is None else t.detach().to(dtype, copy=True).requires_grad_(t.requires_grad)
            for t in self.operands
        )
        return Layer(self.index, tuple(operands), self.spec)

    def leaves(self) -> list[Tensor]:
        """Operands that want a gradient."""
        return [t for t in self.operands if t is not None and t.requires_grad]

    def run(self) -> Tensor:
        x, weights, w1, b1, w3, b3, w2, b2 = self.operands
        return ops.moe_ffn(x, self.index, weights, w1, b1, w3, b3, w2, b2, self.spec)

    def loop(self) -> Tensor:
        """The definition: expert by expert, the tokens that chose it."""
        x, weights, w1, b1, w3, b3, w2, b2 = self.operands
        w1, w3 = (t if t is None or self.spec.layout1 == "nk" else t.transpose(1, 2) for t in (w1, w3))
        w2 = w2 if self.spec.layout2 == "nk" else w2.transpose(1, 2)
        y = torch.zeros(x.shape[0], w2.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))
        for e in range(w1.shape[0]):
            token, slot = torch.where(self.index == e)
            h = x[token] @ w1[e].T + (0 if b1 is None else b1[e])
            if w3 is not None:
                h = torch.cat([h, x[token] @ w3[e].T + (0 if b3 is None else b3[e])], dim=1)
            glu = "concat" if self.spec.glu == "split" else self.spec.glu
            rows = activation_forward(h, self.spec.activation, glu, self.spec.params) @ w2[e].T
            rows = (rows + (0 if b2 is None else b2[e])).to(y.dtype)
            y = y.index_add(0, token, rows if weights is None else rows * weights[token, slot, None].to(y.dtype))
        return y.to(x.dtype)

    def grads(self, value: Tensor, unused: bool = True) -> list[Tensor]:
        """Of the leaves, for one fixed gradient of the value; zero where it does not depend on a leaf, unless it has to."""
        cotangent = torch.randn(value.shape, generator=torch.Generator().manual_seed(11), dtype=torch.float64)
        found = torch.autograd.grad(value, self.leaves(), cotangent.to(value.dtype), allow_unused=unused)
        return [torch.zeros_like(t) if g is None else g for t, g in zip(self.leaves(), found)]


def layer(
    spec: FfnSpec = GATED,
    *,
    tokens: int = 13,
    experts: int = 4,
    top_k: int = 2,
    model_size: int = 8,
    inner: int = 12,
    bias: bool = False,
    weighted: bool = True,
    index: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Layer:
    """Random numbers; every operand wants a gradient. Ids include sentinels and experts that a token names twice."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        t = torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5
        return t.to(dtype).requires_grad_()

    if index is None:
        index = torch.randint(0, experts + 1, (tokens, top_k), generator=generator)
    width = 2 * inner if spec.glu in ("concat", "interleaved") else inner
    first = (experts, width, model_size) if spec.layout1 == "nk" else (experts, model_size, width)
    second = (experts, model_size, inner) if spec.layout2 == "nk" else (experts, inner, model_size)
    split = spec.glu == "split"
    operands = (
        random(tokens, model_size),
        random(*index.shape) if weighted else None,
        random(*first),
        random(experts, width) if bias else None,
        random(*first) if split else None,
        random(experts, width) if bias and split else None,
        random(*second),
        random(experts, model_size) if bias else None,
    )
    return Layer(index, operands, spec)


def row_error(value: Tensor, expected: Tensor) -> float:
    """Largest difference of a row, relative to the largest number of the expected tensor."""
    scale = max(float(expected.detach().abs().max()), 1e-30) if expected.numel() else 1.0
    return float((value.detach().double() - expected.detach().double()).abs().max()) / scale if value.numel() else 0.0


def assert_is_loop(one: Layer, tolerance: float = 1e-12) -> None:
    """Value and all gradients are those of the loop, within a tolerance and ten times that."""
    exact = one.to(torch.float64)
    value, expected = one.run(), exact.loop()
    assert value.dtype == one.operands[0].dtype
    assert row_error(value, expected) <= tolerance
    if not one.leaves():
        assert not value.requires_grad
        return
    for leaf, g, e in zip(one.leaves(), one.grads(value, unused=False), exact.grads(expected), strict=True):
        assert g.dtype == leaf.dtype
        assert g.shape == leaf.shape
        assert row_error(g, e) <= 10 * tolerance


ROUTINGS = ["an expert without tokens", "all to one", "none", "one token", "twice", "out of range"]


def rerouted(routing: str, x: Tensor, index: Tensor, weights: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, ids and weights with one of `ROUTINGS` in place of the random one."""
    if routing in ("none", "one token"):
        count = 0 if routing == "none" else 1
        return x[:count], index[:count], weights[:count]
    other = {
        "an expert without tokens": index % (experts - 1),
        "all to one": torch.full_like(index, 2),
        "twice": index[:, :1].expand_as(index),
        "out of range": torch.where(index == 3, experts, index),
    }
    return x, other[routing], weights
