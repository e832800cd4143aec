"""A compiler that is a script: it can be held, counts its runs, and fails when it is told to."""

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
gate, parent = os.path.realpath(here / "gate"), os.getppid()
with open(here / "runs", "a") as runs:
    runs.write(f"{os.getpid()}\\n")
output.write_bytes(b"half")
while os.path.exists(gate) and os.getppid() == parent:
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

    @property
    def held(self) -> Path:
        """Compilations that began since `hold` wait as long as this file is there."""
        return self.folder / "held"

    def hold(self) -> None:
        """Lets no compilation that begins from now on come to its end."""
        self.held.touch()
        (self.folder / "gate").symlink_to(self.held)

    def hold_no_more(self) -> None:
        """Lets those pass that begin from now on."""
        (self.folder / "gate").unlink()

    def release(self) -> None:
        """Lets all pass."""
        self.held.unlink()

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
    monkeypatch.setenv("HEXA_FX_NVCC", str(script))
    monkeypatch.setenv("HEXA_FX_CACHE_DIR", str(fake.cache))
    monkeypatch.setenv("HEXA_FX_COMPILER", "nvcc")
    return fake
