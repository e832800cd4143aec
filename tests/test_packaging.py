"""What pyproject lists is what the tree holds."""

import os
import shutil
import site
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

import hexa_fx
import hexa_fx.passes
import hexa_fx.templates

ROOT = Path(__file__).parent.parent


def test_every_package_is_listed() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {"hexa_fx." + ".".join(p.parent.relative_to(ROOT).parts) for p in ROOT.glob("passes/**/__init__.py")}
    found |= {"hexa_fx." + ".".join(p.parent.relative_to(ROOT).parts) for p in ROOT.glob("templates/**/__init__.py")}
    inside = (
        p for p in ROOT.glob("hexa_fx/**/__init__.py") if not {"passes", "templates"} & set(p.relative_to(ROOT).parts)
    )
    found |= {".".join(p.parent.relative_to(ROOT).parts) for p in inside}
    assert listed == found


def test_mapped_packages_import_under_one_name() -> None:
    assert hexa_fx.passes.__name__ == "hexa_fx.passes"
    assert hexa_fx.templates.__name__ == "hexa_fx.templates"


def test_modules_stay_readable() -> None:
    """As CONTRIBUTING.md says: a longer module has more than one purpose."""
    long = [
        f"{path.relative_to(ROOT)}: {count}"
        for folder in ("hexa_fx", "passes")
        for path in ROOT.glob(f"{folder}/**/*.py")
        if not path.is_symlink() and (count := len(path.read_text().splitlines())) > 600
    ]
    assert not long


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with nothing but the built wheel, and the packages that it needs from this one."""
    pytest.importorskip("build", reason="pip install '.[dev]'")
    folder = tmp_path_factory.mktemp("packaging")
    tree = shutil.copytree(ROOT, folder / "tree", symlinks=True, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", tree)  # the wheel from the sdist
    (wheel,) = (folder / "dist").glob("*.whl")
    assert len(list((folder / "dist").glob("*.tar.gz"))) == 1
    venv.create(folder / "empty", symlinks=True)
    python = folder / "empty" / "bin" / "python"
    (packages,) = (folder / "empty").glob("lib/*/site-packages")
    (packages / "needed.pth").write_text("\n".join(site.getsitepackages()))  # their own .pth files are not read
    _run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    return python


_LEFT_OUT = (".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", "results", "tests", "docs")

_PROGRAM = """
import torch, hexa_fx
from hexa_fx.demo import example

print(hexa_fx.__file__)
model, inputs = example()
optimized = hexa_fx.optimize(model, inputs)
torch.testing.assert_close(optimized(**inputs).logits, model(**inputs).logits)
optimized.report.to_html("report.html")
optimized.graphs.to_html("graphs.html", 90)
print([kernel.operator for kernel in optimized.graphs.kernels(80) if kernel.source])
"""


def test_wheel_and_sdist_install_and_run(installed: Path, tmp_path: Path) -> None:
    """Templates, tables and pages are in it, kernels generate, and the command is there."""
    said = _run(installed, "-c", _PROGRAM, cwd=tmp_path)
    assert said.splitlines()[0].startswith(str(installed.parent.parent))
    assert "'hexa.esmm_act'" in said
    assert (tmp_path / "graphs.html").stat().st_size > 50_000
    assert (tmp_path / "report.html").stat().st_size > 5_000
    assert hexa_fx.__version__ in _run(installed.parent / "hexa-fx", "--version", cwd=tmp_path)


def _run(*command: object, cwd: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
