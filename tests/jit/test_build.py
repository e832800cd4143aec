"""Building: once over processes, never half, errors that can be acted on, and the real compiler where there is one."""

import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hexa_fx.codegen import KernelSpec, render
from hexa_fx.jit import BuildError, JitSettings, KernelCache, ToolchainError, build, prebuild
from hexa_fx.jit.build import build_key
from hexa_fx.jit.toolchain import find_compiler
from tests.jit.conftest import FakeCompiler

SPEC = KernelSpec("reindex", "reindex_place", 80).with_options(id="int", warps=4, experts=8)
SPECS = [SPEC.with_options(warps=warps) for warps in (1, 2, 4, 8, 16)]
BUILD_ONE = """
import sys
from hexa_fx.codegen import KernelSpec, render
from hexa_fx.jit import build
print(build(render(KernelSpec.from_json(sys.argv[1]))).key)
assert "torch" not in sys.modules  # which takes a second
"""


def start(spec: KernelSpec) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILD_ONE, spec.to_json()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)


def wait_until(condition: object, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.02)


def test_the_second_time_is_read_from_the_cache(compiler: FakeCompiler) -> None:
    first = build(render(SPEC))
    second = build(render(SPEC, "another node"))
    assert (first.cubin, compiler.runs) == (second.cubin, 1)
    assert first.cubin.startswith(b"cubin of")
    assert "hexa_kernel" in first.source.read_text()


def test_two_processes_build_the_same_kernel_once(compiler: FakeCompiler) -> None:
    compiler.hold()
    processes = [start(SPEC), start(SPEC)]
    wait_until(lambda: compiler.runs == 1)
    compiler.release()
    keys = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert (len(keys), compiler.runs) == (1, 1)


def test_kill_9_in_the_middle_of_a_build_leaves_no_entry(compiler: FakeCompiler) -> None:
    compiler.hold()
    process = start(SPEC)
    building = compiler.cache / "building"
    wait_until(lambda: compiler.runs == 1 and any(building.glob("*/kernel.cubin")))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert KernelCache(compiler.cache).keys() == []
    compiler.release()
    entry = build(render(SPEC))
    assert entry.cubin.startswith(b"cubin of")
    assert not list(building.iterdir())


def test_a_damaged_entry_is_rebuilt(compiler: FakeCompiler) -> None:
    entry = build(render(SPEC))
    (entry.path / "kernel.cubin").write_bytes(b"garbage")
    assert build(render(SPEC)).cubin == entry.cubin
    assert compiler.runs == 2


def test_several_kernels_build_at_a_time_each_once(compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEXA_FX_BUILD_JOBS", "5")
    compiler.hold()
    with ThreadPoolExecutor(1) as pool:
        entries_later = pool.submit(prebuild, [*SPECS, SPECS[0]])
        wait_until(lambda: compiler.runs == 5)
        compiler.release()
        entries = entries_later.result(timeout=120)
    compiler_used = find_compiler(JitSettings.from_env())
    assert [entry.key for entry in entries] == [build_key(render(spec), compiler_used) for spec in SPECS]
    assert compiler.runs == len(SPECS)


def test_a_compile_error_shows_the_end_of_the_log_and_where_the_source_is(compiler: FakeCompiler) -> None:
    compiler.breaks()
    with pytest.raises(BuildError) as raised:
        build(render(SPEC))
    message = str(raised.value)
    assert message.rstrip().endswith("this is the reason")
    assert len(message) < 6000
    source = next(line.removeprefix("source: ") for line in message.splitlines() if line.startswith("source: "))
    assert "hexa_kernel" in Path(source).read_text()
    assert "-DNDEBUG" in message
    assert KernelCache(compiler.cache).keys() == []


def test_disabled_builds_nothing_but_reads_the_cache(compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    build(render(SPEC))
    monkeypatch.setenv("HEXA_FX_DISABLE_JIT", "1")
    assert build(render(SPEC)).cubin
    with pytest.raises(ToolchainError, match="HEXA_FX_DISABLE_JIT is set"):
        build(render(SPECS[0]))
    assert compiler.runs == 1


def test_another_compiler_version_is_another_entry(compiler: FakeCompiler) -> None:
    build(render(SPEC))
    script = compiler.folder / "nvcc"
    script.write_text(script.read_text().replace("V13.0.88", "V13.1.2"))
    find_compiler.cache_clear()
    build(render(SPEC))
    assert (compiler.runs, len(KernelCache(compiler.cache).keys())) == (2, 2)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_the_real_compiler_builds_a_cubin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEXA_FX_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HEXA_FX_VERBOSE_BUILD", "1")
    entry = build(render(SPEC))
    assert entry.cubin.startswith(b"\x7fELF")
    assert b"hexa_kernel" in entry.cubin
    assert "0 bytes spill" in (entry.path / "meta.json").read_text()


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_the_real_compiler_builds_a_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEXA_FX_CACHE_DIR", str(tmp_path))
    spec = KernelSpec("gemm_sm80", "esmm", 80, bm=64, bn=64, bk=32, stages=3).with_options(warps_m=2, warps_n=2)
    assert build(render(spec)).cubin.startswith(b"\x7fELF")
