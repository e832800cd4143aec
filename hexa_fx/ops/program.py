"""What `hexa::moe_ffn` runs: a forward and a backward program, and where they come from.

The programs are torch.fx graphs of the operators, made by the lowering pass. Passes stand above the operators and are
not imported here: the pass is found by name (`PROVIDER`) when a program is first needed, or set with `set_provider`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from hexa_fx.errors import InputError
from hexa_fx.ir import FfnSpec
from hexa_fx.ops import library

PROVIDER = "hexa_fx.passes.program:provide"
"""``module:function`` that makes a `Programs` from an `FfnRequest`."""

OPERANDS = ("x", "top_k_weights", "w1", "b1", "w3", "b3", "w2", "b2")
"""The differentiable operands of moe_ffn, in the order of its schema."""


@dataclass(frozen=True)
class FfnRequest:
    """What decides a program apart from the sizes.

    Args:
        spec: the expert.
        given: which of `OPERANDS` are not None.
        grads: which of `OPERANDS` need a gradient.
        training: the forward program also returns what backward needs.
    """

    spec: FfnSpec
    given: frozenset[str]
    grads: frozenset[str] = frozenset()
    training: bool = False


class Programs(Protocol):
    """Two callables over the operands by position; None where an operand is missing."""

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
    _made.cache_clear()


def programs(request: FfnRequest, device: str) -> Programs:
    """The programs of a request, bound to the kernels of a device type. Cached."""
    return _made(request, device, library.kernel_generation)


@lru_cache(maxsize=1024)
def _made(request: FfnRequest, device: str, generation: int) -> Programs:
    provider = _provider or pkgutil.resolve_name(PROVIDER)
    made: Programs = provider(request, device)
    return made


def request_of(
    tensors: tuple[Any, ...], spec: FfnSpec, needs: tuple[bool, ...] = (False,) * 8, training: bool = False
) -> FfnRequest:
    """The request for operands in the order of `OPERANDS`."""
    if len(tensors) != len(OPERANDS) or len(needs) != len(OPERANDS):
        raise InputError(f"hexa::moe_ffn has operands {OPERANDS}; got {len(tensors)} tensors, {len(needs)} needs")
    given = frozenset(n for n, t in zip(OPERANDS, tensors, strict=True) if t is not None)
    grads = frozenset(n for n, need in zip(OPERANDS, needs, strict=True) if need) & given
    return FfnRequest(spec, given, grads, training)
