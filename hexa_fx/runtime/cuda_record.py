"""Records a call of kernels: what it launched, what it allocated, and whether it did anything else.

Torch's dispatcher shows everything else that a call does. So if `Recording.other` is empty, the recording is known to be complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hexa_fx.runtime.cuda_launch import Launch, noting

_ATEN = torch.ops.aten
_ALLOCATES = frozenset({_ATEN.empty.memory_format, _ATEN.new_empty.default, _ATEN.empty_like.default})
_VIEWS = frozenset({_ATEN.transpose.int, _ATEN.view.default, _ATEN.detach.default})


@dataclass
class Recording:
    """One recorded call.

    Args:
        result: what it returned.
        launches: its launches, in order.
        allocated: every tensor that it allocated; they live as long as the recording.
        other: the torch operators that it ran and that neither allocate nor view.
    """

    result: Any = None
    launches: list[Launch] = field(default_factory=list)
    allocated: list[Tensor] = field(default_factory=list)
    other: list[str] = field(default_factory=list)


class _Watch(TorchDispatchMode):
    """Notes the torch operators that this thread runs."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _ALLOCATES:
            self._recording.allocated.append(out)
        elif func not in _VIEWS:
            self._recording.other.append(str(func))
        return out


def record(run: Callable[[], Any]) -> Recording:
    """Calls `run` and records what it does. Its launches are queued as usual."""
    recording = Recording()
    with noting() as recording.launches, _Watch(recording):
        recording.result = run()
    return recording
