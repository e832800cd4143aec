"""Partitioned layers inside graphs of torch.compile: an operator each way, in which a layer runs as it does outside.

Collectives that are waited for elsewhere, slots of a shared cache and hooks on saved tensors cannot be traced. So a compiled graph
holds `hexa::spread_experts` and `hexa::spread_experts_backward`, with fake versions for tracing. Between the two, autograd's record
of the layer is kept here. Gathers of a compiled layer begin when it is reached.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from hexa_fx.distributed.shared_cache import SavedTensors
from hexa_fx.errors import PlanError

_layers: WeakValueDictionary[str, CompiledLayers] = WeakValueDictionary()
_KEPT = 1024
"""Calls whose backward may still come. Those of a step that ends without backward are dropped when so many came after them."""

Tensors = list[Tensor | None]


class CompiledLayers:
    """The layers of a session, as functions of local tensors, and their calls that wait for backward.

    Args:
        name: the session's.
        guard: makes a context that names the place of a failed collective.
    """

    def __init__(self, name: str, saved: SavedTensors, guard: Callable[[str], AbstractContextManager[None]]) -> None:
        self.programs: dict[str, Callable[..., Tensor]] = {}
        self._saved, self._guard = saved, guard
        self._numbers = itertools.count()
        self._calls: dict[int, tuple[str, Tensors, Tensor]] = {}
        _layers[name] = self

    def forward(
        self, layer: str, tensors: Tensors, needs: Sequence[bool], autocast: torch.dtype | None
    ) -> tuple[Tensor, Tensor]:
        """The layer's output, and the number of the call; -1 if nothing needs a gradient."""
        inputs = [None if t is None else t.detach().requires_grad_(need) for t, need in zip(tensors, needs)]
        device = next(t.device.type for t in tensors if t is not None)
        under = nullcontext() if autocast is None else torch.autocast(device, dtype=autocast, cache_enabled=False)
        self._saved.enter_bound()
        try:
            with self._guard(f"forward of {layer!r}"), _as_outside(), torch.set_grad_enabled(any(needs)), under:
                y = self.programs[layer](*inputs)
        finally:
            self._saved.leave_bound()
        if not any(needs):
            return y, torch.tensor(-1, device="cpu")
        number = next(self._numbers)
        self._calls[number] = layer, inputs, y
        self._calls.pop(number - _KEPT, None)
        return y.detach(), torch.tensor(number, device="cpu")

    def backward(self, number: int, grad: Tensor) -> list[Tensor]:
        """Gradients of the inputs that need one."""
        if number not in self._calls:
            raise PlanError(
                "backward of a compiled layer runs twice, or its forward is long past: it is kept for one backward"
            )
        layer, inputs, y = self._calls.pop(number)
        wanted = [t for t in inputs if t is not None and t.requires_grad]
        with self._guard(f"backward of {layer!r}"), _as_outside():
            grads = torch.autograd.grad(y, wanted, grad, allow_unused=True)
        return [torch.zeros_like(t) if g is None else g.contiguous() for t, g in zip(wanted, grads)]


_OUTSIDE = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def _as_outside() -> Any:
    """A context in which autograd works as it does outside of operators; within one it is switched off."""
    return torch._C._ForceDispatchKeyGuard(*_OUTSIDE)


def _of(session: str) -> CompiledLayers:
    found = _layers.get(session)
    if found is None:
        raise PlanError(
            f"the compiled graph belongs to partition session {session!r}, which is gone: compile the model again"
        )
    return found


_LIBRARY = torch.library.Library("hexa", "FRAGMENT")
_LIBRARY.define(
    "spread_experts(Tensor?[] tensors, bool[] needs, str layer, str session, ScalarType? autocast) -> (Tensor, Tensor)"
)
_LIBRARY.define("spread_experts_backward(Tensor grad, Tensor call, Tensor[] like, str session) -> Tensor[]")


def _forward(
    tensors: Tensors, needs: Sequence[bool], layer: str, session: str, autocast: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    return _of(session).forward(layer, tensors, needs, autocast)


def _fake_forward(
    tensors: Tensors, needs: Sequence[bool], layer: str, session: str, autocast: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    x = tensors[0]
    assert x is not None
    return x.new_empty(x.shape, dtype=autocast or x.dtype), torch.empty((), dtype=torch.int64, device="cpu")


def _backward(grad: Tensor, call: Tensor, like: list[Tensor], session: str) -> list[Tensor]:
    return _of(session).backward(int(call), grad)


def _fake_backward(grad: Tensor, call: Tensor, like: list[Tensor], session: str) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in like]


for _name, _kernel, _fake in (
    ("spread_experts", _forward, _fake_forward),
    ("spread_experts_backward", _backward, _fake_backward),
):
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hexa::{_name}", _fake, lib=_LIBRARY)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, layer: str, session: str, autocast: Any, needs: list[bool], *tensors: Tensor | None
    ) -> Tensor:
        y, call = torch.ops.hexa.spread_experts(list(tensors), needs, layer, session, autocast)
        ctx.session, ctx.needs = session, needs
        ctx.save_for_backward(call, *[t for t, need in zip(tensors, needs) if need and t is not None])
        result: Tensor = y
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        call, *like = ctx.saved_tensors
        found = iter(torch.ops.hexa.spread_experts_backward(grads[0].contiguous(), call, like, ctx.session))
        return (None, None, None, None, *[next(found) if need else None for need in ctx.needs])


def spread_experts(layer: str, session: str, *tensors: Tensor | None) -> Tensor:
    """A partitioned layer in a graph that is traced: x, ids, routing weights, and this rank's weights and biases."""
    x = tensors[0]
    assert x is not None
    device = x.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    needs = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in tensors]
    if not any(needs):
        return torch.ops.hexa.spread_experts(list(tensors), needs, layer, session, autocast)[0]  # type: ignore[no-any-return]
    return _Spread.apply(layer, session, autocast, needs, *tensors)  # type: ignore[no-any-return]
