"""Two zeros in memory that a persistent kernel of the Hopper family takes its tiles by, and leaves zero."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Lock

import torch
from torch import Tensor

QUEUES = 4096
"""What launches of all streams share in turns."""
CAPTURED = 1 << 15
"""Launches in CUDA graphs that one piece of memory is enough for."""
_BYTES = 8
_rings: dict[int, int] = {}
_turns: dict[int, int] = {}
_captured: dict[int, Iterator[int]] = {}
_kept: list[Tensor] = []
_making = Lock()


def next_queue(device: torch.device) -> int:
    """Address of two zeros, which the kernel leaves zero, so that a ring of them serves all streams.

    A launch under capture gets zeros that nothing else ever uses, because its replays may overlap anything but each other. They are
    zero before the capture; only where none are left does the graph have to write some, in a launch before each of its own.
    """
    index = device.index
    if torch.cuda.is_current_stream_capturing():
        address = next(_captured.get(index, iter(())), None)
        if address is None:
            _rings.pop(index, None)  # the next launch outside of a graph makes more
            address = torch.zeros(2, dtype=torch.int32, device=device).data_ptr()
        return address
    turn = _turns[index] = (_turns.get(index, 0) + 1) % QUEUES
    return (_rings.get(index) or _make_ring(device)) + _BYTES * turn


def _make_ring(device: torch.device) -> int:
    with _making:
        if device.index not in _rings:
            zeros = torch.zeros(2 * (QUEUES + CAPTURED), dtype=torch.int32, device=device)
            torch.cuda.synchronize(device)  # another stream may use it next
            _kept.append(zeros)
            first = zeros.data_ptr()
            _captured[device.index] = iter(range(first + _BYTES * QUEUES, first + _BYTES * (QUEUES + CAPTURED), _BYTES))
            _rings[device.index] = first
        return _rings[device.index]
