"""How a step is recorded: as a CUDA graph. A stand-in with the same methods records on the host, in tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch

from hexa_fx.jit.background import builder
from hexa_fx.torch_private import _cuda_endAllocateToPool, _cuda_releasePool


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

    def forget(self) -> None:
        """Gives back what a recording that failed took, once nobody holds its error."""


class CudaRecorder:
    """Records CUDA graphs, which share one pool of memory: none of them keeps anything between replays but what is held here."""

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()

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
        graph = torch.cuda.CUDAGraph()
        reason: Exception | None = None
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
            reason = reason or error
        if reason is None:
            return graph, result
        generator.graphsafe_set_state(before)  # its own counts as recording for ever before torch 2.12
        try:
            raise reason  # out here, else the two and their frames would refer to each other and keep what the step made
        finally:
            reason = None  # whose traceback has this frame

    def forget(self) -> None:
        """torch would count it as recording for ever, and free nothing that is cached where memory is short (pytorch#180395).

        Nor would it give up the pool (pytorch#190348). Versions that do have nothing left of it here.
        """
        with suppress(RuntimeError):
            _cuda_endAllocateToPool(self._side.device_index, self._pool)
        torch.cuda.empty_cache()
        segments = [part for part in torch.cuda.memory_snapshot() if part["segment_pool_id"] == self._pool]
        if any(part["active_size"] == 0 for part in segments):
            _cuda_releasePool(self._side.device_index, self._pool)
            torch.cuda.empty_cache()
