"""The progress bar of everything that takes long: analysing blocks, building kernels, measuring tiles.

Rank 0 draws it on standard error if that is a terminal or a notebook, once two seconds have passed; ``HEXA_FX_PROGRESS=0``
switches it off. It is rich's on a terminal, a plain line in notebooks. Elsewhere, in a file or a job's
log, the same is logged at INFO now and then. A thread draws it, so that time goes on while one step takes long.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")
_WIDTH, _LONGEST = 30, 160
_PATIENCE = 2.0
"""Seconds before anything is drawn."""
_INTERVAL = 0.2
_LOGGED = 15.0
"""Seconds from one line in a log to the next."""

log = logging.getLogger(__name__)

_remarks: list[Callable[[], str]] = []


def remark(text: Callable[[], str]) -> Callable[[], str]:
    """Decorates a function whose text every bar shows at its end, where it is not empty. It is called from the drawing thread."""
    _remarks.append(text)
    return text


def may_draw() -> bool:
    """Whether this process is rank 0 of its job and bars are not switched off."""
    off = os.environ.get("HEXA_FX_PROGRESS", "").lower() in ("0", "false", "no", "off")
    return not off and all(os.environ.get(name, "0") in ("", "0") for name in _RANKS)


class Bar:
    """What is done so far. Its methods may be called from any thread, and cost nothing where nothing is drawn.

    Args:
        what: the task, in two or three words.
        total: number of its items; may be set once it is known.
        shown: whether the bar is drawn if the task takes long enough.
    """

    def __init__(self, what: str, total: int, shown: bool) -> None:
        self.what, self.total, self.shown = what, total, shown
        self.done, self._doing = 0, ""
        self._lock = threading.Lock()

    def advance(self) -> None:
        """One more item is finished."""
        with self._lock:
            self.done += 1
            self._doing = ""

    def say(self, doing: str) -> None:
        """What is being done now."""
        self._doing = doing

    @property
    def doing(self) -> str:
        """What is being done, and what others have to remark."""
        return "; ".join(filter(None, (self._doing, *(text() for text in _remarks))))


@contextmanager
def progress(what: str, total: int, stream: TextIO | None = None) -> Iterator[Bar]:
    """A context that draws a bar for ``total`` items if it lasts longer than two seconds.

    >>> with progress("building kernels", len(sources)) as bar:   # doctest: +SKIP
    ...     for source in sources:
    ...         build(source)
    ...         bar.advance()
    """
    stream = stream or sys.stderr
    bar = Bar(what, total, bool(total) and may_draw() and (_is_drawn(stream) or log.isEnabledFor(logging.INFO)))
    if not bar.shown:
        yield bar
        return
    ended = threading.Event()
    thread = threading.Thread(target=_draw, args=(bar, stream, ended), name="hexa_fx progress", daemon=True)
    thread.start()
    try:
        yield bar
    finally:
        ended.set()
        thread.join()


def _is_drawn(stream: TextIO) -> bool:
    return stream.isatty() or _is_notebook(stream)


def _is_notebook(stream: TextIO) -> bool:
    """Whether it is an output of Jupyter or Colab, which knows carriage returns but no codes of terminals."""
    return type(stream).__module__.partition(".")[0] == "ipykernel"


def _draw(bar: Bar, stream: TextIO, ended: threading.Event) -> None:
    began = time.monotonic()
    if ended.wait(_PATIENCE):
        return
    if not _is_drawn(stream):
        while not ended.is_set():
            log.info("%s", _line(bar, began))
            ended.wait(_LOGGED)
        return
    with _plain(bar, stream, began) if _is_notebook(stream) else _rich(bar, stream) as draw:
        while not ended.wait(_INTERVAL):
            draw()


@contextmanager
def _rich(bar: Bar, stream: TextIO) -> Iterator[Callable[[], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    doing = TextColumn("{task.fields[doing]}", markup=False)  # a path may hold brackets
    # what the program prints stays on its standard output
    with Progress(*columns, doing, console=Console(file=stream), transient=True, redirect_stdout=False) as drawn:
        task = drawn.add_task(bar.what, total=bar.total, completed=bar.done, doing=bar.doing)
        yield lambda: drawn.update(task, total=bar.total, completed=bar.done, doing=bar.doing)


@contextmanager
def _plain(bar: Bar, stream: TextIO, began: float) -> Iterator[Callable[[], None]]:
    clear = f"\r{' ' * _LONGEST}\r"

    def draw() -> None:
        stream.write(f"{clear}{_line(bar, began)[:_LONGEST]}")
        stream.flush()

    draw()
    try:
        yield draw
    finally:
        stream.write(clear)
        stream.flush()


def _line(bar: Bar, began: float) -> str:
    filled = _WIDTH * bar.done // max(1, bar.total)
    bars, seconds = f"{'#' * filled}{'.' * (_WIDTH - filled)}", time.monotonic() - began
    return f"{bar.what} {bars} {bar.done}/{bar.total} {seconds:.0f} s {bar.doing}".rstrip()
