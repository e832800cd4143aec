"""Building in the background: nobody waits, nothing is built twice, and nothing outlives the process."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hexa_fx.codegen import KernelSpec, render
from hexa_fx.codegen.spec import SpecError
from hexa_fx.jit import BuildError, JitSettings, KernelCache, ToolchainError, build, builder, loaded_kernel, prebuild
from tests.jit.conftest import FakeCompiler
from tests.jit.test_build import SPEC, SPECS, wait_until

IMPOSSIBLE = SPEC.with_options(experts=1 << 20)


def run(script: str, own_group: bool = False, **variables: str) -> subprocess.Popen[str]:
    """A process with the fake compiler's environment. own_group: signals to its group reach nobody else."""
    begin = "from tests.jit.test_build import SPEC, SPECS\nfrom hexa_fx.jit import builder, prebuild\nimport os, sys, time\n"
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", begin + script]
    group = 0 if own_group else None
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, process_group=group)


def test_a_request_returns_at_once_and_the_kernel_is_ready_later(compiler: FakeCompiler) -> None:
    compiler.hold()
    own = builder()
    own.request([SPEC, SPEC])
    own.request([SPEC])
    own.check(SPEC)
    assert (own.ready(SPEC), own.left(), own.left([SPEC])) == (None, 1, 1)
    assert not own.wait([SPEC], timeout=0.01)
    compiler.release()
    assert own.wait([SPEC], timeout=120)
    entry = own.ready(SPEC)
    assert entry is not None
    assert entry.cubin == build(render(SPEC)).cubin
    assert (compiler.runs, own.left()) == (1, 0)


def test_what_the_cache_has_is_ready_when_the_request_returns(compiler: FakeCompiler) -> None:
    build(render(SPEC))
    builder().request([SPEC])
    assert builder().ready(SPEC)
    assert compiler.runs == 1


def test_a_kernel_that_was_never_requested_is_not_waited_for(compiler: FakeCompiler) -> None:
    assert builder().wait([SPEC], timeout=10)
    assert (builder().ready(SPEC), loaded_kernel(SPEC)) == (None, None)


def test_no_more_compilers_at_a_time_than_jobs(compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEXA_FX_BUILD_JOBS", "2")
    compiler.hold()
    builder().request(SPECS)
    wait_until(lambda: compiler.runs == 2)
    assert builder().left() == len(SPECS)
    assert not builder().wait(timeout=0.5)
    assert compiler.runs == 2
    compiler.release()
    assert builder().wait(timeout=120)
    assert compiler.runs == len(SPECS)


def test_what_a_call_needs_now_goes_first(compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEXA_FX_BUILD_JOBS", "1")
    compiler.hold()
    own = builder()
    own.request(SPECS[:4])
    own.request([SPECS[3], SPECS[4]], first=True)
    compiler.release()
    assert own.wait(timeout=120)
    assert compiler.runs == 5
    entries = [own.ready(spec) for spec in SPECS[:5]]
    made = [entry.path.stat().st_ctime_ns for entry in entries if entry is not None]
    assert max(made[3:]) < min(made[1:3])


def test_one_failure_is_remembered_and_stops_no_other(compiler: FakeCompiler) -> None:
    compiler.breaks()
    own = builder()
    own.request([SPEC])
    assert own.wait(timeout=120)
    (compiler.folder / "broken").unlink()
    own.request([SPEC, IMPOSSIBLE, SPECS[0]])
    assert own.wait(timeout=120)
    with pytest.raises(BuildError):
        own.check(SPEC)
    with pytest.raises(SpecError):
        own.check(IMPOSSIBLE)
    own.check(SPECS[0])
    assert own.ready(SPECS[0])
    assert compiler.runs == 2
    with pytest.raises(BuildError, match="this is the reason"):
        loaded_kernel(SPEC)
    with pytest.raises(SpecError):
        prebuild([SPECS[0], IMPOSSIBLE])
    assert not list((compiler.cache / "building").iterdir())


def test_without_a_compiler_every_request_fails_with_the_sentence(
    compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEXA_FX_NVCC", "/nonexistent")
    builder().request([SPEC])
    with pytest.raises(ToolchainError):
        builder().check(SPEC)


def test_disabled_builds_nothing_in_the_background(compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    build(render(SPEC))
    monkeypatch.setenv("HEXA_FX_DISABLE_JIT", "1")
    builder().request(SPECS)
    assert builder().wait(timeout=10)
    assert builder().ready(SPEC)
    with pytest.raises(ToolchainError, match="HEXA_FX_DISABLE_JIT is set"):
        builder().check(SPECS[0])
    assert compiler.runs == 1


def test_a_cache_that_cannot_be_written_is_a_failure(compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEXA_FX_CACHE_DIR", "/proc/nowhere")
    builder().request([SPEC])
    assert builder().wait(timeout=10)
    with pytest.raises(OSError):
        builder().check(SPEC)


def test_ranks_share_the_work_and_build_each_kernel_once(compiler: FakeCompiler) -> None:
    """Four of them, which are forked once torch is imported, since that takes longer than all the rest."""
    compiler.hold()
    script = (
        "ranks = []\n"
        "while len(ranks) < 4:\n"
        "    ranks.append(os.fork())\n"
        "    if not ranks[-1]:\n"
        "        os._exit(len(prebuild(SPECS)))\n"
        "print(*[os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks])"
    )
    process = run(script, HEXA_FX_BUILD_JOBS="1")
    wait_until(lambda: compiler.runs == 4)
    compiler.release()
    assert process.communicate(timeout=120)[0].split() == [str(len(SPECS))] * 4
    assert compiler.runs == len(SPECS)


def test_a_kernel_that_another_process_builds_takes_no_slot(
    compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEXA_FX_BUILD_JOBS", "1")
    compiler.hold()
    other = run("prebuild([SPEC])")
    try:
        wait_until(lambda: compiler.runs == 1)
        compiler.hold_no_more()
        builder().request([SPEC, SPECS[0]])
        assert builder().wait([SPECS[0]], timeout=120)
        assert builder().ready(SPEC) is None
    finally:
        other.kill()
        other.communicate()
    assert builder().wait([SPEC], timeout=120), "its builder died, so it is built here"
    assert builder().ready(SPEC)


def test_the_end_of_the_interpreter_kills_compilers_and_leaves_no_half_entry(compiler: FakeCompiler) -> None:
    compiler.hold()
    script = f"builder().request(SPECS)\nwhile not os.path.exists({str(compiler.folder / 'runs')!r}): time.sleep(0.01)"
    process = run(script, HEXA_FX_BUILD_JOBS="2")
    process.communicate(timeout=120)
    assert process.returncode == 0
    wait_until(lambda: not compiler.alive)
    assert KernelCache(compiler.cache).keys() == []
    assert not list((compiler.cache / "building").iterdir())


def test_an_interrupt_from_the_keyboard_does_not_reach_the_compilers(compiler: FakeCompiler) -> None:
    compiler.hold()
    script = """
builder().request([SPEC])
try:
    print("waiting", flush=True)
    builder().wait()
except KeyboardInterrupt:
    pass
builder().wait()
print(builder().ready(SPEC) is not None)
"""
    process = run(script, own_group=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    wait_until(lambda: compiler.runs == 1)
    os.killpg(process.pid, signal.SIGINT)
    compiler.release()
    assert process.communicate(timeout=120)[0].strip() == "True"
    assert compiler.runs == 1


def test_a_forked_worker_neither_hangs_nor_ends_the_parents_compilers(compiler: FakeCompiler) -> None:
    compiler.hold()
    script = """
builder().request([SPEC])
while not os.path.exists(os.environ["RUNS"]): time.sleep(0.01)
child = os.fork()
if child == 0:
    assert builder().ready(SPEC) is None
    os.remove(os.environ["HELD"])
    if os.fork() == 0:
        sys.exit(0)
    os.wait()
    prebuild([SPEC])
    sys.exit(7 if builder().ready(SPEC) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), builder().wait([SPEC], 30), builder().check(SPEC))
"""
    process = run(script, RUNS=str(compiler.folder / "runs"), HELD=str(compiler.held))
    assert process.communicate(timeout=120)[0].strip() == "7 True None"
    assert compiler.runs == 1


@pytest.mark.parametrize(
    ("variables", "jobs"),
    [
        ({}, len(os.sched_getaffinity(0))),
        ({"LOCAL_WORLD_SIZE": "1000"}, 1),
        ({"MAX_JOBS": "3", "LOCAL_WORLD_SIZE": "8"}, 3),
        ({"MAX_JOBS": "3", "HEXA_FX_BUILD_JOBS": "5"}, 5),
    ],
)
def test_how_many_build_at_a_time(variables: dict[str, str], jobs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_JOBS", "HEXA_FX_BUILD_JOBS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert JitSettings.from_env().build_jobs == jobs


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_the_real_compiler_and_what_it_starts_are_killed(tmp_path: Path) -> None:
    spec = KernelSpec("gemm_sm80", "esmm", 80, bm=64, bn=64, bk=32, stages=3).with_options(warps_m=2, warps_n=2)
    script = f"""
from hexa_fx.codegen import KernelSpec
builder().request([KernelSpec.from_json({spec.to_json()!r})])
while not any((os.path.isdir(os.environ["HEXA_FX_CACHE_DIR"] + "/building"),)): time.sleep(0.01)
time.sleep(1.5)
"""
    process = run(script, HEXA_FX_CACHE_DIR=str(tmp_path))
    process.communicate(timeout=120)
    assert process.returncode == 0
    assert not list((tmp_path / "building").iterdir())
    done = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False)
    assert not done.stdout.strip()
