"""What QLoRA on experts takes on one GPU, computed from shapes; prints the table of docs/fine_tuning.md.

Counted are: experts in a format; everything else of the model in bf16; rank-r adapters on experts and attention with gradient and
AdamW in float32; what a step with a checkpoint for each layer holds at once. Not counted: the allocator's gaps and CUDA's context.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from hexa_fx.formats import format_of

GIB = 2**30
CARDS = (24, 48, 80)
CONTEXT = 1.5 * GIB
"""Left of a card for the context and the allocator."""
WORKSPACE = 256 << 20
"""Of unpacked matrices (hexa_fx.cuda.packed.MOST_BYTES)."""


@dataclass(frozen=True)
class Shape:
    """A model of L layers with E experts in each, in the field's letters."""

    name: str
    layers: int
    experts: int
    top_k: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    expert_biases: bool = False

    @property
    def matrices(self) -> tuple[tuple[int, int, int], ...]:
        """Of one layer's experts, (E, N, K): gate and up, and down."""
        return (self.experts, 2 * self.inner, self.hidden), (self.experts, self.hidden, self.inner)

    @property
    def attention(self) -> tuple[tuple[int, int], ...]:
        """q, k, v and o of a layer."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return (query, self.hidden), (key, self.hidden), (key, self.hidden), (self.hidden, query)


MODELS = (
    Shape("Qwen3-30B-A3B", 48, 128, 8, 2048, 768, 32, 4, 128, 151936),
    Shape("gpt-oss-20b", 24, 32, 4, 2880, 2880, 64, 8, 64, 201088, True),
    Shape("gpt-oss-120b", 36, 128, 4, 2880, 2880, 64, 8, 64, 201088, True),
    Shape("Mixtral 8x7B", 32, 8, 2, 4096, 14336, 32, 8, 128, 32000),
)


@dataclass(frozen=True)
class Memory:
    """Bytes of a QLoRA step."""

    experts: int
    rest: int
    adapters: int
    step: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.experts + self.rest + self.adapters + self.step


def packed_bytes(shape: tuple[int, int, int], format: str) -> int:
    """What a weight (E, R, C) takes in a format; ``bf16`` for none."""
    if format == "bf16":
        return 2 * prod(shape)
    f = format_of(format)
    sizes = zip((f.packed_shape(shape), *f.scale_shapes(shape)), (f.dtype, *f.scale_dtypes()), strict=True)
    return sum(prod(size) * dtype.itemsize for size, dtype in sizes)


def memory(m: Shape, format: str, rank: int = 16, tokens: int = 4096) -> Memory:
    """Of one step on ``tokens`` tokens."""
    experts = m.layers * sum(packed_bytes(shape, format) for shape in m.matrices)
    biases = m.experts * (2 * m.inner + m.hidden) if m.expert_biases else 0
    attention = sum(map(prod, m.attention))
    layer = attention + biases + m.experts * m.hidden + 2 * m.hidden
    rest = 2 * (2 * m.vocab * m.hidden + m.layers * layer)
    factors = sum(e * rank * (n + k) for e, n, k in m.matrices) + sum(rank * (n + k) for n, k in m.attention)
    adapters = 16 * m.layers * factors
    rows = tokens * m.top_k
    kept = 2 * tokens * m.hidden * m.layers  # the layers' inputs
    # h and its gradient, the activation twice, rows of the result and of dx
    of_layer = 2 * rows * (2 * 2 * m.inner + 2 * m.inner + 2 * m.hidden) + WORKSPACE
    logits = tokens * m.vocab * (2 + 4 + 4)  # as they are, in float32, and their gradient
    return Memory(experts, rest, adapters, kept + max(of_layer, logits))


SETTINGS = ((16, 4096), (4, 1024))
"""Ranks, and tokens of a step."""


def table() -> str:
    """The table of the documentation."""
    lines = [
        "| model, format | rank | tokens | experts in bf16 | packed | all else | adapters | step | total, GiB | fits on |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(m, "mxfp4" if m.expert_biases else "nf4", *setting) for m in MODELS for setting in SETTINGS]
    return "\n".join(lines)


def _row(m: Shape, format: str, rank: int, tokens: int) -> str:
    found, dense = memory(m, format, rank, tokens), memory(m, "bf16").experts
    fits = next((f"{card} GB" for card in CARDS if found.total + CONTEXT <= card * 1e9), f"more than {CARDS[-1]} GB")
    parts = (dense, found.experts, found.rest, found.adapters, found.step, found.total)
    numbers = " | ".join(f"{part / GIB:.1f}" for part in parts)
    return f"| {m.name}, {format} | {rank} | {tokens} | {numbers} | {fits} |"


if __name__ == "__main__":
    print(table())
