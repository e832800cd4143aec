"""`hexa_fx.debug`: prints and collects graphs before and after chosen passes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from hexa_fx.errors import InputError
from hexa_fx.inspection.recorded import EventReader, Seen
from hexa_fx.observers import PassEvent, listening
from hexa_fx.passes import PASSES


@contextmanager
def debug(
    before: Sequence[str] = (),
    after: Sequence[str] = (),
    *,
    block: str | None = None,
    file: TextIO | None = None,
    quiet: bool = False,
) -> Iterator[list[Seen]]:
    """A context in which graphs are printed before and after the named passes; yields the list they are collected in.

    >>> with hexa_fx.debug(before=["canonicalize"], after=["rewrite"]) as seen:   # doctest: +SKIP
    ...     hexa_fx.optimize(model, inputs)

    Args:
        before, after: names of passes, out of capture, canonicalize, detect, rewrite, verify, partition, overlap, lower,
            fuse_activation, bind_kernels, tile_rows, take_saved; ``"*"`` for all.
        block: path of the only block to look at; all blocks by default.
        file: where to print; standard output by default.
        quiet: collect only, do not print.

    Raises:
        InputError: a name is not a pass; the message lists those there are.
    """
    wanted = {"before": _checked(before), "after": _checked(after)}
    memory, kept = EventReader(), list[Seen]()

    def see(event: PassEvent) -> None:
        if event.name not in wanted[event.when] or (block is not None and event.path != block):
            return
        kept.append(memory.see(event))
        if not quiet:
            print(kept[-1], end="\n\n", file=file or sys.stdout)

    with listening(see):
        yield kept


def _checked(names: Sequence[str]) -> frozenset[str]:
    if isinstance(names, str):
        names = [names]
    if "*" in names:
        return frozenset(PASSES)
    unknown = [name for name in names if name not in PASSES]
    if unknown:
        raise InputError(f"no pass is called {', '.join(map(repr, unknown))}; there are {', '.join(PASSES)}")
    return frozenset(names)
