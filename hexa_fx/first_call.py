"""Stands in place of forwards of a model until their first calls, whose arguments are the examples that it is analysed on.

The model itself waits, and so does each of its modules around what may be experts: code that calls a part of a model only, or a
branch that the first call does not take, is analysed when that is called.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling, is_dynamo_compiling

from hexa_fx.capture.copies import copied
from hexa_fx.capture.observe import NEVER_CALLED, ancestors_of_suspects
from hexa_fx.contexts import attributes_set
from hexa_fx.errors import HexaError
from hexa_fx.isolation.module_tree import named_modules
from hexa_fx.isolation.shadow import InPlace
from hexa_fx.runtime.call_kinds import why_not_analysed
from hexa_fx.runtime.forward import FORWARD, INSIDE_HOOK, PUT_ON, REPLICATE, take_off
from hexa_fx.runtime.guards import NoGlobals, SignatureOfOriginal, say_in_trace
from hexa_fx.torch_private import graph_break

log = logging.getLogger(__name__)

Analyse = Callable[[nn.Module, str, Any, tuple[Any, ...], dict[str, Any]], None]


@dataclass
class Shared:
    """What the modules of one model that wait for their calls have in common. Copies of the model have their own.

    Args:
        analyse: takes a module, its path, the forward that its instance has of its own, and the arguments of its call.
        busy: the thread that analyses, which itself may call modules.
        within: whether a thread is in a call that was analysed, with all that it calls.
    """

    analyse: Analyse
    lock: Any = field(default_factory=threading.RLock)
    busy: int | None = None
    within: Any = field(default_factory=threading.local)

    def __getstate__(self) -> Analyse:
        return self.analyse

    def __setstate__(self, analyse: Analyse) -> None:
        self.__init__(analyse)  # type: ignore[misc]


class FirstCall(InPlace):
    """A module's forward that analyses it when it is first called, goes away, and runs the module's own. Other threads wait.

    Args:
        module: the module that is called, referenced weakly.
        path: its path in the model.
        shared: what all of the model's share.
    """

    __signature__ = SignatureOfOriginal()
    __globals__ = NoGlobals()

    def __init__(self, module: nn.Module, path: str, shared: Shared) -> None:
        self.own_forward, self._path, self._shared = module.__dict__.get(FORWARD), path, shared
        self._bind(module)

    def _bind(self, module: nn.Module) -> None:
        self._instead: Callable[..., Any] | None = None
        self._module = weakref.ref(module)
        self.__name__, self.__doc__ = "forward", type(module).forward.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, shared = self.module, self._shared
        slot = next((slot for slot in (FORWARD, INSIDE_HOOK) if vars(module).get(slot) is self), "")
        if is_dynamo_compiling():
            graph_break(_BEFORE_FULLGRAPH)  # which fullgraph=True makes an error
            return torch.compiler.disable(self)(*args, **kwargs)
        if is_compiling():
            say_in_trace("the model", "it was not analysed before; call it once, or give hexa_fx.optimize an example")
        elif getattr(shared.within, "on", False) or not self._waits(module):
            self.go(module)
        elif shared.busy != threading.get_ident():
            if reason := why_not_analysed():
                said = f"{self._path or 'the model'} runs its own code, and is analysed in its next call: %s"
                log.warning(said, reason)
            else:
                failed = self._analyse_call(module, args, kwargs)
                with attributes_set(shared.within, on=True):
                    result = self._now(module, slot)(*args, **kwargs)
                if failed is not None:  # though the call itself succeeded; else the next one is analysed
                    said = f"{self._path or 'the model'} runs its own code, since its first call could not be repeated"
                    log.warning(said, exc_info=failed)
                    let_go(module)
                return result
        return self._now(module, slot)(*args, **kwargs)

    def _waits(self, module: nn.Module) -> bool:
        """Whether it was not taken off since, wherever it lies: something else may lie in front of it."""
        return waiting_of(module) is self

    def go(self, module: nn.Module) -> None:
        """Takes it off its module."""
        if self._waits(module) or REPLICATE not in vars(module):  # else that is of a block that was rewritten meanwhile
            take_off(module, self, self.own_forward)

    def _now(self, module: nn.Module, slot: str) -> Callable[..., Any]:
        """The forward in whose place this one was: the module itself may have become a rewritten block."""
        installed = vars(module).get(slot, self._instead or self)
        if installed is not self:
            return installed  # type: ignore[no-any-return]
        return self.own_forward or functools.partial(type(module).forward, module)

    def _analyse_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
        """Analyses the module, which then waits no more. It waits on if the user ends it, or the model's code raises what is
        returned.
        """
        with self._shared.lock:
            if not self._waits(module):  # another thread was faster
                return None
            own, there = vars(module), {slot: vars(module)[slot] for slot in PUT_ON if slot in vars(module)}
            try:
                with self._in_front(module), attributes_set(self._shared, busy=threading.get_ident()):
                    self._shared.analyse(module, self._path, self.own_forward, copied(args), copied(kwargs))
            except HexaError:
                let_go(module)
                raise
            except BaseException as error:
                own.update(there)
                if not isinstance(error, Exception):
                    raise
                return error
            self.go(module)
            return None

    @contextmanager
    def _in_front(self, module: nn.Module) -> Iterator[None]:
        """A context in which it lies in its slot, where what was made of the module is put. What wraps it, as accelerate's mixed
        precision does, lies there again at the end, and goes on calling this one, which calls what was put there.
        """
        own, before = vars(module), vars(module).get(FORWARD)
        if before in (self, None) or INSIDE_HOOK in own:
            yield
            return
        own[FORWARD] = self
        try:
            yield
        finally:
            self._instead, own[FORWARD] = own.get(FORWARD), before

    def replica(self) -> nn.Module:
        """What `torch.nn.DataParallel` makes of the module for another device: it runs its own code, on its own weights."""
        module: Any = self.module
        made: nn.Module = type(module)._replicate_for_data_parallel(module)
        take_off(made, self, self.own_forward)
        return made

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: vars(self)[name] for name in ("own_forward", "_path", "_shared")}
        return {**kept, "module": self.module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        module = state.pop("module")
        self.__dict__.update(state)
        self._bind(module)


def put_on(model: nn.Module, analyse: Analyse) -> None:
    """Has a model analysed when it is first called, and modules around what may be experts when they are called without it."""
    shared, modules = Shared(analyse), dict(named_modules(model))
    for path in {"", *ancestors_of_suspects(model)} & modules.keys():
        module = modules[path]
        if not isinstance(module, (torch.jit.ScriptModule, *NEVER_CALLED)):
            call = FirstCall(module, path, shared)
            module.__dict__.update({FORWARD: call, REPLICATE: call.replica})


_BEFORE_FULLGRAPH = (
    "hexa_fx has not analysed the model yet: call it once before torch.compile(fullgraph=True), "
    "or give hexa_fx.optimize an example"
)


def waiting_of(module: nn.Module) -> FirstCall | None:
    """What has a module wait for its first call."""
    found = getattr(vars(module).get(REPLICATE), "__self__", None)
    return found if isinstance(found, FirstCall) else None


def let_go(model: nn.Module) -> None:
    """Gives modules of a model that wait for their first calls their own forwards back."""
    for module in model.modules():
        if (waiting := waiting_of(module)) is not None:
            waiting.go(module)
