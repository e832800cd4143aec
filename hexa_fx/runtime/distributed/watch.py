"""Who of a group's ranks is still there: a star of plain connections, one thread a process.

A collective on a device does not fail when a rank dies, it waits. So the ranks of a group hold connections to its first
rank, on which nothing is sent but goodbyes: the system ends a dead process's connection at once, keepalive that of a dead
host. An end without a goodbye is a loss, and the first rank tells the others. When the first rank says goodbye itself, nobody
watches any more.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

# Frames: what happened, and to which rank.
_FRAME = struct.Struct("!ci")
_LOST, _GOODBYE, _HEARD = b"L", b"G", b"H"
_HELLO = struct.Struct("!32si")
_WELCOME = b"ok"

# A dead host is noticed after about 5 + 3 * 2 seconds.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 15000}
_GREETING_SECONDS = 2.0
_LOOPBACK = ("127.0.0.1", "::1")

# All ranks' values of an object, in rank order.
Exchange = Callable[[Any], list[Any]]


class Watch:
    """This rank's end of the star.

    Args:
        peers: connections by rank: those of all others on the first rank, else that to the first rank.
        tick: called on the watch's thread after every event; returns the seconds after which it wants to be called even
            if nothing happens.
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
        """Begins to watch."""
        self._thread.start()

    def leave(self, seconds: float = 1.0) -> None:
        """Says goodbye, and waits until the others have heard it."""
        for peer in list(self._peers):
            self._send(peer, _GOODBYE, self.rank)
        if self._peers and threading.current_thread() is not self._thread:
            self._all_heard.wait(seconds)
        self.stop()

    def stop(self) -> None:
        """Ends the connections. Without a goodbye before, the others take this rank for lost."""
        self._stopping = True
        try:
            self._wake.send(b"x")
        except OSError:
            return
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)
        self.forget()

    def forget(self) -> None:
        """Closes what this process holds, also in a forked child, where the connections stay the parent's."""
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
            except (OSError, ValueError):  # closed under our feet, by `stop`
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
        with contextlib.suppress(OSError, KeyError):  # its end is noticed by reading
            self._peers[peer].send(_FRAME.pack(kind, rank))


# --- setting the star up ---------------------------------------------------------------------------------------------


def connect_star(rank: int, world: int, exchange: Exchange, seconds: float) -> dict[int, socket.socket]:
    """The connections of a `Watch`. All ranks call it at the same point.

    Args:
        exchange: all-gather of one object a rank, between hosts.
        seconds: after which a rank that does not get through is a failure.

    Raises:
        OSError: on every rank, if one of them did not get through; the text says which and why.
    """
    listener, offer, failure = None, None, ""
    peers: dict[int, socket.socket] = {}
    try:
        if rank == 0:
            listener, offer = _listen()
    except OSError as error:
        failure = f"cannot listen: {error}"
    given = exchange(offer)[0]
    try:
        if listener is not None and given is not None:
            peers = _accept(listener, given[2], world, seconds)
        elif given is not None:
            peers = {0: _connect(given, rank, seconds)}
    except OSError as error:
        failure = str(error) or type(error).__name__
    failures = {other: text for other, text in enumerate(exchange(failure)) if text}
    if not failures:
        return peers
    for connection in peers.values():
        connection.close()
    raise OSError("; ".join(f"rank {other}: {text}" for other, text in failures.items()))


def _listen() -> tuple[socket.socket, tuple[list[str], int, bytes]]:
    hosts = _own_addresses()
    if hosts[0] in _LOOPBACK:
        family = socket.AF_INET6 if ":" in hosts[0] else socket.AF_INET
        listener = socket.create_server((hosts[0], 0), family=family, backlog=1024)
    elif socket.has_dualstack_ipv6():
        listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    else:
        listener = socket.create_server(("", 0), backlog=1024)
    return listener, (hosts, listener.getsockname()[1], secrets.token_bytes(32))


def _own_addresses() -> list[str]:
    """Under which names others may reach this host, the one on the way to the job's store first."""
    master = os.environ.get("MASTER_ADDR", "")
    own = _address_towards(master) if master else ""
    if own in _LOOPBACK:
        return [own]
    outward = _address_towards("192.0.2.1")  # belongs to nobody; asks for the default route
    return [host for host in dict.fromkeys((own, socket.gethostname(), outward, "localhost")) if host]


def _address_towards(host: str) -> str:
    """This host's address on the interface that leads to another one. Nothing is sent."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _accept(listener: socket.socket, token: bytes, world: int, seconds: float) -> dict[int, socket.socket]:
    peers: dict[int, socket.socket] = {}
    end = time.monotonic() + seconds
    with listener:
        while len(peers) < world - 1:
            try:
                listener.settimeout(max(0.01, end - time.monotonic()))
                connection, _ = listener.accept()
            except OSError as error:
                for connection in peers.values():
                    connection.close()
                missing = sorted(set(range(1, world)) - set(peers))
                raise OSError(f"ranks {missing} did not connect within {seconds:g} s") from error
            other = _greet(connection, token)
            if other in peers or not 0 < other < world:
                connection.close()
                continue
            peers[other] = _kept_alive(connection)
    return peers


def _greet(connection: socket.socket, token: bytes) -> int:
    """The rank of who connects; -1 for a stranger."""
    try:
        connection.settimeout(_GREETING_SECONDS)
        shown, rank = _HELLO.unpack(_exactly(connection, _HELLO.size))
        if not hmac.compare_digest(shown, token):
            return -1
        connection.sendall(_WELCOME)
        return int(rank)
    except (OSError, struct.error):
        return -1


def _connect(offer: tuple[list[str], int, bytes], rank: int, seconds: float) -> socket.socket:
    hosts, port, token = offer
    tried = []
    for host in hosts:
        try:
            connection = socket.create_connection((host, port), timeout=seconds / len(hosts))
        except OSError as error:
            tried.append(f"{host}:{port}: {error}")
            continue
        try:
            connection.sendall(_HELLO.pack(token, rank))
            if _exactly(connection, len(_WELCOME)) == _WELCOME:
                return _kept_alive(connection)
            tried.append(f"{host}:{port}: not this job's")
        except OSError as error:
            tried.append(f"{host}:{port}: {error}")
        connection.close()
    raise OSError("cannot reach the first rank, " + "; ".join(tried))


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            break
        data += more
    return data


def _kept_alive(connection: socket.socket) -> socket.socket:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection
