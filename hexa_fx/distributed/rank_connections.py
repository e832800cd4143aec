"""Connects the ranks of a group in a star around its first rank: the plain sockets that a `FailureDetector` watches."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

_HELLO = struct.Struct("!32si")
_WELCOME = b"ok"

# A dead host is noticed after about 5 + 3 * 2 seconds.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 15000}
_GREETING_SECONDS = 2.0
_LOOPBACK = ("127.0.0.1", "::1")

Exchange = Callable[[Any], list[Any]]
"""Takes one rank's object and returns those of all ranks, in rank order."""


def connect_ranks(rank: int, world: int, exchange: Exchange, seconds: float) -> dict[int, socket.socket]:
    """This rank's connections: to every other rank on the first one, to the first one elsewhere. All ranks call it together.

    Args:
        exchange: all-gather of one object per rank, between hosts.
        seconds: how long a rank may take to get through.

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
    """Names under which the others may reach this host, the interface that leads to the job's store first."""
    master = os.environ.get("MASTER_ADDR", "")
    own = _address_towards(master) if master else ""
    if own in _LOOPBACK:
        return [own]
    outward = _address_towards("192.0.2.1")  # a documentation address: asks for the default route
    return [host for host in dict.fromkeys((own, socket.gethostname(), outward, "localhost")) if host]


def _address_towards(host: str) -> str:
    """This host's address on the interface that leads to ``host``. Nothing is sent."""
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
    """The rank at the other end; -1 for a stranger."""
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
