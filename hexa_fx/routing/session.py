"""``record_routing`` and ``replay_routing``: the routing of a model's calls, noted or forced, block after block."""

from __future__ import annotations

import logging
import sys
import threading
from bisect import bisect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from hexa_fx.errors import InputError
from hexa_fx.isolation.module_tree import with_ancestors
from hexa_fx.routing.calls import EndedReplay, ModelCall, in_backward, is_nested, read_call, recomputed
from hexa_fx.routing.layers import Layer, check_fit, layers_of
from hexa_fx.routing.log import RoutingLog, smallest_dtype
from hexa_fx.routing.tap import RoutingTap
from hexa_fx.torch_private import _get_sequence_nr

log = logging.getLogger(__name__)

_EAGER = (
    "routing is recorded and replayed in eager mode only; run the model without torch.compile, which transformers' generate uses "
    "by itself for static caches on a GPU unless it gets disable_compile=True"
)


@contextmanager
def record_routing(model: nn.Module) -> Iterator[RoutingLog]:
    """A context that notes the experts of every token in every MoE block that `hexa_fx.optimize` rewrote.

    Every call of the model adds its sequences to the log: the rows of a batch, without what a two-dimensional
    ``attention_mask`` leaves out. A forward that checkpointing computes again adds nothing.

    Yields:
        The log, which grows with every call.

    Raises:
        InputError: the model has no rewritten block, or it is not known where the experts of one are chosen; inside the context
            if a block sees other tokens than the call has, or the model is compiled.
    """
    layers = layers_of(model)
    count, top_k = len(layers), [layer.site.top_k for layer in layers]
    experts = [layer.candidates for layer in layers]
    empty = torch.empty(0, count, max(top_k), dtype=smallest_dtype(max(experts)), device="cpu")
    found = RoutingLog(empty, (), experts, top_k, [layer.path for layer in layers])
    with _Session(model, layers, found, replay=False).running():
        yield found


@contextmanager
def replay_routing(model: nn.Module, routing: RoutingLog) -> Iterator[None]:
    """A context in which tokens go to the experts of a log; gate values, and their gradients, come from the live router.

    Calls take the log's tokens in order, in any split into batches, padding left out; where both a call and the log name
    sequences, their ends have to agree. Tokens that the log marks as live, and padding, go where the router sends them. Forwards
    that checkpointing computes again, for which backward has to run inside the context, see the ids of their call.

    Args:
        model: an optimized model, or something that holds it.
        routing: its layers are the model's rewritten blocks, in order.

    Raises:
        InputError: as for `record_routing`; the log is of other layers, experts or k; at a call, before the model runs, if the
            log's next tokens are not as many as the call's.
    """
    layers = layers_of(model)
    check_fit(layers, routing)
    session = _Session(model, layers, routing, replay=True)
    with session.running():
        yield
    if session.position < routing.tokens:
        log.warning("%d of the log's %d tokens were not replayed", routing.tokens - session.position, routing.tokens)


@dataclass
class _Session:
    """What runs while a context is open: hooks on the modules around blocks, and on those that hold routers."""

    model: nn.Module
    layers: list[Layer]
    routing: RoutingLog
    replay: bool
    position: int = 0
    calls: list[ModelCall] = field(default_factory=list)
    current: ModelCall | None = None
    noted: dict[int, Tensor] = field(default_factory=dict)
    _depth: int = 0
    _thread: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _handled: BaseException | None = None
    _again: ModelCall | None = None
    _taps: list[RoutingTap] = field(default_factory=list)
    _ends: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._dtype, self._width = self.routing.ids.dtype, self.routing.ids.shape[2]

    @contextmanager
    def running(self) -> Iterator[None]:
        around = {path for layer in self.layers for path in with_ancestors(layer.path)}
        handles = []
        for path in sorted(around):
            module = self.model.get_submodule(path)
            handles.append(module.register_forward_pre_hook(_Hook(self._enter), with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(_Hook(self._leave), always_call=True))
        for number, layer in enumerate(self.layers):
            layer.forward.called.append(_check_eager)  # compiled code skips hooks that were added since, but not this
            handles.append(layer.router.register_forward_pre_hook(_Hook(self._tap(number))))
            handles.append(layer.router.register_forward_hook(_Hook(self._untap), prepend=True, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            while self._taps:  # of a call that was interrupted
                self._taps.pop().__exit__(None, None, None)
            for layer in self.layers:
                layer.forward.called.remove(_check_eager)
            for called in [layer.forward.called for layer in self.layers] if self.replay else ():
                ended = next((told for told in called if isinstance(told, EndedReplay)), EndedReplay())
                ended.add(self.calls)
                called += [ended] if ended.calls and ended not in called else []

    # -- the model's calls -----------------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_compiling():
            raise InputError(_EAGER)
        if in_backward():
            return
        with self._lock:
            if self._depth and self._thread != threading.get_ident():
                raise InputError(
                    f"two threads call the model at once while routing is {self._done}; let one call end before the next begins"
                )
            self._depth, self._thread = self._depth + 1, threading.get_ident()
        if self._depth > 1:
            return
        try:
            call = read_call(module, args, kwargs)
            if self.replay:
                self._place(call)
        except InputError:
            self._depth = 0  # the hook that would count down is not reached
            raise
        self.current, self.noted, self._handled = call, {}, sys.exc_info()[1]
        self.calls.append(call)

    @property
    def _done(self) -> str:
        return "replayed" if self.replay else "recorded"

    def _place(self, call: ModelCall) -> None:
        """Finds the call's tokens in the log, or says why they are not there."""
        start, stop = self.position, self.position + call.tokens
        if stop > self.routing.tokens:
            raise InputError(
                f"the call has {call.tokens} tokens without padding, and the log has {self.routing.tokens - start} left of "
                f"{self.routing.tokens}"
            )
        if len(self._ends) != len(self.routing.lengths):
            self._ends = [*accumulate(self.routing.lengths)]
        ends = {*self._ends[bisect(self._ends, start) : bisect(self._ends, stop)]}
        own = {start + end for end in accumulate(call.lengths) if end}
        if min(len(self.routing.lengths), len(call.lengths)) > 1 and ends != own:
            place = min(ends ^ own) - start
            raise InputError(
                f"the sequences of the call do not end where those of the log do: the first difference is {place} tokens into "
                "the call; replay the sequences in the order in which they were recorded, or use RoutingLog.select"
            )
        call.start, self.position = start, stop

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if in_backward() or self._depth == 0 or self._thread != threading.get_ident():
            return
        self._depth -= 1
        call = self.current
        if self._depth or call is None:
            return
        self.current, call.last = None, _get_sequence_nr()
        if sys.exc_info()[1] is not self._handled:  # the call failed, and may be tried again
            self.position = call.start
            return
        missing = [layer.path for number, layer in enumerate(self.layers) if number not in self.noted]
        if missing:
            raise InputError(
                f"the routing of {', '.join(missing)} was not {self._done}: its router did not run through its module's call"
            )
        if not self.replay:
            padded = [
                nn.functional.pad(self.noted[n], (0, self._width - self.noted[n].shape[1]))
                for n in range(len(self.layers))
            ]
            self.routing.extend(torch.stack(padded, 1), call.lengths)

    # -- routers ---------------------------------------------------------------------------------------------------------

    def _tap(self, number: int) -> Callable[..., None]:
        layer = self.layers[number]

        def hook(module: nn.Module, args: Any) -> None:
            again = in_backward()
            call = self._recomputed() if again else self.current
            if call is None:
                raise InputError(
                    f"{layer.path} ran outside a call of the model; call the model, or a module that holds the block"
                )
            site = layer.sites.get(bool(module.training), layer.site)
            forced = self._ids(call, number, layer.site.top_k) if self.replay else None
            tap = RoutingTap(site, call, forced, layer.path)
            tap.note = None if again else self._note(number)
            if site.above == 0:
                layer.forward.restarted.append(tap.restart)
            self._taps.append(tap)
            tap.__enter__()

        return hook

    def _recomputed(self) -> ModelCall:
        if self._again is None or not is_nested():
            self._again = recomputed(self.calls)
        return self._again

    def _untap(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._taps:
            return
        tap = self._taps.pop()
        tap.__exit__(None, None, None)
        for layer in self.layers:
            if layer.router is module:
                layer.forward.restarted = [told for told in layer.forward.restarted if told != tap.restart]
        tap.finish(failed=output is None)

    def _note(self, number: int) -> Callable[[Tensor], None]:
        def note(ids: Tensor) -> None:
            if number in self.noted:
                raise InputError(
                    f"{self.layers[number].path} ran twice in one call of the model, which a log cannot tell apart"
                )
            self.noted[number] = ids.to(self._dtype)

        return note

    def _ids(self, call: ModelCall, number: int, top_k: int) -> tuple[Tensor, Tensor | None]:
        chosen = slice(call.start, call.start + call.tokens)
        live = None if self.routing.live is None else self.routing.live[chosen]
        return self.routing.ids[chosen, number, :top_k], live


class _Hook:
    """A hook for as long as a context is open. Copies and pickles of a model that are made meanwhile have one that does nothing."""

    def __init__(self, run: Callable[..., None]) -> None:
        self.run = run

    def __call__(self, *args: Any) -> None:
        self.run(*args)

    def __reduce__(self) -> tuple[type, tuple[Callable[..., None]]]:
        return type(self), (_nothing,)


def _check_eager() -> None:
    """Raises `InputError` under a compiler."""
    if is_compiling():
        raise InputError(_EAGER)


def _nothing(*args: Any) -> None:
    """Does nothing."""
