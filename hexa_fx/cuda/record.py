"""Records a call of kernels: what it launched, what it allocated, and which other torch operators it ran.

Torch's dispatcher shows everything that a call does besides launching, so a recording is known to be complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hexa_fx.cuda.launch import LaunchPlan, noting

_ATEN = torch.ops.aten
_ALLOCATES = frozenset({_ATEN.empty.memory_format, _ATEN.new_empty.default, _ATEN.empty_like.default})


@dataclass(frozen=True)
class TorchCall:
    """One torch operator that a call ran, other than an allocation."""

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any

    @property
    def is_view(self) -> bool:
        """Whether it only returns other tensors on the same memory, so that it can be left out if nobody needs them."""
        given = {t.untyped_storage().data_ptr() for t in self.args if isinstance(t, Tensor)}
        out = self.result if isinstance(self.result, list | tuple) else [self.result]
        same = all(isinstance(t, Tensor) and t.untyped_storage().data_ptr() in given for t in out)
        return same and not self.function._schema.is_mutable


@dataclass
class Recording:
    """One recorded call.

    Args:
        result: what it returned.
        launches: its launches, in order.
        provisional: whether something else ran in place of a kernel that is not built yet.
        allocated: every tensor that it allocated; they live as long as the recording.
        calls: the other torch operators that it ran, in order.
    """

    result: Any = None
    launches: list[LaunchPlan] = field(default_factory=list)
    provisional: bool = False
    allocated: list[Tensor] = field(default_factory=list)
    calls: list[TorchCall] = field(default_factory=list)


class _TorchCallRecorder(TorchDispatchMode):
    """Sees the torch operators of this thread."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _ALLOCATES:
            self._recording.allocated.append(out)
        elif not any(out is a for a in args) or func._schema.is_mutable:  # else it did nothing
            self._recording.calls.append(TorchCall(func, args, kwargs or {}, out))
        return out


def record(run: Callable[[], Any]) -> Recording:
    """Runs `run` and writes down what it does. Its launches are queued as ever."""
    recording = Recording()
    with noting() as noted, _TorchCallRecorder(recording):
        recording.result = run()
    recording.launches, recording.provisional = noted.launches, noted.provisional
    return recording
