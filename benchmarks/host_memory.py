"""By how much a process's resident memory grows while something runs."""

from __future__ import annotations

import os
import threading
from pathlib import Path


class HostPeak:
    """By how many bytes it grows inside the block, sampled every few milliseconds."""

    grown = 0

    def __enter__(self) -> HostPeak:
        self._before, self._done = _resident(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.003):
            self.grown = max(self.grown, _resident() - self._before)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
