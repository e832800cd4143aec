"""Kernel packs: folders of cubins that are found without a compiler, made by ``hexa-fx kernels pack``.

The cache's key holds the compiler's version, which a machine without a compiler cannot know. A kernel's key in a pack is that of
its source: the text, the headers of ours that it includes, the target. The version, a hash of all sources and the convention for
arguments are written once for the whole pack; a pack in which they differ is ignored.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hexa_fx.codegen.render import FLAGS, KernelSource, package_version
from hexa_fx.jit.cache import FORMAT, BuiltKernel
from hexa_fx.jit.env import JitSettings
from hexa_fx.templates import TEMPLATE_DIR

log = logging.getLogger(__name__)

MANIFEST = "pack.json"


def module_name(arch: int) -> str:
    """The package that a pack's wheel installs, e.g. ``hexa_fx_kernels_sm90``."""
    return f"hexa_fx_kernels_sm{arch}"


@dataclass(frozen=True)
class Pack:
    """A folder of cubins that this version can use.

    Args:
        path: the folder.
        arch: compute capability.
        compiler: what built it.
        checksums: SHA-256 of the cubin of each source, by the source's key.
    """

    path: Path
    arch: int
    compiler: str
    checksums: Mapping[str, str]

    def get(self, key: str) -> BuiltKernel | None:
        """The cubin of the source with this key; None if the pack has none, or a damaged one."""
        if key not in self.checksums:
            return None
        try:
            cubin = (self.path / f"{key}.cubin").read_bytes()
        except OSError:
            cubin = b""
        if hashlib.sha256(cubin).hexdigest() != self.checksums[key]:
            _say_once(f"kernel {key} of the pack {self.path} is damaged: install the pack anew")
            return None
        return BuiltKernel(key, self.path, cubin)


def find(source: KernelSource, settings: JitSettings) -> BuiltKernel | None:
    """The cubin of `source` in the packs that HEXA_FX_KERNEL_PACK names or that are installed."""
    packs = found_packs(settings.kernel_pack, source.spec.arch)
    return next(filter(None, (pack.get(source.key) for pack in packs)), None)


@cache
def found_packs(folder: str, arch: int) -> tuple[Pack, ...]:
    """The packs of an architecture that can be used. Every other one is logged once, with the reason.

    Args:
        folder: value of HEXA_FX_KERNEL_PACK; what `kernels pack` wrote to, or a pack in it.
        arch: compute capability.
    """
    packs = list(filter(None, map(_read, dict.fromkeys(_folders(folder, arch)))))
    fitting = tuple(pack for pack in packs if pack.arch == arch)
    if folder and packs and not fitting:
        others = ", ".join(sorted({f"{pack.arch / 10}" for pack in packs}))
        _say_once(
            f"HEXA_FX_KERNEL_PACK is {folder}, whose kernels are for compute capability {others}, not {arch / 10}: "
            f"{_make(arch)}"
        )
    return fitting


def write(folder: Path, arch: int, compiler: str, kernels: Iterable[tuple[KernelSource, BuiltKernel]]) -> Pack:
    """Makes a pack of built kernels, in place of what is in the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rows: dict[str, dict[str, str]] = {}
    for source, entry in kernels:
        (folder / f"{source.key}.cubin").write_bytes(entry.cubin)
        rows[source.key] = {"sha256": hashlib.sha256(entry.cubin).hexdigest(), "spec": source.spec.to_json()}
    manifest = {**_identity(), "arch": arch, "compiler": compiler, "kernels": rows}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))
    return Pack(folder, arch, compiler, {key: row["sha256"] for key, row in rows.items()})


def _folders(folder: str, arch: int) -> Iterator[Path]:
    if folder:
        root = Path(folder).expanduser()
        named = [root] if (root / MANIFEST).is_file() else sorted(path.parent for path in root.glob(f"*/{MANIFEST}"))
        if not named:
            _say_once(
                f"HEXA_FX_KERNEL_PACK is {folder}, where there is no kernel pack: set it to the folder of a {MANIFEST}"
            )
        yield from named
    spec = importlib.util.find_spec(module_name(arch))
    yield from map(Path, (spec.submodule_search_locations if spec else None) or ())


def _read(folder: Path) -> Pack | None:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        checksums = {str(key): str(row["sha256"]) for key, row in manifest["kernels"].items()}
        pack = Pack(folder, int(manifest["arch"]), str(manifest["compiler"]), checksums)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _say_once(
            f"the kernel pack {folder} is ignored, since it cannot be read ({type(error).__name__}): install it anew"
        )
        return None
    made_for = {name: manifest.get(name) for name in _identity()}
    if made_for != _identity():
        _say_once(
            f"the kernel pack {folder} is ignored, since hexa_fx {made_for['hexa_fx']} made it for kernels that are not those of "
            f"this hexa_fx {package_version()}: {_make(pack.arch)}, or remove it"
        )
        return None
    return pack


def _make(arch: int) -> str:
    return f"make one with `hexa-fx kernels pack --arch {arch} --out FOLDER`"


@cache
def _identity() -> dict[str, str]:
    """Version, and hash of every template and header, of the compiler's flags, and of the convention for arguments."""
    digest = hashlib.sha256("\0".join((FORMAT, *FLAGS)).encode())
    for path in sorted(path for path in TEMPLATE_DIR.rglob("*") if path.suffix in (".j2", ".cuh")):
        digest.update(f"\0{path.relative_to(TEMPLATE_DIR).as_posix()}\0".encode() + path.read_bytes())
    return {"hexa_fx": package_version(), "sources": digest.hexdigest()}


@cache
def _say_once(sentence: str) -> None:
    if not os.environ.get("LOCAL_RANK", "0").strip("0"):  # once a machine
        log.warning(sentence)
