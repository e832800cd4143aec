"""What memory the host has left, and which tensors would not give theirs back if they moved."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path

import torch

_MEMORY, _MAPS = Path("/proc/meminfo"), Path("/proc/self/maps")


def available_bytes() -> int | None:
    """Bytes that programs may still take; None where nothing says so."""
    lines = _MEMORY.read_text(encoding="ascii").splitlines() if _MEMORY.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), None)


def owns_its_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor is no view of a larger one."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def bytes_that_stay(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the host's tensors whose memory stays taken, or in a file, when they move elsewhere."""
    files = _mapped_files()
    starts = [start for start, _ in files]
    stay = 0
    for tensor in tensors:
        address = tensor.data_ptr()
        at = bisect_right(starts, address) - 1
        if not owns_its_storage(tensor) or (at >= 0 and address < files[at][1]):
            stay += tensor.numel() * tensor.element_size()
    return stay


def _mapped_files() -> list[tuple[int, int]]:
    """First and last address of every file that is mapped, in order."""
    found = []
    for line in _MAPS.read_text(encoding="utf-8", errors="replace").splitlines() if _MAPS.exists() else []:
        place, *_, name = line.split(maxsplit=5)
        if name.startswith("/") and not name.startswith("/dev/"):
            start, end = place.split("-")
            found.append((int(start, 16), int(end, 16)))
    return found
