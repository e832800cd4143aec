"""A compiler that is a script: it takes a moment, counts its runs, and fails when the source says so."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = (
    f"#!{sys.executable}\n"
    + """
import os, pathlib, sys, time
here = pathlib.Path(__file__).parent
if "--version" in sys.argv:
    print("Cuda compilation tools, release 13.0, V13.0.88")
    sys.exit(0)
output = pathlib.Path(sys.argv[sys.argv.index("-o") + 1])
text = pathlib.Path(sys.argv[sys.argv.index("-cubin") + 1]).read_text()
end, parent = time.monotonic() + float((here / "seconds").read_text()), os.getppid()
with open(here / "runs", "a") as runs:
    runs.write(f"{os.getpid()}\\n")
output.write_bytes(b"half")
while time.monotonic() < end and os.getppid() == parent:
    time.sleep(0.01)
if (here / "broken").exists():
    print("ptxas noise\\n" * 2000 + "kernel.cu(7): error: this is the reason", file=sys.stderr)
    sys.exit(2)
output.write_bytes(b"cubin of " + str(len(text)).encode())
"""
)


def _state(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


@dataclass(frozen=True)
class FakeCompiler:
    """The script's folder and the cache it builds into."""

    folder: Path
    cache: Path

    @property
    def runs(self) -> int:
        """How often something was compiled."""
        log = self.folder / "runs"
        return len(log.read_text().splitlines()) if log.exists() else 0

    @property
    def alive(self) -> bool:
        """Whether any of the runs goes on."""
        pids = (self.folder / "runs").read_text().split()
        return any(_state(pid) != "Z" for pid in pids)

    def take(self, seconds: float) -> None:
        """Makes each compilation that begins from now on last."""
        text = self.folder / "seconds.new"
        text.write_text(str(seconds))
        text.replace(self.folder / "seconds")  # at once: a compiler that begins now never reads an empty file

    def breaks(self) -> None:
        """Makes each compilation fail."""
        (self.folder / "broken").touch()


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    folder = tmp_path / "toolkit"
    folder.mkdir()
    script = folder / "nvcc"
    script.write_text(SCRIPT)
    script.chmod(0o755)
    fake = FakeCompiler(folder, tmp_path / "cache")
    fake.take(0)
    monkeypatch.setenv("HEXA_FX_NVCC", str(script))
    monkeypatch.setenv("HEXA_FX_CACHE_DIR", str(fake.cache))
    monkeypatch.setenv("HEXA_FX_COMPILER", "nvcc")
    return fake
