"""Writes the graphs of `hexa_fx.optimize` where the environment asks for them: to files, to the log, and to torch's own trace.

* ``HEXA_FX_DUMP_DIR=folder``: one numbered file per pass, the report, the page of graphs and the kernels' CUDA text.
* ``TORCH_LOGS="+hexa_fx"`` or ``HEXA_FX_LOGS=debug``: graphs at debug level of the logger ``hexa_fx.passes.graphs``.
* ``TORCH_TRACE=folder``: artifacts for tlparse.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hexa_fx.errors import InputError
from hexa_fx.graphs import Graphs
from hexa_fx.inspection.recorded import EventReader, Seen
from hexa_fx.observers import Listener, PassEvent, listening
from hexa_fx.report import OptimizationReport
from hexa_fx.torch_private import is_traced, write_trace

graph_log = logging.getLogger("hexa_fx.passes.graphs")

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}


class PassTrace:
    """Sees all passes of one `optimize`; `finish` writes what is complete only at the end."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        _set_level(environment)
        folder = environment.get("HEXA_FX_DUMP_DIR", "")
        try:
            self.dump = Dump(Path(folder).expanduser()) if folder else None
        except OSError as error:
            raise InputError(f"HEXA_FX_DUMP_DIR={folder!r}: {error.strerror}; expected a folder to write to") from error
        self._memory = EventReader()
        self._traced = is_traced()

    @property
    def listeners(self) -> tuple[Listener, ...]:
        """Empty if nobody asked for graphs, so that passes lose no time."""
        wanted = self.dump is not None or self._traced or graph_log.isEnabledFor(logging.DEBUG)
        return (self._see,) if wanted else ()

    def _see(self, event: PassEvent) -> None:
        if event.when == "before":
            return
        seen = self._memory.see(event)
        graph_log.debug("%s", seen)
        if self.dump is not None:
            self.dump.write(seen)
        if self._traced:
            _trace(seen)

    def finish(self, report: OptimizationReport, graphs: Graphs | None = None) -> None:
        """Call it at the end of `optimize`."""
        if self.dump is not None:
            self.dump.finish(report, graphs)


@contextmanager
def tracing() -> Iterator[PassTrace]:
    """A context in which passes are reported to wherever the environment says."""
    trace = PassTrace(os.environ)
    with listening(*trace.listeners):
        yield trace


class Dump:
    """Numbered files in a folder of their own for every `optimize` of the process."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = _fresh(folder)
        self._number = 0

    def write(self, seen: Seen) -> Path:
        """One pass: what it is, the readable code, and every node with its operands and types."""
        where = re.sub(r"[^\w.]+", "_", seen.path or "model")
        name = "-".join(part for part in (f"{self._number:03}", where, seen.mode, seen.name) if part)
        self._number += 1
        counts = json.dumps(seen.graph.counts, sort_keys=True)
        text = f"{seen}\n\n# operators: {counts}\n\n# nodes\n{seen.graph.table()}\n"
        target = self.folder / f"{name}.txt"
        target.write_text(text, encoding="utf-8")
        return target

    def finish(self, report: OptimizationReport, graphs: Graphs | None) -> None:
        """Report, page of graphs, CUDA text."""
        (self.folder / "report.txt").write_text(f"{report}\n", encoding="utf-8")
        (self.folder / "report.json").write_text(report.to_json(), encoding="utf-8")
        report.to_html(self.folder / "report.html")
        if not graphs:
            return
        graphs.to_html(self.folder / "graphs.html")
        sources = self.folder / "kernels"
        sources.mkdir(exist_ok=True)
        for kernel in dict.fromkeys(k for block in graphs.values() for k in block.kernels()):
            if kernel.spec:
                name = re.sub(r"\W+", "_", kernel.name).strip("_")
                (sources / f"{name}.cu").write_text(kernel.source, encoding="utf-8")


def _fresh(folder: Path) -> Path:
    """A new numbered folder; several processes may ask at a time."""
    number = len(list(folder.iterdir()))
    while True:
        made = folder / f"{number:03}"
        try:
            made.mkdir()
        except FileExistsError:
            number += 1
            continue
        return made


def _set_level(environment: Mapping[str, str]) -> None:
    """Applies HEXA_FX_LOGS, a level for the package's loggers, for those who do not use TORCH_LOGS."""
    wanted = environment.get("HEXA_FX_LOGS", "").strip().lower()
    if not wanted:
        return
    if wanted not in _LEVELS:
        raise InputError(f"HEXA_FX_LOGS={wanted!r}: expected one of {', '.join(_LEVELS)}")
    logger = logging.getLogger("hexa_fx")
    logger.setLevel(_LEVELS[wanted])
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(name)s] %(levelname)s: %(message)s"))
        logger.addHandler(handler)


def _trace(seen: Seen) -> None:
    """One artifact for tlparse."""
    where = re.sub(r"\W+", "_", seen.path or "model")
    write_trace("_".join(part for part in ("hexa_fx", where, seen.mode, seen.name) if part), lambda: str(seen))
