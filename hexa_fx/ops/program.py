"""The forward and backward programs that `hexa::moe_ffn` runs, and where they come from.

The programs are torch.fx graphs of operators, made by the lowering pass. Passes are above the operators and not imported here: the
pass is found by name (`PROVIDER`) when a program is first needed, or set with `set_provider`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from typing import Any, Protocol

from hexa_fx.ir import FfnSpec
from hexa_fx.ops import library

PROVIDER = "hexa_fx.passes.lowering.program:provide"
"""``module:function`` that makes a `Programs` from an `FfnRequest`."""

OPERANDS = ("x", "top_k_weights", "w1", "b1", "w3", "b3", "w2", "b2")
"""The differentiable operands of moe_ffn, in the order of its schema."""


@dataclass(frozen=True)
class FfnRequest:
    """Everything except sizes that decides a program.

    Args:
        spec: the expert.
        given: which of `OPERANDS` are not None.
        grads: which of `OPERANDS` need a gradient.
        training: whether the forward program also returns what backward needs.
        added: which of `grads` the backward program adds to buffers (its operands ``main_NAME``) instead of returning.
    """

    spec: FfnSpec
    given: frozenset[str]
    grads: frozenset[str] = frozenset()
    training: bool = False
    added: frozenset[str] = frozenset()


class Programs(Protocol):
    """Two callables over all operands by position, with None for missing ones."""

    @property
    def forward(self) -> Callable[..., Any]: ...

    @property
    def backward(self) -> Callable[..., Any]: ...


Provider = Callable[[FfnRequest, str], Programs]
_provider: Provider | None = None


def set_provider(provider: Provider | None) -> None:
    """Replaces the maker of programs (None: back to `PROVIDER`) and forgets the programs made so far."""
    global _provider
    _provider = provider
    library.kernel_generation += 1
    _made.cache_clear()


def programs(
    static: tuple[Any, ...],
    given: tuple[bool, ...],
    needs: tuple[bool, ...],
    training: bool,
    device: str,
    added: tuple[bool, ...] = (),
) -> Programs:
    """The programs for one kind of call, bound to the kernels of a device type. Cached.

    Args:
        static: (activation, glu, params, layout1, layout2, recompute_h, fused_backward).
        given: of each of `OPERANDS`, whether it is not None.
        needs: of each of `OPERANDS`, whether it needs a gradient.
        training: whether the forward program also returns what backward needs.
        device: device type.
        added: for each of `OPERANDS` after the first, whether its gradient is added to a buffer. Empty for none.
    """
    return _made(static, given, needs, training, device, added, library.kernel_generation)


@lru_cache(maxsize=1024)
def _made(
    static: tuple[Any, ...],
    given: tuple[bool, ...],
    needs: tuple[bool, ...],
    training: bool,
    device: str,
    added: tuple[bool, ...],
    generation: int,
) -> Programs:
    activation, glu, params, layout1, layout2, recompute_h, fused_backward = static
    spec = FfnSpec(activation, glu, layout1, layout2, params, recompute_h, fused_backward)
    present, grads = (frozenset(compress(OPERANDS, flags)) for flags in (given, needs))
    provider = _provider or pkgutil.resolve_name(PROVIDER)
    buffered = frozenset(compress(OPERANDS[1:], added))
    made: Programs = provider(FfnRequest(spec, present, grads & present, training, buffered & grads & present), device)
    return made
