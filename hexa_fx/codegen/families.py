"""The table of kernel families. Modules are imported on first use, so a family may import what it likes."""

from __future__ import annotations

import importlib
from functools import cache

from hexa_fx.codegen.family import Family
from hexa_fx.errors import KernelError

_MODULES = {
    "activate": "hexa_fx.codegen.family_rows",
    "activate_fp8": "hexa_fx.codegen.family_rows_fp8",
    "block_gemm_sm90": "hexa_fx.codegen.family_block_sm90",
    "combine": "hexa_fx.codegen.family_rows",
    "combine_bytes": "hexa_fx.codegen.family_rows_fp8",
    "decode_combine": "hexa_fx.codegen.family_decode",
    "decode_down": "hexa_fx.codegen.family_decode",
    "decode_gemm": "hexa_fx.codegen.family_decode",
    "esfk_sm80": "hexa_fx.codegen.family_gemm_sm80",
    "ess": "hexa_fx.codegen.family_rows",
    "gemm_sm80": "hexa_fx.codegen.family_gemm_sm80",
    "gather_gemm_sm90": "hexa_fx.codegen.family_gemm_sm90",
    "low_rank": "hexa_fx.codegen.family_low_rank",
    "packed_gemm": "hexa_fx.codegen.family_packed",
    "quantize_fp8": "hexa_fx.codegen.family_rows_fp8",
    "reindex": "hexa_fx.codegen.family_reindex",
    "scaled_transpose": "hexa_fx.codegen.family_rows",
    "unpack": "hexa_fx.codegen.family_unpack",
}


@cache
def get_family(name: str) -> Family:
    """The family called `name`.

    A family's module holds it in ``FAMILIES``, a tuple of `Family`.

    Raises:
        KernelError: no family of that name.
    """
    if name not in _MODULES:
        raise KernelError(f"no kernel family {name!r}; there are {', '.join(sorted(_MODULES))}")
    module = importlib.import_module(_MODULES[name])
    families: tuple[Family, ...] = module.FAMILIES
    return next(family for family in families if family.name == name)


def family_names() -> tuple[str, ...]:
    """Names of all families, sorted."""
    return tuple(sorted(_MODULES))
