"""Turns CUDA text into a kernel that can be launched.

Compiler discovery (`toolchain`), disk cache (`cache`), build (`build`), in the background
(`background`), loading and launch through the driver
(`kernel`), tensor maps (`tensormap`), environment (`env`). Nothing here touches CUDA, disk or network at import.
"""

from __future__ import annotations

from hexa_fx.jit.background import Builder, builder, prebuild
from hexa_fx.jit.build import build
from hexa_fx.jit.cache import BuiltKernel, KernelCache
from hexa_fx.jit.env import JitSettings
from hexa_fx.jit.errors import BuildError, DriverError, ToolchainError
from hexa_fx.jit.kernel import KernelHandle, get_kernel, loaded_kernel
from hexa_fx.jit.tensormap import tensor_map
from hexa_fx.jit.toolchain import Compiler, find_compiler

__all__ = [
    "BuildError",
    "Builder",
    "BuiltKernel",
    "Compiler",
    "DriverError",
    "JitSettings",
    "KernelCache",
    "KernelHandle",
    "ToolchainError",
    "build",
    "builder",
    "find_compiler",
    "get_kernel",
    "loaded_kernel",
    "prebuild",
    "tensor_map",
]
