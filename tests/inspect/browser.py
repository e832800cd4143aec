"""A headless Chromium for tests."""

import json
import re
import shutil
import subprocess
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
    """What a script on the page returns, e.g. ``return boxes("left").length``. In a frame: Chromium's least window is 500 wide."""
    copy, around = profile / "evaluated.html", profile / "around.html"
    call = f"parent.postMessage(JSON.stringify((() => {{ {script} }})()), '*');"
    copy.write_text(f"{page.read_text(encoding='utf-8')}<script>{call}</script>", encoding="utf-8")
    style = f"border:0;width:{size[0]}px;height:{size[1]}px"
    told = "onmessage = event => document.body.dataset.result = event.data"
    around.write_text(
        f'<body><script>{told}</script><iframe style="{style}" src="evaluated.html#{place}"></iframe></body>'
    )
    text = _run(around.as_uri(), profile, "--virtual-time-budget=3000", "--dump-dom")
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
