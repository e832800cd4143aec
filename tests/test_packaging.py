"""What pyproject lists is what the tree holds."""

from __future__ import annotations

import tomllib
from pathlib import Path

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
    """300 lines is the aim; a module far beyond has more than one purpose."""
    long = [
        f"{path.relative_to(ROOT)}: {count}"
        for folder in ("hexa_fx", "passes")
        for path in ROOT.glob(f"{folder}/**/*.py")
        if not path.is_symlink() and (count := len(path.read_text().splitlines())) > 340
    ]
    assert not long
