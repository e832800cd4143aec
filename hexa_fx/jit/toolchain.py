"""Finds a compiler and the headers it needs. Nothing here runs at import; results are cached per settings."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from hexa_fx.jit.env import JitSettings
from hexa_fx.jit.errors import ToolchainError

MINIMUM_VERSION = (12, 3)
"""First CUDA release whose compiler takes CUTLASS 4.2's Hopper code."""


@dataclass(frozen=True)
class Compiler:
    """A usable compiler.

    Args:
        kind: nvcc, or NVRTC through its shared library.
        path: the nvcc program, or libnvrtc.
        version: e.g. ``13.0.88``.
        includes: folders of CUTLASS's and (for NVRTC) CUDA's headers.
        cutlass: version of the CUTLASS headers, e.g. ``4.2.0``.
    """

    kind: Literal["nvcc", "nvrtc"]
    path: Path
    version: str
    includes: tuple[Path, ...]
    cutlass: str

    @property
    def identity(self) -> str:
        """What the compiler is, not where it is; part of cache keys."""
        return f"{self.kind} {self.version} cutlass {self.cutlass}"


@cache
def find_compiler(settings: JitSettings) -> Compiler:
    """nvcc from HEXA_FX_NVCC, PATH, CUDA_HOME or the nvidia-cuda-nvcc wheel; else NVRTC.

    Raises:
        ToolchainError: no compiler can be used; the message has the reason for each.
    """
    reasons: list[str] = []
    tries: dict[str, Callable[[JitSettings], Compiler]] = {"nvcc": _nvcc, "nvrtc": _nvrtc}
    for kind, find in tries.items():
        if settings.compiler not in ("auto", kind):
            continue
        try:
            return find(settings)
        except _Unusable as reason:
            reasons.append(f"{kind}: {reason}")
    raise ToolchainError("; ".join(reasons))


class _Unusable(Exception):
    """A compiler cannot be used; says why."""


def cutlass_include(settings: JitSettings) -> Path:
    """The folder that holds ``cute/`` and ``cutlass/``.

    Raises:
        ToolchainError: no such folder.
    """
    try:
        return _cutlass_include(settings)
    except _Unusable as reason:
        raise ToolchainError(str(reason)) from None


def _cutlass_include(settings: JitSettings) -> Path:
    if settings.cutlass_include:
        candidates = [Path(settings.cutlass_include)]
    else:
        from hexa_fx.codegen.cutlass import cutlass_library  # where the wheel itself says that its headers are

        candidates = [Path(cutlass_library.source_path) / "include"]
    for folder in candidates:
        if (folder / "cutlass" / "version.h").is_file():
            return folder
    raise _Unusable(f"no CUTLASS headers in {candidates[0]}; install nvidia-cutlass or set HEXA_FX_CUTLASS_INCLUDE")


def _cutlass_version(include: Path) -> str:
    text = (include / "cutlass" / "version.h").read_text()
    return ".".join(re.findall(r"#define CUTLASS_(?:MAJOR|MINOR|PATCH)\s+(\d+)", text))


def _nvcc(settings: JitSettings) -> Compiler:
    path = next(_nvcc_candidates(settings), None)
    if path is None:
        raise _Unusable("not on PATH, not in CUDA_HOME, and nvidia-cuda-nvcc is not installed")
    if not path.is_file() or not os.access(path, os.X_OK):
        raise _Unusable(f"{path} is not a program")
    if not any(shutil.which(name) for name in ("g++", "c++", "clang++", "gcc")):
        raise _Unusable("it needs a host compiler (g++), and there is none")
    done = subprocess.run([str(path), "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"V(\d+\.\d+\.\d+)", done.stdout)
    if not found:
        raise _Unusable(f"{path} --version says {(done.stdout + done.stderr).strip()[-200:]!r}")
    _check_version(found[1])
    include = _cutlass_include(settings)
    return Compiler("nvcc", path, found[1], (include,), _cutlass_version(include))


def _check_version(version: str) -> None:
    if tuple(int(part) for part in version.split(".")[:2]) < MINIMUM_VERSION:
        raise _Unusable(f"version {version} is older than {MINIMUM_VERSION[0]}.{MINIMUM_VERSION[1]}")


def _nvcc_candidates(settings: JitSettings) -> Iterator[Path]:
    if settings.nvcc:
        yield Path(settings.nvcc)
        return
    on_path = shutil.which("nvcc")
    if on_path:
        yield Path(on_path)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        root = os.environ.get(name)
        if root and (Path(root) / "bin" / "nvcc").is_file():
            yield Path(root) / "bin" / "nvcc"
    yield from _in_wheels("cu*/bin/nvcc", "cuda_nvcc/bin/nvcc")


def _nvrtc(settings: JitSettings) -> Compiler:
    library = next(_in_wheels("cu*/lib/libnvrtc.so.*", "cuda_nvrtc/lib/libnvrtc.so.*"), None)
    library = library or next(_in_cuda_home("lib64/libnvrtc.so.*"), None)
    if library is None:
        raise _Unusable("libnvrtc is not in the nvidia-cuda-nvrtc wheel and not in CUDA_HOME")
    from hexa_fx.jit import nvrtc

    try:
        version = nvrtc.version(library)
    except OSError as error:
        raise _Unusable(f"{library} does not load: {error}") from None
    _check_version(version)
    include = _cutlass_include(settings)
    cuda = _cuda_include(settings)
    # On CUDA 13, CuTe includes both <cuda/std/...> and <cccl/cuda/std/...>, so both folders are needed
    return Compiler("nvrtc", library, version, (include, cuda, cuda / "cccl"), _cutlass_version(include))


def _cuda_include(settings: JitSettings) -> Path:
    if settings.cuda_include:
        candidates = [Path(settings.cuda_include)]
    else:
        candidates = [*_in_cuda_home("include"), *_in_wheels("cu*/include", "cuda_runtime/include")]
    for folder in candidates:
        if (folder / "cuda_bf16.h").is_file() and (folder / "cccl" / "cuda" / "std").is_dir():
            return folder
    raise _Unusable(
        "CUDA's headers (nvidia-cuda-runtime and nvidia-cuda-cccl) were not found; set HEXA_FX_CUDA_INCLUDE"
    )


def _in_cuda_home(pattern: str) -> Iterator[Path]:
    for root in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if root and Path(root).is_dir():
            yield from sorted(Path(root).glob(pattern))


def _in_wheels(*patterns: str) -> Iterator[Path]:
    """Files of the ``nvidia`` namespace package; newest CUDA first."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations if spec else None) or ():
        for pattern in patterns:
            yield from sorted(Path(root).glob(pattern), reverse=True)
