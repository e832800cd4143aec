"""Says where a rank is that does not come, while the others wait for it.

A rank in a barrier of the user's own would be waited for until the timeout, half an hour by default, and would wait as long itself.
So who has waited a while asks in the job's store, and a thread of the rank that is asked answers: where its main thread stands
still, and how many collectives it has begun in each process group since they last met. If these are more than the asking rank has
begun, neither can ever go on.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from hexa_fx.distributed.groups import Groups
from hexa_fx.errors import RankError

log = logging.getLogger(__name__)

_PATIENCE, _POLL = 10.0, 0.5
"""Seconds until who waits asks, and between two looks at the answers."""
_STILL, _LOOK = 4.0, 1.0
"""Seconds for which a main thread must not have moved, and between two looks at it."""

_TORCH, _OURS = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
_COLLECTIVES, _OUR_COLLECTIVES = dist.distributed_c10d.__file__, str(Path(__file__).parent)


def await_others(work: Any, groups: Groups, where: str) -> None:
    """Waits for a collective of hosts.

    Raises:
        RankError: a rank waits in a collective that this one has not begun, and so can never come.
        RuntimeError: the backend's, if the collective fails.
    """
    meetings = _meetings.setdefault(groups.main_name, _Meetings())
    meetings.number += 1
    if not _ends_within(work, min(_PATIENCE, groups.timeout.total_seconds() / 4)):
        _ask(work, groups, meetings, where)
    meetings.begun = _begun()


class _Meetings:
    """How often the hosts of some groups wanted to meet, and what this one had begun when they last did."""

    def __init__(self) -> None:
        self.number = 0
        self.begun: dict[str, int] = {}

    def since(self) -> dict[str, int]:
        """The collectives begun since they last met, by the names of their groups."""
        return {name: n - self.begun.get(name, 0) for name, n in _begun().items()}


_meetings: dict[str, _Meetings] = {}


def _begun() -> dict[str, int]:
    """How many collectives each process group has begun here. Not every backend counts them."""
    found = {}
    groups: list[tuple[Any, str]] = list(dist.distributed_c10d._world.pg_names.items())
    for group, name in groups:
        with suppress(RuntimeError):
            found[str(name)] = int(group._get_sequence_number_for_group())
    return found


def _ask(work: Any, groups: Groups, meetings: _Meetings, where: str) -> None:
    store, key, read = dist.distributed_c10d._get_default_store(), _key(groups, meetings.number), 0
    store.set(f"{key}/asked", where)
    while not _ends_within(work, _POLL):
        for number in range(read, store.add(f"{key}/answers", 0)):
            read = number + 1
            _judge(json.loads(store.get(f"{key}/answer/{number}")), groups, meetings.since(), where)


def _ends_within(work: Any, seconds: float) -> bool:
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if work.is_completed():
            raise
        return False
    return True


def _judge(answer: dict[str, Any], groups: Groups, mine: dict[str, int], where: str) -> None:
    rank, place = answer["rank"], answer["place"]
    if not any(begun > mine[name] for name, begun in answer["begun"].items() if name in mine):
        log.warning("rank %d waits at %s for rank %d, which is at %s", groups.rank, where, rank, place)
        return
    time.sleep(2 * _POLL)  # others who wait have seen it too, before this one ends
    raise RankError(
        f"the ranks of the partition have come apart: rank {rank} waits at {place} for a collective that rank {groups.rank} "
        f"has not begun, and rank {groups.rank} waits for it at {where}. Every rank makes as many forwards and backwards as the "
        "others, and calls barriers and collectives of its own at the same points between them"
    )


def _key(groups: Groups, number: int) -> str:
    return f"hexa_fx/where/{groups.main_name}/{number}"


# --- who is asked ----------------------------------------------------------------------------------------------------


class _Answering:
    """The thread that answers for this process. It looks into the store only where the main thread has not moved for a while."""

    def __init__(self) -> None:
        self.groups: list[Groups] = []
        self._end = threading.Event()
        self._seen: tuple[Any, ...] = ()
        self._since = 0.0
        self._given: dict[str, str] = {}
        self._thread = threading.Thread(target=self._run, name="hexa_fx where this rank is", daemon=True)
        self._thread.start()
        atexit.register(self.end)

    def end(self) -> None:
        self._end.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        with suppress(RuntimeError, ValueError):  # the process groups are gone, or the store is
            while not self._end.wait(_LOOK):
                self._look()

    def _look(self) -> None:
        frame = top = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None and frame.f_code.co_filename.startswith(_OURS):
            frame = frame.f_back
        here = dist.distributed_c10d._world.pg_map
        self.groups = [groups for groups in self.groups if groups.host in here]
        if frame is None or top is None or not self.groups:
            return
        seen, now = (id(frame), frame.f_lasti, *_begun().values()), time.monotonic()
        if seen != self._seen:
            self._seen, self._since = seen, now
        elif now - self._since >= _STILL:
            self._answer(frame, _groups_waited_in(top))

    def _answer(self, frame: FrameType, waited_in: set[str]) -> None:
        store = dist.distributed_c10d._get_default_store()
        for groups in self.groups:
            meetings = _meetings[groups.main_name]
            begun = {name: n for name, n in meetings.since().items() if name in waited_in}
            key = _key(groups, meetings.number + 1)
            answer = json.dumps({"rank": groups.rank, "place": _place(frame), "begun": begun})
            if self._given.get(key) != answer and store.check([f"{key}/asked"]):
                self._given[key] = answer
                store.set(f"{key}/answer/{store.add(f'{key}/answering', 1) - 1}", answer)
                store.add(f"{key}/answers", 1)
                log.warning(
                    "rank %d stands at %s, and others wait for it at %s",
                    *(groups.rank, _place(frame), store.get(f"{key}/asked").decode()),
                )


def _groups_waited_in(top: FrameType) -> set[str]:
    """The names of the groups in which a main thread that stands here may wait for others."""
    names: dict[Any, str] = {group: str(name) for group, name in list(dist.distributed_c10d._world.pg_names.items())}
    file = top.f_code.co_filename
    if file == _COLLECTIVES and "group" in top.f_locals:
        return {names.get(top.f_locals["group"] or dist.group.WORLD, "")}
    if file.startswith(_OUR_COLLECTIVES):
        return set(names.values())
    # Perhaps it waits for its device. Gloo waits in none, and counts what two ranks send each other, too.
    return {name for group, name in names.items() if dist.get_backend(group) == "nccl"}


def _place(frame: FrameType | None) -> str:
    """The innermost line of code that is not torch's, and what it called of torch."""
    called = ""
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _OURS)):
        called = called if frame.f_code.co_name == "wrapper" else frame.f_code.co_name
        frame = frame.f_back
    if frame is None:
        return "an unknown place"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" + f" ({called})" * bool(called)


@functools.cache
def _answering() -> _Answering:
    return _Answering()


def answer_for(groups: Groups) -> None:
    """From now on this process says where it is, if other ranks of these groups wait for it."""
    if groups.world == 1:
        return
    _meetings.setdefault(groups.main_name, _Meetings()).begun = _begun()
    if groups not in _answering().groups:
        _answering().groups.append(groups)
