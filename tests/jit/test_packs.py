"""Kernel packs: found without a compiler, checked, and ignored with a sentence where they are another version's."""

import json
import logging
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hexa_fx.cli import app, model_layers
from hexa_fx.cli.model_layers import MODELS, pack_kernels
from hexa_fx.codegen import render
from hexa_fx.jit import JitSettings, ToolchainError, build, builder, packs, prebuild
from hexa_fx.jit.wheel import write_wheel
from tests.jit.conftest import FakeCompiler
from tests.jit.test_build import SPEC, SPECS


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    for cached in (packs.found_packs, packs._say_once):
        cached.cache_clear()
    yield
    for cached in (packs.found_packs, packs._say_once):
        cached.cache_clear()


@pytest.fixture
def pack(compiler: FakeCompiler, tmp_path: Path) -> packs.Pack:
    sources = [render(spec) for spec in SPECS]
    return packs.write(
        tmp_path / "out" / packs.module_name(80), 80, "nvcc", list(zip(sources, prebuild(SPECS), strict=True))
    )


@pytest.fixture
def bare(pack: packs.Pack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with the pack, an empty cache and no compiler."""
    monkeypatch.setenv("HEXA_FX_NVCC", "/nonexistent")
    monkeypatch.setenv("HEXA_FX_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("HEXA_FX_KERNEL_PACK", str(pack.path))


@pytest.mark.usefixtures("bare")
def test_a_pack_needs_neither_compiler_nor_cache(pack: packs.Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    builder().request(SPECS)
    assert all(builder().ready(spec) for spec in SPECS)
    assert build(render(SPEC, "a node")).cubin.startswith(b"cubin of")
    monkeypatch.setenv("HEXA_FX_DISABLE_JIT", "1")
    assert build(render(SPEC)).cubin
    with pytest.raises(ToolchainError, match="kernel pack"):
        build(render(SPEC.with_options(id="short")))
    assert not (JitSettings.from_env().cache_dir).exists()


@pytest.mark.usefixtures("bare")
def test_the_folder_that_holds_packs_will_do(pack: packs.Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEXA_FX_KERNEL_PACK", str(pack.path.parent))
    assert build(render(SPEC)).cubin


@pytest.mark.usefixtures("bare")
def test_a_pack_serves_its_own_architecture_only(pack: packs.Pack, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ToolchainError):
        build(render(replace(SPEC, arch=90)))
    (said,) = caplog.messages
    assert said.endswith(
        "for compute capability 8.0, not 9.0: make one with `hexa-fx kernels pack --arch 90 --out FOLDER`"
    )


def changed(pack: packs.Pack, **values: object) -> None:
    manifest = pack.path / packs.MANIFEST
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **values}))


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(("name", "value"), [("hexa_fx", "0.0.1"), ("sources", "of other kernels"), ("sources", None)])
def test_a_stale_pack_is_ignored_with_one_sentence(
    pack: packs.Pack, name: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    changed(pack, **{name: value})
    with caplog.at_level(logging.WARNING):
        for spec in SPECS:
            with pytest.raises(ToolchainError):
                build(render(spec))
    assert len(caplog.messages) == 1
    assert "is ignored" in caplog.messages[0]
    assert "hexa-fx kernels pack --arch 80" in caplog.messages[0]


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("value", [None, [], {"key": 1}])
def test_a_pack_that_cannot_be_read_is_ignored(
    pack: packs.Pack, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    changed(pack, kernels=value)
    with pytest.raises(ToolchainError):
        build(render(SPEC))
    assert ["cannot be read" in message for message in caplog.messages] == [True]


@pytest.mark.usefixtures("bare")
def test_a_damaged_kernel_is_as_good_as_none(pack: packs.Pack, caplog: pytest.LogCaptureFixture) -> None:
    (pack.path / f"{render(SPEC).key}.cubin").write_bytes(b"garbage")
    with pytest.raises(ToolchainError):
        build(render(SPEC))
    assert build(render(SPECS[0])).cubin
    assert ["damaged" in message for message in caplog.messages] == [True]


def test_a_variable_that_names_no_pack_is_said(
    compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HEXA_FX_KERNEL_PACK", str(tmp_path / "nowhere"))
    assert build(render(SPEC)).cubin
    assert build(render(SPECS[0])).cubin
    assert ["there is no kernel pack" in message for message in caplog.messages] == [True]


def test_a_changed_header_is_another_pack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "include").mkdir()
    header = tmp_path / "include" / "a.cuh"
    monkeypatch.setattr(packs, "TEMPLATE_DIR", tmp_path)
    hashes = []
    for text in ("one", "two", "one"):
        header.write_text(text)
        packs._identity.cache_clear()
        hashes.append(packs._identity()["sources"])
    packs._identity.cache_clear()
    assert hashes[0] == hashes[2] != hashes[1]


def test_the_wheel_is_installed_by_pip_and_found(pack: packs.Pack, tmp_path: Path) -> None:
    wheel = write_wheel(pack.path, tmp_path, "1.2", "Kernels")
    again = write_wheel(pack.path, tmp_path / "out", "1.2", "Kernels")
    assert wheel.read_bytes() == again.read_bytes()
    assert wheel.name == "hexa_fx_kernels_sm80-1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        assert "hexa_fx_kernels_sm80/pack.json" in archive.namelist()
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(target)]
    subprocess.run([*install, str(wheel)], check=True)
    script = (
        "from tests.jit.test_build import SPEC\nfrom hexa_fx.codegen import render\nfrom hexa_fx.jit import build\n"
        "print(build(render(SPEC)).path)"
    )
    path = os.pathsep.join([str(target), *(p for p in sys.path if p)])
    environment = {**os.environ, "PYTHONPATH": path, "HEXA_FX_NVCC": "/nonexistent"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(target / "hexa_fx_kernels_sm80")


@pytest.mark.usefixtures("compiler")
def test_the_command_writes_the_folder_and_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_layers, "pack_kernels", lambda arch, dtypes: tuple(SPECS))
    out = tmp_path / "dist"
    done = CliRunner().invoke(app, ["kernels", "pack", "--arch", "80", "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["kernels"] == len(SPECS)
    assert Path(told["wheel"]).stat().st_size == told["bytes"]
    assert [pack.path for pack in packs.found_packs(str(out), 80)] == [Path(told["path"])]
    refused = CliRunner().invoke(app, ["kernels", "pack", "--arch", "80", "--out", str(out), "--dtype", "bf16,i8"])
    assert refused.exit_code == 2
    refused = CliRunner().invoke(app, ["kernels", "pack", "--arch", "80", "--out", told["wheel"]])
    assert "nothing can be written to" in refused.output


@pytest.mark.parametrize("arch", [80, 90])
def test_a_pack_holds_each_kernel_once_and_all_can_be_generated(arch: int) -> None:
    specs = pack_kernels(arch, [torch.bfloat16])
    assert len(MODELS) == 10
    assert len(set(specs)) == len(specs) <= (200 if arch == 90 else 120)
    page = (Path(__file__).parents[2] / "docs" / "codegen.md").read_text(encoding="utf-8")
    assert re.search(rf"\| {arch}[^|]*\| bf16[^|]*\| {len(specs)} \|", page)
    assert all(render(spec).target.startswith(f"sm_{arch}") for spec in specs)
