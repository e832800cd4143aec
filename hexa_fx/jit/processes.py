"""The compilers that this process runs: killable with all that they start, since nvcc starts several programs itself."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress

_NICENESS = 5
"""The model that waits for the kernels, or runs without them meanwhile, goes first."""

_lock = threading.Lock()
_running: set[subprocess.Popen[str]] = set()
_ended = False


class ProcessEnding(Exception):
    """The process is about to end, and so was the compiler."""


def run(command: Sequence[str]) -> tuple[int, str]:
    """Runs a compiler to its end.

    It gets a process group of its own: an interrupt from the keyboard is not meant for it.

    Returns:
        Its exit code and what it printed.

    Raises:
        ProcessEnding: this process is about to end.
        OSError: it cannot be started.
    """
    process = _start(command)
    try:
        output, _ = process.communicate()
    finally:
        _finish(process)
    if _ended and process.returncode < 0:
        raise ProcessEnding
    return process.returncode, output


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    with _lock:
        if _ended:
            raise ProcessEnding
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0,
        )
        _running.add(process)
    with suppress(OSError):
        os.setpriority(os.PRIO_PGRP, process.pid, _NICENESS)
    return process


def _finish(process: subprocess.Popen[str]) -> None:
    with _lock:
        _running.discard(process)
    if process.returncode is None:  # an interrupt in the middle of a build that is waited for
        _kill(process)
        process.wait()


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def end_all() -> None:
    """Kills every compiler and starts no more."""
    global _ended
    with _lock:
        _ended = True
        for process in _running:
            _kill(process)


def _after_fork() -> None:
    """The compilers are the parent's, and so is the thread that may have held the lock."""
    global _lock, _running
    _lock, _running = threading.Lock(), set()


os.register_at_fork(after_in_child=_after_fork)
