"""A small expert layer, its plain definition, and how far two results are apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hexa_fx import ops
from hexa_fx.ir import FfnSpec
from hexa_fx.ops.activations import activation_forward
from hexa_fx.ops.table_layers import MoeFfn, static_of

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


def operands(
    spec: FfnSpec,
    random: Callable[[tuple[int, ...], int], Tensor],
    index: Tensor,
    *,
    experts: int,
    model_size: int,
    inner: int,
    bias: bool = False,
    weighted: bool = True,
) -> MoeFfn:
    """Of moe_ffn. ``random`` gives a tensor of a shape, of whose products so many are added up (1: it is no weight)."""
    columns, split = inner * (2 if spec.glu in ("concat", "interleaved") else 1), spec.glu == "split"

    def weight(outputs: int, inputs: int, layout: str) -> Tensor:
        return random((experts, outputs, inputs) if layout == "nk" else (experts, inputs, outputs), inputs)

    def vector(width: int, there: bool = True) -> Tensor | None:
        return random((experts, width), 1) if bias and there else None

    tokens = random((len(index), model_size), 1), index, random(tuple(index.shape), 1) if weighted else None
    first = weight(columns, model_size, spec.layout1), vector(columns)
    up = weight(inner, model_size, spec.layout1) if split else None, vector(inner, split)
    return MoeFfn(*tokens, *first, *up, weight(model_size, inner, spec.layout2), vector(model_size), *static_of(spec))


def in_float64(o: MoeFfn) -> MoeFfn:
    """Leaves of their own."""
    return MoeFfn._make(t.detach().double() if isinstance(t, Tensor) and t.is_floating_point() else t for t in o)


def loop(o: MoeFfn) -> Tensor:
    """The definition: expert by expert, the tokens that chose it."""
    w1, w3 = (t if t is None or o.layout1 == "nk" else t.transpose(1, 2) for t in (o.w1, o.w3))
    w2 = o.w2 if o.layout2 == "nk" else o.w2.transpose(1, 2)
    dtype = torch.promote_types(o.x.dtype, torch.float32)
    y = torch.zeros(o.x.shape[0], w2.shape[1], dtype=dtype, device=o.x.device)
    for e in range(w1.shape[0]):
        token, slot = torch.where(o.top_k_index == e)
        h = o.x[token] @ w1[e].T + (0 if o.b1 is None else o.b1[e])
        if w3 is not None:
            h = torch.cat([h, o.x[token] @ w3[e].T + (0 if o.b3 is None else o.b3[e])], dim=1)
        rows = activation_forward(h, o.activation, o.glu, o.params) @ w2[e].T
        rows = (rows + (0 if o.b2 is None else o.b2[e])).to(y.dtype)
        if o.top_k_weights is not None:
            rows = rows * o.top_k_weights[token, slot, None].to(y.dtype)
        y = y.index_add(0, token, rows)
    return y.to(o.x.dtype)


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
        """See `loop`."""
        x, *others = self.operands
        return loop(MoeFfn(x, self.index, *others, *static_of(self.spec)))

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

    def random(shape: tuple[int, ...], _: int) -> Tensor:
        t = torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5
        return t.to(dtype).requires_grad_()

    if index is None:
        index = torch.randint(0, experts + 1, (tokens, top_k), generator=generator)
    made = operands(
        spec,
        random,
        index.new_zeros(tokens, index.shape[1]),
        experts=experts,
        model_size=model_size,
        inner=inner,
        bias=bias,
        weighted=weighted,
    )
    return Layer(index, tuple(getattr(made, name) for name in NAMES), spec)


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
