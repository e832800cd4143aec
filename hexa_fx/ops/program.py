"""The forward and backward programs that `hexa::moe_ffn` runs: what is asked of the compiler, and what it gives.

The compiler (`hexa_fx.passes.lowering`) is above the operators and reaches them through `hexa_fx.registry`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from typing import Any, Protocol

from hexa_fx import registry
from hexa_fx.ir import FfnSpec
from hexa_fx.ops import library
from hexa_fx.ops.table_layers import OPERANDS


@dataclass(frozen=True)
class FfnRequest:
    """Everything except sizes that decides a program.

    Args:
        spec: the expert.
        given: which of `OPERANDS` are not None.
        grads: which of `OPERANDS` need a gradient.
        training: whether the forward program also returns what backward needs.
        added: which of `grads` the backward program adds to buffers (its operands ``main_NAME``) instead of returning.
        fused_backward: dX, dW and db of the first projection in one kernel (`esfk`), else in three.
    """

    spec: FfnSpec
    given: frozenset[str]
    grads: frozenset[str] = frozenset()
    training: bool = False
    added: frozenset[str] = frozenset()
    fused_backward: bool = True


class FfnPrograms(Protocol):
    """Two callables over all operands by position, with None for missing ones."""

    @property
    def forward(self) -> Callable[..., Any]: ...

    @property
    def backward(self) -> Callable[..., Any]: ...


def programs(
    static: tuple[Any, ...],
    given: tuple[bool, ...],
    needs: tuple[bool, ...],
    training: bool,
    device: str,
    added: tuple[bool, ...] = (),
    fused_backward: bool = True,
) -> FfnPrograms:
    """The programs for one kind of call, bound to the kernels of a device type. Cached.

    Args:
        static: (activation, glu, params, layout1, layout2, recompute_h).
        given: of each of `OPERANDS`, whether it is not None.
        needs: of each of `OPERANDS`, whether it needs a gradient.
        training: whether the forward program also returns what backward needs.
        device: device type.
        added: for each of `OPERANDS` after the first, whether its gradient is added to a buffer. Empty for none.
        fused_backward: see `FfnRequest`.
    """
    return _made(static, given, needs, training, device, added, fused_backward, library.kernel_generation)


@lru_cache(maxsize=1024)
def _made(
    static: tuple[Any, ...],
    given: tuple[bool, ...],
    needs: tuple[bool, ...],
    training: bool,
    device: str,
    added: tuple[bool, ...],
    fused_backward: bool,
    generation: int,
) -> FfnPrograms:
    activation, glu, params, layout1, layout2, recompute_h = static
    spec = FfnSpec(activation, glu, layout1, layout2, params, recompute_h)
    present, grads = (frozenset(compress(OPERANDS, flags)) for flags in (given, needs))
    buffered = frozenset(compress(OPERANDS[1:], added))
    request = FfnRequest(spec, present, grads & present, training, buffered & grads & present, fused_backward)
    made: FfnPrograms = registry.compiler()(request, device)
    return made
