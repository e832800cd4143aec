"""Sends gradients of gathered weights to their owners, while backward goes on with earlier layers.

The reduce-scatter of a layer runs on a communicator of its own, beside the attention of that layer and the experts of the one
before. Its result reaches the parameters when the next reduction begins, or at the end of backward. One reduction is under way at
a time, so memory does not grow with the number of layers.

If the gradient were returned, autograd would wait for it. It is therefore added to ``parameter.grad`` here, as FSDP does. That is
equivalent only where autograd would have done nothing but add; `destinations` and `can_defer` decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hexa_fx.distributed.collectives import Works, start_scatter
from hexa_fx.distributed.groups import Groups
from hexa_fx.distributed.lockstep import guarded
from hexa_fx.ops.library import DirectFunction
from hexa_fx.ops.listed import Stack, separated


class LocalWeight(DirectFunction):
    """As `DTensor.to_local`, for less of the host's time. A gradient that does not arrive (`reductions`) stays missing."""

    @staticmethod
    def forward(ctx: Any, weight: DTensor) -> Tensor:
        ctx.parameter = weight
        ctx.set_materialize_grads(False)
        return weight._local_tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> DTensor | None:
        return None if grads[0] is None else as_gradients(ctx.parameter, grads[0])[0]


def as_gradients(parameter: Any, local: Tensor) -> tuple[DTensor]:
    """The gradient of a rank's slice, complete for its channels, as one of the parameter."""
    return (DTensor(local, parameter._spec, requires_grad=False),)  # what from_local makes, after a dozen checks


class GradientReductions:
    """The reduction under way, if any. Everything happens in the order of the layers, which is the same on all ranks."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.deferred = 0
        self._guards: dict[str, guarded] = {}
        self._pending: list[tuple[str, Callable[[], None]]] = []
        self._called_back = -1

    def guard(self, layer: str) -> guarded:
        """A context for handling a layer's gradients, which names the layer in errors."""
        known = self._guards.get(layer)
        if known is None:
            known = self._guards[layer] = guarded(f"the gradient reduction of {layer!r}")
        return known

    def start(self, rows: Tensor, shards: Sequence[int]) -> tuple[Tensor, Works]:
        """Starts to sum (I, row) partial sums. Returns this rank's rows of the result, and what to wait for."""
        return start_scatter(rows, shards, self.groups.reduce_name)

    def defer(self, layer: str, deliver: Callable[[], None]) -> None:
        """Delivers a sum later: when the next one starts, or when the current backward ends."""
        self._pending.append((layer, deliver))
        self.deferred += 1
        task = torch._C._current_graph_task_id()
        if task != self._called_back:
            self._called_back = task
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def finish(self) -> None:
        """Waits for what is under way and gives it to the parameters."""
        pending, self._pending = self._pending, []
        for layer, deliver in pending:
            with self.guard(layer), torch.no_grad():
                deliver()

    def forget(self) -> None:
        """Drops what an interrupted backward left behind."""
        self._pending.clear()


# --- where a gradient goes -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Destination:
    """Where autograd would add a weight's gradient.

    Args:
        parameters: the weight itself, the parameters that lie side by side in it, or the DTensor whose local part it is.
        split: the weight's gradient as one a parameter.
    """

    parameters: tuple[Tensor, ...]
    split: Callable[[Tensor], Sequence[Tensor]] = lambda grad: (grad,)

    def add(self, grad: Tensor) -> None:
        for parameter, part in zip(self.parameters, self.split(grad)):
            if not parameter.requires_grad:
                continue
            kept = parameter.grad
            if kept is None:
                parameter.grad = part
            elif type(part) is DTensor and type(kept) is DTensor and kept._spec is part._spec:
                kept._local_tensor += part._local_tensor  # DTensor's own addition is thirty calls of Python functions
            else:
                kept.add_(part)


def destinations(weights: Sequence[Tensor | None]) -> tuple[Destination | None, ...]:
    """One per weight; None where there is no weight, or where autograd would do more than add."""
    return tuple(None if w is None else _destination(w) for w in weights)


def _destination(weight: Tensor) -> Destination | None:
    node: Any = weight.grad_fn
    if node is None:
        return Destination((weight,))
    if isinstance(node, _LOCAL):
        parameter = node.parameter
        return Destination((parameter,), partial(as_gradients, parameter)) if parameter.is_leaf else None
    return Destination(node.parameters, partial(separated, sizes=node.sizes)) if isinstance(node, _OF_COPIES) else None


_OF_COPIES: type[Any] = getattr(Stack, "_backward_cls")  # noqa: B009
_LOCAL: type[Any] = getattr(LocalWeight, "_backward_cls")  # noqa: B009


def is_copy(weight: Tensor) -> bool:
    """Whether a weight is a copy of parameters of a list, which later values of these do not reach."""
    return isinstance(weight.grad_fn, _OF_COPIES)


def origin(weight: Tensor) -> Tensor | None:
    """The parameter that a weight is, or is the local part of; None where it is the result of another computation."""
    node: Any = weight.grad_fn
    if node is None:
        return weight
    found: Tensor | None = node.parameter if isinstance(node, _LOCAL) else None
    return found


def can_defer(node: Any, weights: Sequence[Tensor | None], targets: Sequence[Destination | None]) -> bool:
    """Whether a backward may add to the parameters itself: no hook needs the gradients, and nobody asked for their values.

    Args:
        node: the autograd node in its backward; its first inputs are the weights, or what they were detached from.
        targets: of every weight.
    """
    edges = iter(node.next_functions)  # torch keeps none of an input that is None
    for weight, need, target in zip(weights, node.needs_input_grad, targets):
        source = None if weight is None else next(edges)[0]
        if need and (target is None or any(map(_has_hooks, target.parameters)) or not _will_run(source)):
            return False
    return True


def _has_hooks(parameter: Tensor) -> bool:
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def _will_run(source: Any) -> bool:
    leaves = [node for node, _ in source.next_functions if node is not None] or [source]
    try:
        return all(map(torch._C._will_engine_execute_node, leaves))
    except RuntimeError:  # torch.autograd.grad was asked for the gradient of a parameter
        return False
