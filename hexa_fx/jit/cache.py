"""The disk cache of built kernels: safe with many processes, with kill -9 during a build, and with damaged files.

``<cache>/kernels/<key>/`` holds ``kernel.cubin``, ``kernel.cu`` and ``meta.json`` with the cubin's SHA-256. A folder is built
elsewhere and appears by one rename, so it is complete or absent. A file that does not match its checksum is a miss.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

FORMAT = "1"
"""Of the folder and of the argument structs' convention. Raising it retires every older entry."""


@dataclass(frozen=True)
class BuiltKernel:
    """A built kernel on disk, checked against its checksum when it was read."""

    key: str
    path: Path
    cubin: bytes

    @property
    def source(self) -> Path:
        """The text it was built from."""
        return self.path / "kernel.cu"


class KernelCache:
    """Entries under one root folder. Cheap to construct; creates folders only when something is stored."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def get(self, key: str) -> BuiltKernel | None:
        """The entry of `key`; None if absent or damaged."""
        folder = self._folder(key)
        try:
            meta = json.loads((folder / "meta.json").read_text())
            cubin = (folder / "kernel.cubin").read_bytes()
        except (OSError, ValueError):
            return None
        if not isinstance(meta, dict) or meta.get("sha256") != hashlib.sha256(cubin).hexdigest():
            return None
        return BuiltKernel(key, folder, cubin)

    @contextmanager
    def lock(self, key: str, wait: bool = True) -> Iterator[bool]:
        """Held while `key` is built, by one process of this machine. The system releases it when a process dies.

        Yields:
            Whether it is held: always, unless another process has it and ``wait`` is false.
        """
        folder = self.root / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f"{key}.lock")
        try:
            lock.acquire(timeout=-1 if wait else 0)
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def workspace(self, key: str) -> Path:
        """A fresh folder to build `key` in, without the remains of a killed build. Call it under the lock."""
        parent = self.root / "building"
        parent.mkdir(parents=True, exist_ok=True)
        for stale in parent.glob(f"{key}.*"):
            shutil.rmtree(stale, ignore_errors=True)
        return Path(tempfile.mkdtemp(prefix=f"{key}.", dir=parent))

    def publish(self, key: str, workspace: Path, meta: dict[str, object]) -> BuiltKernel:
        """Moves a finished build into place, over a damaged entry if there is one. Call it under the lock."""
        cubin = (workspace / "kernel.cubin").read_bytes()
        meta = {**meta, "sha256": hashlib.sha256(cubin).hexdigest()}
        (workspace / "meta.json").write_text(json.dumps(meta, indent=1, sort_keys=True))
        folder = self._folder(key)
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.exists():
            doomed = Path(tempfile.mkdtemp(prefix=f"{key}.", dir=workspace.parent))
            os.replace(folder, doomed)
            shutil.rmtree(doomed, ignore_errors=True)
        os.replace(workspace, folder)
        return BuiltKernel(key, folder, cubin)

    def keys(self) -> list[str]:
        """Keys of all entries, damaged ones included."""
        folder = self.root / "kernels"
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    def clear(self) -> int:
        """Removes every entry and the remains of killed builds; returns how many entries there were."""
        count = len(self.keys())
        for name in ("kernels", "building"):
            shutil.rmtree(self.root / name, ignore_errors=True)
        return count

    def _folder(self, key: str) -> Path:
        return self.root / "kernels" / key


def cache_key(*parts: str) -> str:
    """Hash of everything that decides a cubin: text and headers, compiler, flags, architecture; and `FORMAT`."""
    return hashlib.sha256("\0".join((FORMAT, *parts)).encode()).hexdigest()[:32]
