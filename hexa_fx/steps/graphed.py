"""A training step as a CUDA graph: recorded once, replayed by one call of the host.

Every call does the step exactly once, whichever way; of a partitioned model all ranks the same way, on which they agree before each
call. The first calls run as they are; so does, with a sentence, whatever a graph cannot repeat.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hexa_fx.errors import InputError, PlanError, RankError, first_line
from hexa_fx.steps.context import OneDevice, StepContext
from hexa_fx.steps.recorder import CudaRecorder, Recording, StepRecorder
from hexa_fx.steps.signature import Call, HostState, Optimizers, difference

log = logging.getLogger(__name__)

_MOST = 8
_AS_IT_IS, _WARM_UP, _RECORD, _REPLAY = range(4)


def graphed(step: Callable[..., Any], model: nn.Module, warmup: int = 3) -> GraphedStep:
    """The training step ``step(*tensors)`` as a CUDA graph: the host makes one call in place of thousands.

    Where layers are small the host takes longer than the device, which then waits. Rules are those of docs/training.md#cuda-graphs:
    Python code in the step runs only while it is recorded, so everything that changes between steps is a tensor on the device.

    Args:
        step: forward and backward, and what else of the step is to be in the graph, such as the optimizer.
        model: whose parameters the step trains, all on one device, FSDP2's shards too. On a CPU the step runs as it is.
        warmup: how often a kind of call runs as it is before it is recorded, 1 or more.

    Returns:
        The step, to be called in its place. ``replays`` counts what was replayed, ``reason`` says why nothing is recorded.

    Raises:
        InputError: ``model`` is no module, or ``warmup`` is below 1.
    """
    if not isinstance(model, nn.Module) or next(model.parameters(), None) is None:
        raise InputError(
            f"model is a {type(model).__name__}; expected the nn.Module that the step trains, with parameters"
        )
    return GraphedStep(OneDevice(model), step, warmup)


@dataclass
class _Recorded:
    """What a replay needs.

    Args:
        inputs: the tensors that it reads in the places of the arguments.
        outputs: what the step returned, in memory that replays fill.
        gradients: of every parameter after the step.
        added_to: gradients that the step adds to, so that they have to be in this memory when it begins.
        held: memory that the graph uses and somebody else might give up.
    """

    recording: Recording
    inputs: list[Tensor]
    outputs: Any
    gradients: list[Tensor | None]
    added_to: list[Tensor | None]
    optimizers: Optimizers
    held: list[Any]


@dataclass(eq=False)
class _Known:
    """One kind of call: how often it ran, what hosts told each other in it last, and its recording."""

    call: Call
    runs: int = 0
    notes: list[Any] = field(default_factory=list)
    recorded: _Recorded | None = None
    said: set[str] = field(default_factory=set)


class GraphedStep:
    """A step that is recorded after its first calls and replayed from then on. Made by `graphed` and `PartitionSession.graphed`.

    Args:
        step: does a training step on tensors that are on the device, and returns tensors.
        warmup: calls of a kind that run as they are before one is recorded.
        recorder: where and how; by default a CUDA graph on the model's device.
    """

    def __init__(
        self, context: StepContext, step: Callable[..., Any], warmup: int = 3, recorder: StepRecorder | None = None
    ) -> None:
        if warmup < 1:  # what optimizers make in their first step would be made anew in every replay
            raise InputError(f"warmup is the number of steps before a recording, 1 or more, got {warmup}")
        self.reason = ""
        """Why steps run as they are from now on; empty while they may be recorded."""
        self.replays, self._ended = 0, False
        self._context, self._step, self._warmup = context, step, warmup
        self._known: list[_Known] = []
        devices = {parameter.device for parameter in context.model.parameters()}
        self._device = min(devices, key=str)
        if recorder is None and (obstacle := _no_place(devices)):
            self._give_up(obstacle)
        self._recorder = recorder or (None if self.reason else CudaRecorder(self._device))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Does the step. What a replay returns are copies; gradients lie in memory that the next replay overwrites.

        Raises:
            PlanError: the session is closed, or has made way for another plan.
        """
        if self._ended:
            raise PlanError(
                "this step belongs to a plan that was closed or exchanged: make it anew, model.partition.graphed(step)"
            )
        if self._recorder is None:
            return self._step(*args, **kwargs)
        call = Call.of(args, kwargs, self._context.model)
        known = self._find(call)
        how = self._agreed(call, known)
        if known is not None and known.recorded is not None and how == _REPLAY:
            return self._replay(call, known.recorded)
        if known is not None and how == _RECORD:
            return self._record(call, known)
        known = known or next((kind for kind in self._known if kind.call is call), _Known(call))
        known.runs += 1
        known.notes.clear()
        with self._recorder.beside(), self._context.following(known.notes):
            return self._step(*args, **kwargs)

    def reset(self) -> None:
        """Gives up the recordings and their memory. The next calls begin anew."""
        for known in self._known:
            if known.recorded is not None:
                known.recorded.recording.reset()
        self._known.clear()

    def end(self) -> None:
        """Called when its session closes, after which it cannot run."""
        self.reset()
        self._ended = True

    # --- which way a call goes --------------------------------------------------------------------------------------

    def _find(self, call: Call) -> _Known | None:
        for known in self._known:
            if known.call.signature == call.signature:
                return known
        latest = next((known for known in reversed(self._known) if known.recorded), None)
        if latest is not None:
            self._say(latest, difference(latest.call.signature, call.signature))
        return None

    def _wish(self, known: _Known | None) -> int:
        assert self._recorder is not None
        if known is None:
            return _AS_IT_IS
        if known.recorded is not None:
            changed = known.recorded.optimizers.change()
            self._say(known, changed)
            return _AS_IT_IS if changed else _REPLAY
        if known.runs < self._warmup or not self._recorder.settled():
            return _WARM_UP
        return _RECORD

    def _agreed(self, call: Call, known: _Known | None) -> int:
        """What all ranks wish; where they differ, the step runs as it is. A kind that is new to all of them gets its number."""
        mine = [self._wish(known), -1 if known is None else self._known.index(known)]
        wishes = self._context.gathered(mine)
        if any(other != mine for other in wishes):
            self._say(known, "the ranks' calls are of different kinds")
            return _AS_IT_IS
        if known is None and len(self._known) < _MOST:
            self._known.append(_Known(call))
        return mine[0]

    def _say(self, known: _Known | None, what: str) -> None:
        if known is not None and what and what not in known.said:
            known.said.add(what)
            log.warning("a step runs without its CUDA graph: %s", what)

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        self._recorder = None
        log.warning("steps run without a CUDA graph: %s", reason)

    # --- recording and replaying ------------------------------------------------------------------------------------

    def _record(self, call: Call, known: _Known) -> Any:
        parameters, host = list(self._context.model.parameters()), HostState()
        before = [p.grad for p in parameters]
        problem = next((said for tensor in call.tensors if (said := _obstacle(tensor, self._device))), "")
        if not problem:
            problem, known.recorded = self._try(call, parameters, before, host, known.notes)
        failed = [rank for rank, (bad,) in enumerate(self._context.gathered([int(bool(problem))])) if bad]
        if not failed:
            assert known.recorded is not None
            return self._replay(call, known.recorded)
        self._context.abandon()
        self.reset()
        for parameter, grad in zip(parameters, before):
            parameter.grad = grad
        host.restore()
        assert self._recorder is not None
        self._recorder.forget()
        self._give_up(problem or f"ranks {failed} could not record it")
        args, kwargs = call.with_tensors(call.tensors)
        return self._step(*args, **kwargs)

    def _try(
        self,
        call: Call,
        parameters: list[nn.Parameter],
        before: list[Tensor | None],
        host: HostState,
        notes: list[Any],
    ) -> tuple[str, _Recorded | None]:
        assert self._recorder is not None
        inputs, optimizers, context = [t.detach().clone() for t in call.tensors], host.optimizers, self._context
        args, kwargs = call.with_tensors(inputs)

        def run() -> Any:
            result = self._step(*args, **kwargs)
            context.settle()
            return pytree.tree_map_only(Tensor, Tensor.detach, result)

        context.settle()
        try:
            with optimizers.noted(), context.following(notes):
                recording, outputs = self._recorder.record(run)
        except RankError:
            raise
        except Exception as error:
            return f"it cannot be recorded: {first_line(error)}", None
        after = [p.grad for p in parameters]
        added_to = [old if old is new else None for old, new in zip(before, after)]
        done = _Recorded(recording, inputs, outputs, after, added_to, optimizers, context.held())
        return host.change(), done

    def _replay(self, call: Call, recorded: _Recorded) -> Any:
        parameters = list(self._context.model.parameters())
        with torch.no_grad():
            for read, given in zip(recorded.inputs, call.tensors):
                read.copy_(given, non_blocking=True)
            for parameter, kept in zip(parameters, recorded.added_to):
                if kept is not None and parameter.grad is not None and parameter.grad is not kept:
                    kept.copy_(parameter.grad)
        recorded.recording.replay()
        self.replays += 1
        for parameter, grad in zip(parameters, recorded.gradients):
            if parameter.grad is not grad:
                parameter.grad = grad
        if recorded.optimizers.seen:  # who keeps something made of the weights asks for their versions
            torch.autograd.graph.increment_version(parameters)
        return pytree.tree_map_only(Tensor, Tensor.clone, recorded.outputs)


def _obstacle(tensor: Tensor, device: torch.device) -> str:
    if tensor.requires_grad:
        return "an argument requires a gradient, which a replay would not deliver"
    if tensor.device != device:
        return f"an argument is on {tensor.device} and the model on {device}: move it there before the call"
    return ""


def _no_place(devices: set[torch.device]) -> str:
    """Why no graph can be recorded on these; empty if one can."""
    if len(devices) > 1:
        return f"the model is on several devices, {sorted(map(str, devices))}"
    kind = next(iter(devices)).type
    return "" if kind == "cuda" else f"the model is on a {kind}, which has no graphs"
