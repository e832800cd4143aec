"""The progress bar of everything that takes long: analysing many blocks, building kernels, measuring tiles.

Rank 0 draws it on standard error if that is a terminal; ``HEXA_FX_PROGRESS=0`` switches it off. It is rich's, or a plain line
where rich is missing.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TextIO

Advance = Callable[..., None]
"""Called whenever an item is finished, without an argument or with what comes next."""

_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")
_WIDTH = 30


def may_draw(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is rank 0 of its job and bars are not switched off."""
    off = environment.get("HEXA_FX_PROGRESS", "").lower() in ("0", "false", "no", "off")
    return not off and all(environment.get(name, "0") in ("", "0") for name in _RANKS)


@contextmanager
def progress(what: str, total: int, stream: TextIO | None = None) -> Iterator[Advance]:
    """A context that draws a bar for ``total`` items and yields a thread-safe function that advances it by one.

    >>> with progress("building kernels", len(sources)) as advance:   # doctest: +SKIP
    ...     for source in sources:
    ...         build(source)
    ...         advance()
    """
    stream = stream or sys.stderr
    if total < 2 or not may_draw() or not stream.isatty():
        yield lambda doing="": None
        return
    try:
        import rich.progress  # noqa: F401
    except ImportError:
        with _plain(what, total, stream) as advance:
            yield advance
        return
    with _rich(what, total, stream) as advance:
        yield advance


@contextmanager
def _rich(what: str, total: int, stream: TextIO) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[doing]}"), console=Console(file=stream), transient=True) as bar:
        task = bar.add_task(what, total=total, doing="")
        yield lambda doing="": bar.update(task, advance=1, doing=doing)


@contextmanager
def _plain(what: str, total: int, stream: TextIO) -> Iterator[Advance]:
    started, lock, done = time.monotonic(), threading.Lock(), 0

    def draw() -> None:
        filled = _WIDTH * done // total
        seconds = time.monotonic() - started
        stream.write(f"\r{what} {'#' * filled}{'.' * (_WIDTH - filled)} {done}/{total} {seconds:.0f} s")
        stream.flush()

    def advance(doing: str = "") -> None:
        nonlocal done
        with lock:
            done += 1
            draw()

    draw()
    try:
        yield advance
    finally:
        stream.write("\r\033[K")
        stream.flush()
