"""Which ranks of a group are still alive: plain connections in a star, watched by one thread per process.

A collective on a device does not fail when a rank dies, it waits. Every rank of a group therefore holds a connection to its
first rank (`hexa_fx.distributed.rank_connections`), on which nothing but goodbyes is sent. The system closes the connection of a
dead process at once, and keepalive that of a dead host. A connection that closes without a goodbye is a loss, which the first
rank passes on to the others. After the first rank's own goodbye nobody watches any more.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import struct
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

# Frames: what happened, and to which rank.
_FRAME = struct.Struct("!ci")
_LOST, _GOODBYE, _HEARD = b"L", b"G", b"H"


class FailureDetector:
    """This rank's end of the star.

    Args:
        peers: connections by rank: those of all others on the first rank, else that to the first rank.
        tick: called on the watch's thread after every event. Returns the seconds after which it is called again even if
            nothing happens; None for never.
    """

    def __init__(self, rank: int, peers: dict[int, socket.socket], tick: Callable[[], float | None]) -> None:
        self.rank = rank
        self.lost: list[int] = []
        self.left: list[int] = []
        self._peers = dict(peers)
        self._all_heard = threading.Event()
        self._unheard = set(peers)
        self._partial = dict.fromkeys(peers, b"")
        self._tick = tick
        self._stopping = False
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        for peer, connection in self._peers.items():
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, peer)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="hexa_fx watch", daemon=True)

    def start(self) -> None:
        """Starts the watching thread."""
        self._thread.start()

    def leave(self, seconds: float = 1.0) -> None:
        """Says goodbye, waits up to ``seconds`` until the others have heard it, and stops."""
        for peer in list(self._peers):
            self._send(peer, _GOODBYE, self.rank)
        if self._peers and threading.current_thread() is not self._thread:
            self._all_heard.wait(seconds)
        self.stop()

    def stop(self) -> None:
        """Closes the connections. Without a goodbye before, the others take this rank for lost."""
        self._stopping = True
        try:
            self._wake.send(b"x")
        except OSError:
            return
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)
        self.forget()

    def forget(self) -> None:
        """Closes this process's descriptors. In a forked child the parent's connections stay open."""
        for connection in (*self._peers.values(), self._wake, self._woken):
            connection.close()
        self._peers.clear()
        self._selector.close()

    # --- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        wait: float | None = None
        while not self._stopping:
            try:
                events = self._selector.select(wait)
            except (OSError, ValueError):  # closed by `stop` meanwhile
                return
            for key, _ in events:
                if key.data is not None:
                    self._read(key.data)
            try:
                wait = self._tick()
            except Exception:
                logger.exception("the watch of lost ranks failed and ends")
                return

    def _read(self, peer: int) -> None:
        try:
            data = self._peers[peer].recv(4096)
        except BlockingIOError:
            return
        except (OSError, KeyError):
            data = b""
        if not data:
            self._ended(peer)
            return
        data = self._partial[peer] + data
        whole = len(data) - len(data) % _FRAME.size
        self._partial[peer] = data[whole:]
        for kind, rank in _FRAME.iter_unpack(data[:whole]):
            self._heard(peer, kind, rank)

    def _heard(self, peer: int, kind: bytes, rank: int) -> None:
        if kind == _HEARD:
            self._answered(peer)
        elif kind == _GOODBYE:
            self._note(self.left, rank)
            self._relay(_GOODBYE, rank, peer)
            if rank == peer:
                self._send(peer, _HEARD, rank)
        elif kind == _LOST:
            self._note(self.lost, rank)

    def _ended(self, peer: int) -> None:
        connection = self._peers.pop(peer, None)
        if connection is None:
            return
        self._selector.unregister(connection)
        connection.close()
        self._answered(peer)
        if peer not in self.left:
            self._note(self.lost, peer)
            self._relay(_LOST, peer, peer)

    def _note(self, known: list[int], rank: int) -> None:
        if rank not in known and rank != self.rank:
            known.append(rank)

    def _answered(self, peer: int) -> None:
        self._unheard.discard(peer)
        if not self._unheard:
            self._all_heard.set()

    def _relay(self, kind: bytes, rank: int, source: int) -> None:
        for peer in [peer for peer in self._peers if self.rank == 0 and peer != source]:
            self._send(peer, kind, rank)

    def _send(self, peer: int, kind: bytes, rank: int) -> None:
        with contextlib.suppress(OSError, KeyError):  # reading notices that it is closed
            self._peers[peer].send(_FRAME.pack(kind, rank))
