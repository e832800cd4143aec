"""Kernels whose own text runs on the host, compiled by g++ with stand-ins for the instructions of a GPU (the folder emulator)."""

import atexit
import ctypes
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

from hexa_fx.codegen import KernelSpec, render
from hexa_fx.cuda import choosing as cuda_choosing
from hexa_fx.templates import INCLUDE_DIR
from tests.cuda.cards import AMPERE, without_a_device

EMULATOR = Path(__file__).parent / "emulator"
FLAGS = ["-std=c++17", "-O1", "-fno-strict-aliasing", "-w", "-fPIC", f"-I{INCLUDE_DIR}"]


@cache
def header() -> Path:
    """A folder with the emulator, its header compiled already: most of the time of a kernel goes there."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    shutil.copytree(EMULATOR, folder, dirs_exist_ok=True)
    name = folder / "emulator.hpp"
    subprocess.run(["g++", *FLAGS, "-x", "c++-header", str(name), "-o", f"{name}.gch"], check=True)
    return folder


class EmulatedKernel:
    """A built kernel, launched on addresses of CPU tensors."""

    def __init__(self, spec: KernelSpec, folder: Path) -> None:
        source = render(spec)
        self.spec, program, library = spec, folder / f"{spec.key}.cpp", folder / f"{spec.key}.so"
        params = re.search(r"hexa_kernel\(const __grid_constant__ (\S+) p\)", source.text)[1]
        entry = f"emulator::run({{x, y, z}}, {source.launch.threads}, [&] {{ hexa_kernel(*static_cast<const {params}*>(p)); }});"
        launch = f"void launch(const void* p, unsigned x, unsigned y, unsigned z) {{ {entry} }}"
        text = f'#include "emulator.hpp"\n#define __CUDA_ARCH__ {spec.arch}0\n{source.text}\nextern "C" {launch}\n'
        program.write_text(text)
        subprocess.run(["g++", f"-I{header()}", *FLAGS, "-shared", str(program), "-o", str(library)], check=True)
        self._launch = ctypes.CDLL(str(library)).launch

    def config(self, grid: tuple[int, int, int], stream: int) -> tuple[int, int, int]:
        """What `queue` takes."""
        return grid

    def queue(self, device: int, config: tuple[int, int, int], parameters: ctypes.Array[ctypes.c_void_p]) -> None:
        """Runs all blocks, one after the other."""
        self._launch(ctypes.c_void_p(parameters[0]), *map(ctypes.c_uint, config))


def launches_run_here(patch: pytest.MonkeyPatch, folder: Path, card: cuda_choosing.Card) -> None:
    """As on a card of one multiprocessor, so that a block takes several units of work."""
    built: dict[KernelSpec, EmulatedKernel] = {}

    def get_kernel(spec: KernelSpec, node: str = "") -> EmulatedKernel:
        if spec not in built:
            built[spec] = EmulatedKernel(spec, folder)
        return built[spec]

    without_a_device(patch, folder, card._replace(multiprocessors=1), get_kernel)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        launches_run_here(patch, tmp_path_factory.mktemp("kernels"), AMPERE)
        yield
    cuda_choosing.forget_choices()
