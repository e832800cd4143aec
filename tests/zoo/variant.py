"""What one model of the zoo is, and small helpers to state it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

Expect = Literal["rewritten", "refused", "either"]
Inputs = Callable[[int, int, torch.dtype, int], tuple[tuple[Any, ...], dict[str, Any]]]

BOTH = (torch.float32, torch.float64)

# Sizes of most models: pairwise different, so that a mixed-up dimension cannot go unseen, and multiples of four where
# torch's grouped_mm wants rows of 16 bytes.
D, I, E, K = 12, 20, 5, 2  # noqa: E741


@dataclass(frozen=True)
class Variant:
    """One way in which people write a Mixture-of-Experts block.

    Args:
        name: unique, `<idiom>_<what>`.
        make: `make(seed)` gives the block in float32; the caller moves it to another dtype.
        inputs: `inputs(batch, seq, dtype, seed)` gives positional and keyword arguments.
        expect: ``rewritten`` means that a refusal is a defect of the detection; ``refused`` that a rewrite is wrong or
            could only be right by luck; ``either`` that both are honest, as long as a rewrite is exact.
        why: one sentence on what is special.
        dtypes: in which the unmodified block runs.
        gap: where ``expect`` is ``rewritten``, what is missing today: the block is refused although it need not be. Closing
            the gap makes its test fail, so that this note cannot go stale.
        train: whether the block can be run in train mode (False: its own code cannot do backward there).
    """

    name: str
    make: Callable[[int], nn.Module]
    inputs: Inputs
    expect: Expect
    why: str
    dtypes: tuple[torch.dtype, ...] = BOTH
    train: bool = True
    gap: str = ""


def hidden_states(batch: int, seq: int, dtype: torch.dtype, seed: int, width: int = D) -> tuple[tuple[Any, ...], dict]:
    """One tensor (batch, seq, width)."""
    return (torch.randn(batch, seq, width, generator=_generator(batch, seq, seed)).to(dtype),), {}


def flat_tokens(batch: int, seq: int, dtype: torch.dtype, seed: int, width: int = D) -> tuple[tuple[Any, ...], dict]:
    """One tensor (batch * seq, width)."""
    (x,), kwargs = hidden_states(batch, seq, dtype, seed, width)
    return (x.flatten(0, 1),), kwargs


def of_width(width: int) -> Inputs:
    """`hidden_states` of another width."""
    return lambda batch, seq, dtype, seed: hidden_states(batch, seq, dtype, seed, width)


def variant(
    name: str,
    block: Callable[..., nn.Module],
    why: str,
    expect: Expect = "rewritten",
    inputs: Inputs = hidden_states,
    dtypes: tuple[torch.dtype, ...] = BOTH,
    train: bool = True,
    gap: str = "",
    **options: Any,
) -> Variant:
    """A `Variant` whose `make` calls `block(**options)` from a seeded random state."""

    def make(seed: int) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return block(**options)

    return Variant(name, make, inputs, expect, why, dtypes, train, gap)


def weight(*shape: int) -> nn.Parameter:
    """A parameter whose products keep about unit size."""
    return nn.Parameter(torch.randn(*shape) / shape[-1] ** 0.5)


def _generator(batch: int, seq: int, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(10_000 * seed + 100 * batch + seq)
