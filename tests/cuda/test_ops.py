"""Registration: once, and nothing heavy before the first CUDA tensor."""

import subprocess
import sys
from typing import get_type_hints

import pytest

from hexa_fx.cuda.register import kernel, kernels, register
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


def test_every_kernel_takes_its_operators_record() -> None:
    register()
    for name in kernels():
        taken = get_type_hints(kernel(name))
        if name != "reindex":
            assert issubclass(library.record_of(name), next(iter(taken.values()))), name
