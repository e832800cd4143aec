"""A headless Chromium for tests, and just enough of PNG to look at its pictures."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import zlib
from html import unescape
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --disable-dev-shm-usage"
).split()


def find() -> str | None:
    """A Chromium on this machine."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


def dom(page: Path, place: str, profile: Path) -> str:
    """The page's elements after its scripts ran, opened at ``#place``."""
    return _run(f"{page.as_uri()}#{place}", profile, "--virtual-time-budget=3000", "--dump-dom")


def evaluate(page: Path, script: str, profile: Path, size: tuple[int, int] = (1440, 900), place: str = "") -> Any:
    """What a script on the page returns, e.g. ``return boxes("left").length``."""
    copy = profile / "evaluated.html"
    call = f"document.body.dataset.result = JSON.stringify((() => {{ {script} }})());"
    copy.write_text(f"{page.read_text(encoding='utf-8')}<script>{call}</script>", encoding="utf-8")
    flags = ("--virtual-time-budget=3000", f"--window-size={size[0]},{size[1]}", "--dump-dom")
    text = _run(f"{copy.as_uri()}#{place}", profile, *flags)
    (found,) = re.findall(r'data-result="([^"]*)"', text)
    return json.loads(unescape(found))


def screenshot(page: Path, place: str, profile: Path, size: tuple[int, int] = (1500, 1050)) -> Path:
    """The page as a picture."""
    target = profile / "page.png"
    width, height = size
    _run(f"{page.as_uri()}#{place}", profile, f"--window-size={width},{height}", f"--screenshot={target}")
    return target


def _run(url: str, profile: Path, *flags: str) -> str:
    program = find()
    assert program is not None
    command = [program, *FLAGS, f"--user-data-dir={profile}", *flags, url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def pixels(png: Path) -> tuple[int, int, list[bytes]]:
    """Width, height and rows of an 8-bit RGB or RGBA picture; every pixel as it is stored."""
    data = png.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, packed, header = 8, b"", (0, 0, 0, 0)
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            header = struct.unpack(">IIBB", body[:10])
        elif kind == b"IDAT":
            packed += body
        at += 12 + length
    width, height, depth, colour = header
    assert (depth, colour in (2, 6)) == (8, True)
    return (
        width,
        height,
        _unfiltered(zlib.decompress(packed), width * (3 if colour == 2 else 4), height, 3 if colour == 2 else 4),
    )


def _unfiltered(raw: bytes, line: int, height: int, step: int) -> list[bytes]:
    rows, before = [], bytearray(line)
    for number in range(height):
        start = number * (line + 1)
        kind, row = raw[start], bytearray(raw[start + 1 : start + 1 + line])
        for i in range(line) if kind else ():
            left, up = row[i - step] if i >= step else 0, before[i]
            corner = before[i - step] if i >= step else 0
            row[i] = (row[i] + (left, up, (left + up) // 2, _paeth(left, up, corner))[kind - 1]) & 255
        rows.append(bytes(row))
        before = row
    return rows


def _paeth(a: int, b: int, c: int) -> int:
    p = a + b - c
    return min((a, b, c), key=lambda value: abs(p - value))
