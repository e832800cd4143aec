"""How a step is recorded: as a CUDA graph. A stand-in with the same three methods records on the host, in tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from hexa_fx.jit.background import builder


class Recording(Protocol):
    """A recorded step."""

    def replay(self) -> None:
        """Runs it on the memory that it was recorded with."""

    def reset(self) -> None:
        """Gives its memory back. Has to come before the process group ends, which waits for graphs that use it."""


class StepRecorder(Protocol):
    """Where steps run that are to be recorded."""

    def settled(self) -> bool:
        """Whether nothing is missing for the recording; else waits for it, and the step has to run once more."""

    def beside(self) -> Any:
        """A context for the steps before the recording."""

    def record(self, run: Callable[[], Any]) -> tuple[Recording, Any]:
        """Records ``run`` without its effects on tensors; also what it returned, in memory that replays fill."""


class CudaRecorder:
    """Records CUDA graphs, which share one pool of memory: none of them keeps anything between replays but what is held here."""

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device)
        self._pool: Any = None

    def settled(self) -> bool:
        """Kernels that are still being built would be replaced by torch's operators in the graph, for ever."""
        if not builder().left():
            return True
        builder().wait()
        return False

    @contextmanager
    def beside(self) -> Iterator[None]:
        """On a stream of its own, since what autograd keeps of a parameter remembers the stream that it first ran on."""
        before = torch.cuda.current_stream()
        self._side.wait_stream(before)
        with torch.cuda.stream(self._side):
            yield
        before.wait_stream(self._side)

    def record(self, run: Callable[[], Any]) -> tuple[Recording, Any]:
        torch.cuda.synchronize()
        graph, reason = torch.cuda.CUDAGraph(), None
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        before = generator.clone_state()
        # NCCL's own thread calls CUDA meanwhile
        recording = torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local")
        try:
            with torch.cuda.stream(torch.cuda.current_stream()), recording:
                try:
                    result = run()
                except Exception as error:
                    reason = error
                    raise
        except Exception as error:  # the end of a recording that failed, which says less and leaves its stream current
            generator.graphsafe_set_state(before)  # its own counts as recording for ever before torch 2.12
            raise (reason or error) from None
        self._pool = graph.pool()
        return graph, result
