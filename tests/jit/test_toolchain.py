"""Finding a compiler, and the sentence when there is none."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hexa_fx.errors import InputError
from hexa_fx.jit import JitSettings, ToolchainError, find_compiler, toolchain
from hexa_fx.jit.env import VARIABLES
from tests.jit.conftest import FakeCompiler


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    find_compiler.cache_clear()
    yield
    find_compiler.cache_clear()


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without any CUDA: no PATH, no CUDA_HOME, no wheels."""
    for name in (*VARIABLES, "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(toolchain, "_in_cuda_home", lambda pattern: iter(()))
    monkeypatch.setattr(toolchain, "_in_wheels", lambda *patterns: iter(()))
    (tmp_path / "bin").mkdir()
    gxx = tmp_path / "bin" / "g++"
    gxx.write_text("#!/bin/sh\n")
    gxx.chmod(0o755)
    return tmp_path


def install(path: Path, version: str = "13.0.88") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V{version}'\n")
    path.chmod(0o755)
    return path


def find() -> toolchain.Compiler:
    return find_compiler(JitSettings.from_env())


def test_no_compiler_is_one_sentence_with_every_reason_and_what_to_do(bare: Path) -> None:
    with pytest.raises(ToolchainError) as raised:
        find()
    message = str(raised.value)
    assert message.count("\n") == 0
    for part in ("not on PATH", "nvidia-cuda-nvcc", "libnvrtc", "pip install '.[cuda]'", "HEXA_FX_NVCC"):
        assert part in message


def test_nvcc_on_the_path(bare: Path) -> None:
    install(bare / "bin" / "nvcc", "12.9.41")
    found = find()
    assert (found.kind, found.version, found.path) == ("nvcc", "12.9.41", bare / "bin" / "nvcc")
    assert (found.includes[0] / "cute" / "tensor.hpp").is_file()
    assert re.fullmatch(r"nvcc 12.9.41 cutlass \d+\.\d+\.\d+", found.identity)


def test_cuda_home_when_the_path_has_none(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(bare / "cuda"))
    assert find_path(install(bare / "cuda" / "bin" / "nvcc"))


def find_path(path: Path) -> bool:
    return find().path == path


def test_the_wheel_last(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = install(bare / "site" / "nvidia" / "cu13" / "bin" / "nvcc")
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(bare / "bin"))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.syspath_prepend(bare / "site")
    monkeypatch.setattr(toolchain, "_in_cuda_home", lambda pattern: iter(()))
    assert find_path(nvcc)


def test_a_named_compiler_beats_all_others(bare: Path, compiler: FakeCompiler) -> None:
    install(bare / "bin" / "nvcc")
    assert find_path(compiler.folder / "nvcc")


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda root: install(root / "bin" / "nvcc", "11.8.89"), "version 11.8.89 is older than 12.3"),
        (lambda root: (install(root / "bin" / "nvcc"), (root / "bin" / "g++").unlink()), "needs a host compiler"),
        (lambda root: install(root / "bin" / "nvcc").write_text("#!/bin/sh\necho no\n"), "--version says 'no'"),
    ],
)
def test_an_unusable_nvcc_is_refused_with_the_reason(bare: Path, prepare: object, reason: str) -> None:
    prepare(bare)  # type: ignore[operator]
    with pytest.raises(ToolchainError, match=re.escape(reason)):
        find()


def test_missing_cutlass_headers_are_named(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(bare / "bin" / "nvcc")
    monkeypatch.setenv("HEXA_FX_CUTLASS_INCLUDE", str(bare))
    with pytest.raises(ToolchainError, match=r"no CUTLASS headers in .*HEXA_FX_CUTLASS_INCLUDE"):
        find()
    with pytest.raises(ToolchainError, match="no CUTLASS headers"):
        toolchain.cutlass_include(JitSettings.from_env())


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("HEXA_FX_COMPILER", "gcc", "expected auto, nvcc or nvrtc"),
        ("HEXA_FX_CUDA_ARCH", "hopper", "expected a whole number"),
        ("HEXA_FX_BUILD_JOBS", "-1", "expected a whole number"),
    ],
)
def test_a_bad_value_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, expected: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=f"{name} is {value!r}; {expected}"):
        JitSettings.from_env()


def test_settings_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEXA_FX_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HEXA_FX_CUDA_ARCH", "sm_86")
    monkeypatch.setenv("HEXA_FX_DISABLE_JIT", "yes")
    monkeypatch.setenv("HEXA_FX_KEEP", "0")
    settings = JitSettings.from_env()
    assert (settings.cache_dir, settings.cuda_arch, settings.disable_jit, settings.keep) == (tmp_path, 86, True, False)


def test_the_table_for_users_is_complete() -> None:
    page = Path(__file__).parents[2] / "docs" / "environment.md"
    rows = dict(re.findall(r"(?m)^\| `(HEXA_FX_\w+)` \| (.*) \|$", page.read_text()))
    for name, meaning in VARIABLES.items():
        assert rows[name] == meaning
