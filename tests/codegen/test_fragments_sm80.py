"""Which elements of shared memory reach which register of which lane, computed by the device headers themselves on the host."""

import shutil
import subprocess
from pathlib import Path

import pytest

from hexa_fx.templates import INCLUDE_DIR


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_every_lane_reads_the_elements_that_mma_expects(tmp_path: Path) -> None:
    stub = tmp_path / "hexa_fx" / "ptx" / "sm80.cuh"
    stub.parent.mkdir(parents=True)
    stub.touch()  # the program has its own ldmatrix
    program = tmp_path / "fragments"
    source = Path(__file__).parent / "sm80_fragments.cpp"
    command = ["g++", "-std=c++17", "-O0", "-w", f"-I{tmp_path}", f"-I{INCLUDE_DIR}", str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(" 0 wrong") == 146
