"""The ``HEXA_FX_*`` variables that building and launching kernels obeys, read in this one place.

docs/environment.md is the table for users; a test keeps the two equal.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from hexa_fx.errors import InputError

VARIABLES = {
    "HEXA_FX_CACHE_DIR": "Folder of built kernels and tuning results. Default: the user's cache folder.",
    "HEXA_FX_COMPILER": "`auto` (nvcc, else NVRTC), `nvcc` or `nvrtc`.",
    "HEXA_FX_NVCC": "Path of nvcc. Default: PATH, then CUDA_HOME, then the nvidia-cuda-nvcc wheel.",
    "HEXA_FX_CUDA_INCLUDE": "Folder of CUDA's headers for NVRTC. Default: CUDA_HOME, then the nvidia-cuda-runtime wheel.",
    "HEXA_FX_CUTLASS_INCLUDE": "Folder of the CUTLASS headers. Default: the nvidia-cutlass wheel's.",
    "HEXA_FX_CUDA_ARCH": "Choose kernels as for this compute capability (80, 86, 89, 90); cubins still fit the device.",
    "HEXA_FX_KERNEL_PACK": "Folder of a kernel pack, which is used before any compiler. Installed packs need no variable.",
    "HEXA_FX_DISABLE_JIT": "1: build nothing; kernels that are not in the cache fall back.",
    "HEXA_FX_BUILD_JOBS": "Kernels built at a time. Default: MAX_JOBS, else this process's share of the cores.",
    "HEXA_FX_VERBOSE_BUILD": "1: log the compile command and ptxas's resource report.",
    "HEXA_FX_KEEP": "1: keep the build folder, with intermediate files, beside the cubin.",
    "HEXA_FX_WAIT_FOR_KERNELS": "1: a launch waits until its kernel is built, as benchmarks want; else others run meanwhile.",
    "HEXA_FX_AUTOTUNE": "1: time candidate tiles for shapes that the shipped table lacks, and remember the best "
    "(`hexa-fx tune` does it for known models).",
    "HEXA_FX_FEW_TOKENS": "0: layers of few tokens take four launches on Hopper, not two or three.",
    "HEXA_FX_CHECKED": "1: raise for routing ids out of range, which otherwise contribute nothing (synchronises).",
}


@dataclass(frozen=True)
class JitSettings:
    """One reading of the environment. Field names are the variables' without the prefix, in lower case."""

    cache_dir: Path
    compiler: str = "auto"
    nvcc: str = ""
    cuda_include: str = ""
    cutlass_include: str = ""
    cuda_arch: int = 0
    kernel_pack: str = ""
    disable_jit: bool = False
    build_jobs: int = 1
    verbose_build: bool = False
    keep: bool = False
    autotune: bool = False
    few_tokens: bool = True

    @classmethod
    def from_env(cls) -> JitSettings:
        """Reads the environment.

        Raises:
            InputError: a variable has a value that it does not take.
        """
        compiler = _text("HEXA_FX_COMPILER", "auto")
        if compiler not in ("auto", "nvcc", "nvrtc"):
            raise InputError(f"HEXA_FX_COMPILER is {compiler!r}; expected auto, nvcc or nvrtc")
        cache = _text("HEXA_FX_CACHE_DIR")
        return cls(
            cache_dir=Path(cache).expanduser() if cache else platformdirs.user_cache_path("hexa_fx"),
            compiler=compiler,
            nvcc=_text("HEXA_FX_NVCC"),
            cuda_include=_text("HEXA_FX_CUDA_INCLUDE"),
            cutlass_include=_text("HEXA_FX_CUTLASS_INCLUDE"),
            cuda_arch=_integer("HEXA_FX_CUDA_ARCH", 0),
            kernel_pack=_text("HEXA_FX_KERNEL_PACK"),
            disable_jit=_switch("HEXA_FX_DISABLE_JIT"),
            build_jobs=_integer("HEXA_FX_BUILD_JOBS", 0) or _integer("MAX_JOBS", 0) or _own_cores(),
            verbose_build=_switch("HEXA_FX_VERBOSE_BUILD"),
            keep=_switch("HEXA_FX_KEEP"),
            autotune=_switch("HEXA_FX_AUTOTUNE"),
            few_tokens=_switch("HEXA_FX_FEW_TOKENS", "1"),
        )


def waits_for_kernels() -> bool:
    """HEXA_FX_WAIT_FOR_KERNELS alone, since it changes no build."""
    return _switch("HEXA_FX_WAIT_FOR_KERNELS")


def _own_cores() -> int:
    """Cores that this process may use, divided by the number of ranks that torchrun started on this machine."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, _integer("LOCAL_WORLD_SIZE", 1)))


def _text(name: str, default: str = "") -> str:
    return os.environ.get(name, "") or default


def _integer(name: str, default: int) -> int:
    value = _text(name)
    if not value:
        return default
    digits = value.removeprefix("sm_").replace(".", "")
    if not digits.isdigit():
        raise InputError(f"{name} is {value!r}; expected a whole number")
    return int(digits)


def _switch(name: str, default: str = "") -> bool:
    return _text(name, default).lower() not in ("", "0", "false", "no", "off")
