"""Builds kernels in the background: nobody who launches one waits for a compiler.

Threads take the requested kernels from a queue, as many at a time as there are cores, and each runs a compiler in a process of
its own. A kernel that another process builds already (another rank of the job, say) takes no thread: the cache is asked for it
now and then. Kernels appear in the cache by one rename, and are ready here from then on.
"""

from __future__ import annotations

import atexit
import copy
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from hexa_fx.codegen.render import KernelSource, render
from hexa_fx.codegen.spec import KernelSpec
from hexa_fx.jit import processes
from hexa_fx.jit.build import being_built, build_missing, find_built
from hexa_fx.jit.cache import BuiltKernel
from hexa_fx.jit.env import JitSettings
from hexa_fx.jit.errors import BuildDisabledError
from hexa_fx.progress import progress, remark

log = logging.getLogger(__name__)

_POLL = 0.1
"""Seconds between two looks for a kernel that another process builds."""

_GOODBYE = 5.0
"""Seconds at the end of the interpreter for threads to sweep up after their killed compilers."""


@dataclass
class _Job:
    source: KernelSource | None = None
    entry: BuiltKernel | None = None
    error: Exception | None = None

    @property
    def done(self) -> bool:
        return self.entry is not None or self.error is not None


class Builder:
    """The kernels that were requested under one set of settings. Every method may be called from any thread.

    `builder` gives the process's own. Threads start with the first kernel that the cache lacks.
    """

    def __init__(self, settings: JitSettings) -> None:
        self.settings = settings
        self._jobs: dict[KernelSpec, _Job] = {}
        self._queue: deque[KernelSpec] = deque()
        self._elsewhere: dict[KernelSpec, None] = {}  # what other processes build
        self._changed = threading.Condition()
        self._workers: list[threading.Thread] = []
        self._idle = 0
        self._poller: threading.Thread | None = None
        self._closed = False

    def request(self, specs: Iterable[KernelSpec], first: bool = False) -> None:
        """Queues what is neither built nor requested yet. Takes about a millisecond for each new kernel.

        Args:
            specs: the kernels. One that cannot be generated or built is refused by `check` from then on.
            first: before everything that waits in the queue, since a call needs them now.
        """
        missing = [spec for spec in dict.fromkeys(specs) if not self._known(spec, first)]
        found = {spec: self._look_up(spec) for spec in missing}
        with self._changed:
            for spec, job in found.items():
                if spec in self._jobs or self._closed:
                    continue
                self._jobs[spec] = job
                if job.done:
                    continue
                self._queue.appendleft(spec) if first else self._queue.append(spec)
                self._start_worker()
            self._changed.notify_all()

    def ready(self, spec: KernelSpec) -> BuiltKernel | None:
        """The built kernel; None if it is not there yet, has failed, or was never requested."""
        job = self._jobs.get(spec)
        return job.entry if job else None

    def check(self, spec: KernelSpec) -> None:
        """Raises why a requested kernel cannot be built.

        Raises:
            SpecError, ToolchainError, BuildError, OSError: a new one at each call, since what was raised refers to all who called.
        """
        job = self._jobs.get(spec)
        if job is not None and job.error is not None:
            raise copy.copy(job.error)

    def left(self, specs: Iterable[KernelSpec] | None = None) -> int:
        """How many of these requested kernels (default: of all) are neither built nor failed."""
        jobs = (
            list(self._jobs.values()) if specs is None else [self._jobs[spec] for spec in specs if spec in self._jobs]
        )
        return sum(not job.done for job in jobs)

    def wait(self, specs: Iterable[KernelSpec] | None = None, timeout: float | None = None) -> bool:
        """Waits until these requested kernels (default: all) are built or have failed.

        Args:
            specs: kernels that were requested; others are passed over.
            timeout: seconds; None waits as long as it takes.

        Returns:
            Whether none is left.
        """
        wanted = None if specs is None else list(specs)
        with self._changed:
            return self._changed.wait_for(lambda: self._closed or not self.left(wanted), timeout) and not self._closed

    def close(self) -> None:
        """Forgets what is queued and waits a moment for threads whose compilers have been killed."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()
        end = time.monotonic() + _GOODBYE
        for thread in (*self._workers, *filter(None, [self._poller])):
            thread.join(max(0.0, end - time.monotonic()))

    def _known(self, spec: KernelSpec, first: bool) -> bool:
        with self._changed:
            if first and spec in self._queue:
                self._queue.remove(spec)
                self._queue.appendleft(spec)
            return spec in self._jobs

    def _look_up(self, spec: KernelSpec) -> _Job:
        job = _Job()
        try:
            job.source = render(spec)  # here, not in a thread: a fork must not find jinja's locks taken
            job.entry = find_built(job.source, self.settings)
            if job.entry is None and self.settings.disable_jit:
                raise BuildDisabledError(job.source.key)
        except Exception as error:
            job.error = error.with_traceback(None)
        return job

    def _start_worker(self) -> None:
        if self._idle >= len(self._queue) or len(self._workers) >= max(1, self.settings.build_jobs):
            return
        thread = threading.Thread(target=self._work, name="hexa_fx build", daemon=True)
        self._workers.append(thread)
        thread.start()

    def _work(self) -> None:
        while (spec := self._next()) is not None:
            job = self._jobs[spec]
            assert job.source is not None
            try:
                entry = build_missing(job.source, self.settings, wait=False)
            except processes.ProcessEnding:
                return
            except Exception as error:
                self._finish(job, None, error)
                continue
            if entry is None:
                self._leave_to_others(spec)
            else:
                self._finish(job, entry, None)

    def _next(self) -> KernelSpec | None:
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._queue or self._closed)
            self._idle -= 1
            return None if self._closed else self._queue.popleft()

    def _finish(self, job: _Job, entry: BuiltKernel | None, error: Exception | None) -> None:
        if error is not None:
            log.debug("a kernel does not build: %s", error)
        with self._changed:
            job.entry, job.error = entry, error
            self._changed.notify_all()

    def _leave_to_others(self, spec: KernelSpec) -> None:
        with self._changed:
            self._elsewhere[spec] = None
            if self._poller is None:
                self._poller = threading.Thread(target=self._poll, name="hexa_fx cache", daemon=True)
                self._poller.start()
            self._changed.notify_all()

    def _poll(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._elsewhere or self._closed)
                if self._closed:
                    return
                waiting = list(self._elsewhere)
            for spec in waiting:
                self._look_elsewhere(spec, self._jobs[spec])
            time.sleep(_POLL)

    def _look_elsewhere(self, spec: KernelSpec, job: _Job) -> None:
        assert job.source is not None
        try:
            entry = find_built(job.source, self.settings)
            if entry is None and being_built(job.source, self.settings):
                return
        except Exception as error:
            entry, job.error = None, error
        with self._changed:
            del self._elsewhere[spec]
            job.entry = entry
            if not job.done:  # whoever built it gave up
                self._queue.appendleft(spec)
                self._start_worker()
            self._changed.notify_all()


_builders: dict[JitSettings, Builder] = {}
_lock = threading.Lock()


def builder(settings: JitSettings | None = None) -> Builder:
    """The process's builder for these settings, by default those of the environment.

    Ask for it anew instead of keeping it: a forked process has builders of its own.
    """
    settings = settings or JitSettings.from_env()
    with _lock:
        if settings not in _builders:
            _builders[settings] = Builder(settings)
        return _builders[settings]


def prebuild(specs: Iterable[KernelSpec], settings: JitSettings | None = None) -> list[BuiltKernel]:
    """Builds several kernels at a time and waits for them, with a progress bar on rank 0's terminal. No device is needed.

    Raises:
        SpecError, ToolchainError, BuildError: the error of the first kernel that fails; the others are still built.
    """
    wanted, own = list(dict.fromkeys(specs)), builder(settings)
    own.request(wanted)
    with progress("building kernels", len(wanted)) as bar:
        done = 0
        while (left := own.left(wanted)) or done < len(wanted):
            for _ in range(len(wanted) - left - done):
                bar.advance()
            done = len(wanted) - left
            own.wait(wanted, _POLL)
    for spec in wanted:
        own.check(spec)
    return [entry for entry in map(own.ready, wanted) if entry is not None]


@remark
def _kernels_left() -> str:
    left = sum(own.left() for own in list(_builders.values()))
    return f"{left} kernels left" if left > 1 else "1 kernel left" if left else ""


def _close_all() -> None:
    processes.end_all()
    for own in _builders.values():
        own.close()


def _after_fork() -> None:
    """The threads are the parent's."""
    global _builders, _lock
    _builders, _lock = {}, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_close_all)
