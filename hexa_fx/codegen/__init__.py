"""KernelSpec -> CUDA text. Knows nothing of graphs, compilers or devices; see `hexa_fx.codegen.family` to add a kernel."""

from __future__ import annotations

from hexa_fx.codegen.families import family_names, get_family
from hexa_fx.codegen.family import Family, LaunchShape, validate
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
