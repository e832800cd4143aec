"""The forward and backward programs that a layer runs: what is asked of the compiler, and what it gives.

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
from hexa_fx.ops.records import DENSE
from hexa_fx.ops.table_layers import READ_WITH_X, SOURCES_OPERANDS, Static


@dataclass(frozen=True)
class FfnRequest:
    """Everything except sizes that decides a program.

    Args:
        spec: the expert.
        given: which of `SOURCES_OPERANDS` are not None.
        grads: which of them need a gradient.
        training: whether the forward program also returns what backward needs.
        added: which of `grads` the backward program adds to buffers (its operands ``main_NAME``) instead of returning.
        fused_backward: dX, dW and db of the first projection in one kernel (`esfk`), else in three.
        formats, alphas: of w1, w3 and w2, as `hexa::moe_ffn_sources` takes them; empty for `hexa::moe_ffn`.
    """

    spec: FfnSpec
    given: frozenset[str]
    grads: frozenset[str] = frozenset()
    training: bool = False
    added: frozenset[str] = frozenset()
    fused_backward: bool = True
    formats: tuple[str, ...] = ()
    alphas: tuple[float, ...] = ()

    def format_of(self, number: str) -> str:
        """Of the weight of projection ``1``, ``3`` or ``2``."""
        return self.formats["132".index(number)] if self.formats else DENSE

    def alpha_of(self, number: str) -> float:
        """What its low-rank addition is multiplied by."""
        return self.alphas["132".index(number)]

    @property
    def keeps_x(self) -> bool:
        """Whether backward reads x."""
        return self.spec.recompute_h or bool(self.grads & READ_WITH_X)

    @property
    def kept(self) -> tuple[str, ...]:
        """What forward makes that backward reads."""
        narrow = (f"u{number}" for number in "132" if f"a{number}" in self.given)
        return (*(() if self.spec.recompute_h else ("h",)), *narrow, "v", "inv", "offs")


class FfnPrograms(Protocol):
    """Two callables over a record of operands: `MoeFfn` or `MoeFfnSources`, and its backward's. Buffers may follow the latter."""

    @property
    def forward(self) -> Callable[..., Any]: ...

    @property
    def backward(self) -> Callable[..., Any]: ...


@lru_cache(maxsize=1024)
def programs(
    static: tuple[Any, ...],
    given: tuple[bool, ...],
    device: str,
    generation: int,
    needs: tuple[bool, ...] | None = None,
    added: tuple[bool, ...] = (),
    fused_backward: bool = True,
) -> FfnPrograms:
    """The programs for one kind of call, bound to the kernels of a device type. Cached.

    Args:
        static: what `Layer.static` is.
        given: of each of `SOURCES_OPERANDS`, whether it is not None; shorter for `hexa::moe_ffn`.
        device: device type.
        generation: `library.kernel_generation`.
        needs: of each of them, whether it needs a gradient. None for inference, else forward also returns what backward needs.
        added: for each of them after the first, whether its gradient is added to a buffer. Empty for none.
        fused_backward: see `FfnRequest`.
    """
    of_spec = dict(zip(Static._fields, static))
    spec, sources = FfnSpec(**of_spec), static[len(of_spec) :]
    present, grads = (frozenset(compress(SOURCES_OPERANDS, flags)) for flags in (given, needs or ()))
    buffered = frozenset(compress(SOURCES_OPERANDS[1:], added))
    asked = grads & present, needs is not None, buffered & grads & present, fused_backward
    made: FfnPrograms = registry.compiler()(FfnRequest(spec, present, *asked, *sources), device)
    return made
