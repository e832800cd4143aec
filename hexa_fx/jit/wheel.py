"""Writes a folder of data files as a wheel that pip installs: the standard library's zipfile is all that takes."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

_WHEEL = "Wheel-Version: 1.0\nGenerator: hexa-fx\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def write_wheel(folder: Path, out: Path, version: str, summary: str) -> Path:
    """A wheel that installs the files of `folder` as a package of the folder's name.

    Args:
        folder: without subfolders; its name is the package's, e.g. ``hexa_fx_kernels_sm90``.
        out: where the wheel is written.
        version: the distribution's.
        summary: one line.

    Returns:
        The wheel, the same bytes whenever the files are the same.
    """
    info = f"{folder.name}-{version}.dist-info"
    name = folder.name.replace("_", "-")
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: {summary}\n"
    files = {f"{folder.name}/{path.name}": path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
    files |= {
        f"{folder.name}/__init__.py": b"",
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": _WHEEL.encode(),
    }
    rows = [f"{path},sha256={_digest(content)},{len(content)}" for path, content in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    wheel = out / f"{folder.name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in files.items():
            entry = zipfile.ZipInfo(path)  # of 1980: a time would differ every time
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    return wheel


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
