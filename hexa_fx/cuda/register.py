"""Registers the CUDA kernels of the ``hexa::`` operators, which `hexa_fx.ops` asks for through `hexa_fx.registry`.

That neither touches CUDA nor imports a compiler: the kernels' modules are imported when the first CUDA tensor arrives.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any

from hexa_fx.cuda.modes import runs_torch_only

_LAYERS = tuple(
    f"{name}{end}" for name in ("moe_ffn", "moe_ffn_sources", "quantized_ffn") for end in ("", "_forward", "_backward")
)


@cache
def kernel(name: str) -> Callable[..., Any]:
    """What runs ``hexa::<name>``, or a layer, the function of that name. Imports it and all others."""
    from hexa_fx.cuda import kernel_set, layer  # noqa: F401  (the former is told of new layers)
    from hexa_fx.cuda.calls import KERNELS

    return (KERNELS | layer.LAYERS)[name]


def kernels() -> list[str]:
    """The operators on rows. Whole layers are made of them."""
    from hexa_fx.ops import library  # hexa_fx.ops calls `register`

    return [name for name in library.names() if not name.startswith("moe_ffn")]


@cache
def register() -> None:
    """Registers this package's kernels as the CUDA implementation of their operators, once per process."""
    from hexa_fx.ops import library, moe_ffn_autograd, moe_ffn_fp8  # hexa_fx.ops calls this function
    from hexa_fx.ops.listed import readable_on

    def by_torch(name: str) -> Callable[..., Any]:
        return lambda *args: library.kernel_for(name, "any")(*args)

    for name in kernels():
        library.register_kernel(name, "cuda", _lazy(name, by_torch(name)))
    moe_ffn_fp8.why_not_on["cuda"], moe_ffn_fp8.is_few_on["cuda"] = _late("fp8", "why_not"), _late("fp8", "is_few")
    readable_on["cuda"] = _late("places", "readable")
    for name in _LAYERS:
        moe_ffn_autograd.register_on_cuda(name, _lazy(name, lambda general, *args: general(*args)))
    for name in ("moe_ffn_sources", "moe_ffn_sources_forward"):  # where a compiler calls them, too
        library.register_kernel(name, "cuda", partial(moe_ffn_autograd.run, name))


def _late(module: str, name: str) -> Callable[..., Any]:
    """A function of a module of kernels, which the first call imports."""

    @cache
    def found() -> Callable[..., Any]:
        return getattr(import_module(f"hexa_fx.cuda.{module}"), name)  # type: ignore[no-any-return]

    return lambda *args: found()(*args)


def _lazy(name: str, by_torch: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return (by_torch if runs_torch_only() else kernel(name))(*args)

    run.__name__ = name
    return run
