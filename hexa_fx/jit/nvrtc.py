"""NVRTC through ctypes: CUDA text to a cubin with no toolkit and no host compiler."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

NVRTC_FLAGS = ("-std=c++17", "-default-device", "-DNDEBUG")
"""``-default-device``: CuTe's constexpr helpers carry no annotation, and NVRTC would make them host functions."""


class NvrtcError(Exception):
    """A failed compilation, with NVRTC's log as its text."""


@cache
def _load(path: Path) -> ctypes.CDLL:
    # The wheel's libnvrtc has no RUNPATH: its builtins must be in the process before the first compilation.
    for builtins in sorted(path.parent.glob("libnvrtc-builtins.so*")):
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(path))


def version(path: Path) -> str:
    """``major.minor`` of the library. Raises OSError when it does not load."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _load(path).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def compile_cubin(path: Path, text: str, options: list[str]) -> tuple[bytes, str]:
    """Compiles `text`.

    Args:
        path: of libnvrtc.
        text: CUDA source.
        options: command-line options, ``--gpu-architecture`` included.

    Returns:
        The cubin and the compiler's log.

    Raises:
        NvrtcError: with the log.
    """
    library = _load(path)
    program = ctypes.c_void_p()
    _check(library, library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None))
    try:
        arguments = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        failed = library.nvrtcCompileProgram(program, len(options), arguments)
        log = _read(library, "ProgramLog", program).rstrip(b"\0").decode(errors="replace")
        if failed:
            raise NvrtcError(log or f"nvrtcCompileProgram returned {failed}")
        return _read(library, "CUBIN", program), log
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _read(library: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _check(library: ctypes.CDLL, result: int) -> None:
    if result:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise NvrtcError(library.nvrtcGetErrorString(result).decode())
