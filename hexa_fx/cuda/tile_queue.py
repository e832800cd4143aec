"""Two zeros in memory that a persistent kernel of the Hopper family takes its tiles by, and leaves zero."""

from __future__ import annotations

from threading import Lock

import torch
from torch import Tensor

QUEUES = 4096
_rings: dict[int, tuple[int, Tensor]] = {}
_turns: dict[int, int] = {}
_making = Lock()


def next_queue(device: torch.device) -> int:
    """Address of two zeros, which the kernel leaves zero, so that a ring of them serves all streams.

    A CUDA graph under capture gets zeros of its own, because its replays may overlap anything; their memory is reused only by
    what follows on the stream.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device).data_ptr()
    index = device.index
    if index not in _rings:
        _make_ring(device)
    turn = _turns[index] = (_turns.get(index, 0) + 1) % QUEUES
    return _rings[index][0] + 8 * turn


def _make_ring(device: torch.device) -> None:
    with _making:
        if device.index not in _rings:
            ring = torch.zeros(2 * QUEUES, dtype=torch.int32, device=device)
            torch.cuda.synchronize(device)  # once per process: another stream may use it next
            _rings[device.index] = (ring.data_ptr(), ring)
