"""What a rank does about a lost one: waits a little, aborts what would wait for ever, and ends the process as a last resort."""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hexa_fx.distributed.failure_detector import FailureDetector
from hexa_fx.distributed.groups import Groups
from hexa_fx.errors import RankError

logger = logging.getLogger(__name__)

GRACE = 3.0
"""Seconds that a collective may stay unfinished after a loss before communicators are aborted."""
LONG_GRACE = 30.0
"""The same, at most, for work that may not involve the lost rank."""
SETTLE = 5.0
"""Seconds between the abort and the end of the process, unless a `RankError` is raised in between."""
_POLL = 0.25


class Watchdog:
    """Looks after the collectives of one set of ranks for as long as sessions use them.

    Args:
        groups: the process groups of the first session.
        peers: connections of the watch, by rank.
        on_loss: called on the watch's thread as soon as a rank is known to be lost.
    """

    def __init__(self, groups: Groups, peers: dict[int, socket.socket], on_loss: Callable[[], None]) -> None:
        self.main, self.rank, self.seconds = groups.main, groups.rank, groups.timeout.total_seconds()
        self.sessions = 0
        self._on_loss = on_loss
        self.reported = False
        self.aborted = False
        self._pgs: list[Any] = []
        self._latest: dict[str, Any] = {}
        self._done: dict[str, Any] = {}
        self._idle: threading.Event | None = None
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._noticed = self._waiting_since = self._aborted_at = 0.0
        self._waiting: list[Any] = []
        self.detector = FailureDetector(groups.rank, peers, self.tick)
        self.detector.start()

    def add(self, groups: Iterable[Any]) -> None:
        """Takes on one more session, with its process groups."""
        self.sessions += 1
        self._pgs += [group for group in groups if group not in self._pgs]

    def track(self, name: str, work: Any) -> None:
        """Notes a launched collective. Those of one communicator finish in order, so only the latest is kept."""
        self._latest[name] = work

    @property
    def sentence(self) -> str:
        """A sentence that names the lost ranks."""
        return f"ranks {sorted(self.detector.lost)} do not answer: their processes ended in the middle of the job"

    # --- on the watch's thread -------------------------------------------------------------------------------------

    def tick(self) -> float | None:
        """After a loss or a goodbye, makes sure that nobody waits for ever. Returns the seconds until the next call."""
        now = time.monotonic()
        if self.detector.lost and not self._noticed:
            self._notice(now)
        if not self._noticed and not self.detector.left:
            return None
        if self.aborted:
            if now >= self._aborted_at + SETTLE and (not self.reported or self._unfinished()):
                self._end_process()
            return _POLL
        unfinished = self._unfinished()
        if not unfinished or not _same(unfinished, self._waiting):
            self._waiting, self._waiting_since = unfinished, now
        if unfinished and now >= self._waiting_since + self._patience(unfinished):
            if self._noticed:
                self._abort(now)
            else:
                self.detector.lost.extend(self.detector.left)
        return _POLL

    def _patience(self, unfinished: list[Any]) -> float:
        """Seconds to wait. The device may only be busy with this rank's own work; a collective with a lost rank never ends."""
        is_ours = any(work is not self._idle for work in unfinished)
        return GRACE if self._noticed and is_ours else min(self.seconds, LONG_GRACE)

    def _notice(self, now: float) -> None:
        self._on_loss()
        self._noticed = now
        self._waiting = []
        if self._device is not None:
            self._idle = threading.Event()
            threading.Thread(target=self._await_device, daemon=True).start()
        logger.error("rank %d: %s", self.rank, self.sentence)

    def _await_device(self) -> None:
        assert self._idle is not None
        torch.cuda.synchronize(self._device)
        self._idle.set()

    def _unfinished(self) -> list[Any]:
        """Launched work that is not done. Works are asked only after a loss or a goodbye, and never again once done: asking
        disturbs the capture of CUDA graphs, and a rank may go on alone."""
        found: list[Any] = []
        for name, work in list(self._latest.items()):
            if self._done.get(name) is work:
                continue
            if _is_done(work):
                self._done[name] = work
            else:
                found.append(work)
        if self._idle is not None and not self._idle.is_set():  # perhaps with collectives that only torch knows
            found.append(self._idle)
        return found

    def _abort(self, now: float) -> None:
        self.aborted, self._aborted_at = True, now
        logger.error(
            "rank %d: a collective waits for ranks %s, so it is aborted", self.rank, sorted(self.detector.lost)
        )
        for group in self._pgs:  # all at once: one communicator's abort may wait for another's kernel
            threading.Thread(target=_abort, args=(group,), daemon=True).start()

    def _end_process(self) -> None:
        text = f"hexa_fx.errors.RankError: rank {self.rank}: {self.sentence}. Collectives were aborted, so the process ends\n"
        os.write(2, text.encode())
        faulthandler.dump_traceback(file=2, all_threads=True)
        self.detector.leave(0.2)
        os._exit(1)

    # --- on any thread ---------------------------------------------------------------------------------------------

    def error(self, where: str) -> RankError:
        """The error to raise. Once it is made, the loss counts as reported."""
        self.reported = True
        return RankError(f"no collective can run in {where} on rank {self.rank}: {self.sentence}")

    def lost_within(self, seconds: float) -> list[int]:
        """The lost ranks; waits up to ``seconds`` for the watch to name one."""
        end = time.monotonic() + seconds
        while not self.detector.lost and time.monotonic() < end:
            time.sleep(0.02)
        return sorted(self.detector.lost)

    def close(self, failed: bool = False) -> None:
        """Ends the watch. A rank that failed on its own says no goodbye, so that the others take it for lost."""
        if failed and not self.detector.lost:
            self.detector.stop()
        else:
            self.detector.leave()
        self._latest.clear()
        self._done.clear()

    def close_at_exit(self, failed: bool) -> None:
        """Ends the watch as the process exits. Its last steps must not wait for the device either."""
        if self.detector.lost:
            end = time.monotonic() + SETTLE
            if self._unfinished() and not self.aborted:
                self._abort(time.monotonic())
            while self._unfinished() and time.monotonic() < end:
                time.sleep(_POLL)
            if (self.aborted and not self.reported) or self._unfinished():
                self._end_process()
        self.close(failed)


def _same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right))


def _is_done(work: Any) -> bool:
    try:
        return bool(work.is_completed())
    except RuntimeError:  # part of a CUDA graph, which cannot be asked
        return True


def _abort(group: Any) -> None:
    try:
        backend = group._get_backend(torch.device("cuda"))
        getattr(backend, "abort", group.abort)()
    except RuntimeError as error:
        logger.warning("a communicator could not be aborted: %s", error)
