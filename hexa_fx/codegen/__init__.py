"""KernelSpec -> CUDA text. Knows nothing of graphs, compilers or devices.

`hexa_fx.codegen.family` says how a kernel is added.
"""

from __future__ import annotations

from hexa_fx.codegen.family import Family, LaunchShape, family_names, get_family, validate
from hexa_fx.codegen.render import KernelSource, render
from hexa_fx.codegen.spec import KernelSpec, SpecError

__all__ = [
    "Family",
    "KernelSource",
    "KernelSpec",
    "LaunchShape",
    "SpecError",
    "family_names",
    "get_family",
    "render",
    "validate",
]
