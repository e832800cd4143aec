"""``hexa-fx env``"""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import typer

import hexa_fx
from hexa_fx.cli.common import Json, echo_json, errors_shown

_PACKAGES = ("hexa-fx", "torch", "nvidia-cutlass", "transformers", "networkx", "jinja2", "rich")


@errors_shown
def env(as_json: Json = False) -> None:
    """Versions, devices, compiler and settings, for bug reports."""
    found = _found()
    if as_json:
        echo_json(found)
        return
    typer.echo(f"python {found['python']} on {found['system']}, {found['cores']} cores")
    for package, number in found["packages"].items():
        typer.echo(f"{package} {number}")
    typer.echo(f"CUDA {found['cuda'] or 'none'}, devices: {', '.join(found['devices']) or 'none'}")
    typer.echo(f"compiler: {found['compiler']}")
    typer.echo(f"kernel cache: {found['cache']}")
    typer.echo(f"kernel packs: {', '.join(found['packs']) or 'none'}")
    for name, value in found["settings"].items():
        typer.echo(f"{name}={value}")


def _found() -> dict[str, Any]:
    import torch

    from hexa_fx.jit import JitSettings
    from hexa_fx.jit.packs import found_packs

    settings = JitSettings.from_env()
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "packages": {package: _version(package) for package in _PACKAGES},
        "cuda": torch.version.cuda,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "compiler": _compiler(settings),
        "cache": str(settings.cache_dir),
        "packs": [str(pack.path) for arch in (80, 86, 89, 90) for pack in found_packs(settings.kernel_pack, arch)],
        "settings": {name: value for name, value in sorted(os.environ.items()) if name.startswith("HEXA_FX_")},
    }


def _compiler(settings: Any) -> str:
    from hexa_fx.jit import ToolchainError, find_compiler

    try:
        return find_compiler(settings).identity
    except ToolchainError as error:
        return str(error)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return f"{hexa_fx.__version__}, not installed" if package == "hexa-fx" else "not installed"
