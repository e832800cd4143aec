"""What a rank does when others are lost while collectives run on a device.

Over Gloo, a collective with a dead rank fails. Over NCCL it waits for ever, and so does a host that waits for the device.
Where collectives run on NCCL, a `FailureDetector` therefore says who is lost. After a loss

* nothing new is launched: starting a collective raises `RankError` (`check`);
* if a collective launched earlier is still unfinished after `GRACE` seconds, the groups' communicators are aborted. A waiting
  host then goes on, up to its next `check`; what an aborted collective wrote is garbage. DDP and FSDP2 launch collectives
  too, so the same happens if the device has not finished its work after the group's timeout, at most `LONG_GRACE` seconds;
* if no `RankError` is raised within `SETTLE` seconds of that, the process ends with the sentence and all stacks.

A rank that says goodbye is not lost, since the others may have no more business with it. It counts as lost only if they still
wait for one of its collectives after the same time. `Watchdog` does the waiting, aborting and ending; this module holds the
watchdogs by process group and is what sessions and collectives call.
"""

from __future__ import annotations

import atexit
import functools
import logging
import multiprocessing.util
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from hexa_fx.distributed.groups import Groups
from hexa_fx.distributed.rank_connections import connect_ranks
from hexa_fx.distributed.watchdog import Watchdog

logger = logging.getLogger(__name__)

_SETUP_SECONDS = 10.0

any_lost = False
"""Whether any rank of any group is lost. Cheap to read, so every collective asks it first."""

_watchdogs: dict[str, Watchdog] = {}
"""By name of the process group. Kept outside the sessions, so that a model that holds a session can still be copied."""


def _named(groups: Groups) -> dict[str, Any]:
    return {groups.main_name: groups.main, groups.gather_name: groups.gather, groups.reduce_name: groups.reduce}


def waits_on_device(groups: Groups) -> bool:
    """Whether collectives of these groups run on a device, where they wait for a lost rank instead of failing."""
    try:
        backend = groups.main._get_backend(torch.device("cuda"))
    except RuntimeError:
        return False
    return "nccl" in str(backend.name()).lower()


# --- what sessions and collectives call ------------------------------------------------------------------------------


def watch(groups: Groups) -> None:
    """Starts watching these ranks, where that is needed. All ranks call it at the same point."""
    if groups.world == 1 or not waits_on_device(groups):
        return

    def exchange(value: Any) -> list[Any]:
        out = [None] * groups.world
        dist.all_gather_object(out, value, group=groups.host)
        return out

    known = _watchdogs.get(groups.main_name)
    if not all(exchange(known is not None and known.main is groups.main)):
        if known is not None:
            _close(known)
        try:
            seconds = min(_SETUP_SECONDS, groups.timeout.total_seconds() / 2)
            peers = connect_ranks(groups.rank, groups.world, exchange, seconds)
        except OSError as error:
            _warn_once(str(error))
            return
        known = Watchdog(groups, peers, on_loss=_note_loss)
    assert known is not None
    _watch_exits()
    named = _named(groups)
    known.add(named.values())
    _watchdogs.update(dict.fromkeys(named, known))


def _note_loss() -> None:
    global any_lost
    any_lost = True


def _close(watchdog: Watchdog) -> None:
    for name in [name for name, other in _watchdogs.items() if other is watchdog]:
        del _watchdogs[name]
    watchdog.close()


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning(
        "lost ranks are not watched (%s): a rank that dies ends the others only after the process group's timeout",
        reason,
    )


def unwatch(groups: Groups) -> None:
    """Takes note that a session closes. The last one says goodbye, unless an exception is being raised."""
    watchdog = _watchdogs.get(groups.main_name)
    if watchdog is None or watchdog.main is not groups.main:
        return
    watchdog.sessions -= 1
    if watchdog.sessions <= 0 and not watchdog.detector.lost and not _is_failing():
        _close(watchdog)


def track(name: str, work: Any) -> Any:
    """Notes a collective launched on the group of this name, and returns it."""
    watchdog = _watchdogs.get(name)
    if watchdog is not None:
        watchdog.track(name, work)
    return work


def _find(groups: Groups | str) -> Watchdog | None:
    return _watchdogs.get(groups if isinstance(groups, str) else groups.gather_name)


def check(where: str, groups: Groups | str) -> None:
    """Raises `RankError` if ranks of these groups are lost. Read `any_lost` first: it is cheaper."""
    watchdog = _find(groups)
    if watchdog is not None and watchdog.detector.lost:
        raise watchdog.error(where)


def is_aborted(groups: Groups | str) -> bool:
    """Whether collectives of these groups were aborted, so that what they wrote is garbage."""
    watchdog = _find(groups)
    return watchdog is not None and watchdog.aborted


def find_lost(groups: Groups, seconds: float) -> list[int]:
    """The ranks that the watch knows to be lost after a collective failed; empty where nobody watches."""
    watchdog = _find(groups)
    if watchdog is None:
        return []
    found = watchdog.lost_within(seconds)
    watchdog.reported |= bool(found)
    return found


# --- ends of the process ---------------------------------------------------------------------------------------------


@functools.cache
def _watch_exits() -> None:
    atexit.register(_at_exit)
    # Processes started by multiprocessing skip atexit.
    multiprocessing.util.Finalize(None, _at_exit, exitpriority=100)
    os.register_at_fork(after_in_child=_in_child)


def _at_exit() -> None:
    failed = _is_failing() or getattr(sys, "last_value", None) is not None
    for watchdog in set(_watchdogs.values()):
        watchdog.close_at_exit(failed)
    _watchdogs.clear()


def _is_failing() -> bool:
    """Whether an exception is being raised, other than an exit that reports success."""
    error = sys.exc_info()[1]
    return error is not None and not (isinstance(error, SystemExit) and not error.code)


def _in_child() -> None:
    """In a forked child, which must neither keep its parent's connections open nor say goodbye on its behalf."""
    global any_lost
    for watchdog in set(_watchdogs.values()):
        watchdog.detector.forget()
    _watchdogs.clear()
    _watch_exits.cache_clear()
    any_lost = False
