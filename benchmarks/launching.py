"""What tests and measurements ask of kernels: one product on tensors, with any tile, where operators run its code on stand-ins
(`hexa_fx.cuda.planning`); and all kernels of a run built before it.

    sm90 = on_tensors(gemm_sm90)
    y = sm90.esmm(Esmm(x, w, None, v, offs, top_k, "nk"), tile)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from inspect import isfunction, signature
from types import ModuleType
from typing import Any

from torch import Tensor

from hexa_fx.cuda import calls
from hexa_fx.cuda.choosing import collect
from hexa_fx.jit import background
from hexa_fx.jit.errors import ToolchainError


def on_tensors(module: ModuleType) -> Any:
    """A family's module, whose functions of products take tensors: ``(record, tile=None, into=None)``."""
    return _OnTensors(module)


class _OnTensors:
    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return partial(_product, found) if isfunction(found) and "o" in signature(found).parameters else found


def _product(function: Callable[..., Any], o: Any, tile: Any = None, into: Any = None) -> Any:
    return run(function, o, tile=tile, **({} if into is None else {"into": into}))


def run(function: Callable[..., Any], *args: Any, tile: Any = None, **more: Any) -> Any:
    """A function of operands, which may lie in records and lists, on tensors.

    Args:
        tile: of its first product; None for the chosen one.
    """

    def on(_: Any, *leaves: Any) -> Any:
        each = iter(leaves)
        return function(*_rebuilt(args, each), **dict(zip(more, _rebuilt([*more.values()], each))))

    leaves = [*_leaves(args), *_leaves([*more.values()])]
    first = next(leaf for leaf in leaves if isinstance(leaf, Tensor))
    return calls._run(function, on, [first, *leaves], (None, tile))


def _leaves(value: Any) -> Iterator[Any]:
    """What is in lists and records, and in those in them."""
    if not isinstance(value, tuple | list):
        yield value
        return
    for one in value:
        yield from _leaves(one)


def _rebuilt(value: Any, leaves: Iterator[Any]) -> Any:
    """The same with other leaves."""
    if not isinstance(value, tuple | list):
        return next(leaves)
    each = [_rebuilt(one, leaves) for one in value]
    return type(value)(*each) if hasattr(value, "_fields") else type(value)(each)


def prebuild(function: Callable[[], object]) -> int:
    """Builds all kernels that `function` needs in parallel and waits for them, for measurements.

    The operators in `function` launch nothing and return uninitialised tensors, so it must not change anything that outlives it.

    Returns:
        How many kernels `function` needs; 0 where there is no compiler, which the operators will report themselves.

    Raises:
        BuildError: a kernel does not build; the error is that of the first one.
    """
    with collect() as specs:
        function()
    try:
        background.prebuild(specs)
    except ToolchainError:
        return 0
    return len(set(specs))
