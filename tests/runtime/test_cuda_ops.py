"""Registration: once, and nothing heavy before the first CUDA tensor."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from hexa_fx.cuda.register import KERNELS, register
from hexa_fx.ops import library

LIGHT = """
import sys
import {first}
import hexa_fx.ops
from hexa_fx.ops import library
assert library.kernel_for("esmm", "cuda").__name__ == "esmm"
assert not any(name.startswith(("cutlass_library", "hexa_fx.jit", "hexa_fx.codegen")) for name in sys.modules)
"""


@pytest.mark.parametrize("first", ["hexa_fx.ops", "hexa_fx.cuda.register"])
def test_importing_the_operators_registers_kernels_and_imports_none(first: str) -> None:
    subprocess.run([sys.executable, "-c", LIGHT.format(first=first)], check=True, timeout=120)


def test_every_kernel_takes_its_schemas_arguments() -> None:
    register()
    for name, load in KERNELS.items():
        kernel = getattr(load(), name)
        schema = library.overload(name)._schema
        assert list(inspect.signature(kernel).parameters) == [argument.name for argument in schema.arguments]
