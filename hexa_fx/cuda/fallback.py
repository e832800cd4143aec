"""When an operator on CUDA runs torch's own operators instead of kernels: there is no compiler, or no kernel for its operands."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from hexa_fx.codegen.spec import SpecError
from hexa_fx.cuda.choosing import collection
from hexa_fx.cuda.launch import NotBuilt, say_provisional
from hexa_fx.errors import KernelError
from hexa_fx.ops import library

log = logging.getLogger(__name__)

fallbacks: dict[str, str] = {}
"""Operators that fell back to another implementation in this process, and why. Each was logged once."""

_permanent: set[str] = set()


class Unsupported(KernelError):
    """We have no kernel for these operands; the operator's generic implementation takes them."""


def cuda_kernel(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates the CUDA kernel of ``hexa::<name>``: runs it on its first tensor's device, or falls back.

    It falls back to the generic implementation when there is no compiler, when a kernel does not build, or when there is no
    kernel for the operands, and while a kernel is being built. The reason is logged once per operator.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def kernel(*args: Any) -> Any:
            found = collection()
            if found is not None and found.card is not None:
                return function(*args)
            if name in fallbacks and fallbacks[name] in _permanent:
                return generic(name)(*args)
            try:
                index = args[0].device.index
                if index == torch._C._cuda_getDevice():
                    return function(*args)
                with torch.cuda.device(index):
                    return function(*args)
            except NotBuilt as error:
                say_provisional(name, "torch's own operators", error)
                return generic(name)(*args)
            except KernelError as error:
                _record(name, error)
                return generic(name)(*args)

        return kernel

    return decorate


def _record(name: str, error: KernelError) -> None:
    reason = str(error)
    if not isinstance(error, Unsupported | SpecError):
        _permanent.add(reason)
    if name not in fallbacks:
        log.warning("hexa::%s falls back to torch's own operators: %s", name, reason)
    fallbacks[name] = reason


def falls_back() -> bool:
    """Whether some operator runs torch's implementation for good, because its kernels cannot be built."""
    return bool(_permanent)


def generic(name: str) -> Callable[..., Any]:
    """The implementation of ``hexa::<name>`` that runs on any device."""
    return library.kernel_for(name, "any")
