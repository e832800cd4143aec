"""Stands in place of a model's forward until its first call, whose arguments are the example that the model is analysed on."""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.compiler import is_compiling

from hexa_fx.capture.copies import copied
from hexa_fx.errors import HexaError
from hexa_fx.runtime.call_kinds import why_not_analysed
from hexa_fx.runtime.guards import say_in_trace
from hexa_fx.runtime.signature import NoGlobals, SignatureOfOriginal

log = logging.getLogger(__name__)

Analyse = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]


class FirstCall:
    """A model's forward, which analyses the model when it is first called, goes away, and runs the model's own. Other threads wait.

    Args:
        model: the module that is called, referenced weakly.
        analyse: takes the model, the arguments of a call, and ``config``.
        config: what is handed on.
    """

    __signature__ = SignatureOfOriginal()
    __globals__ = NoGlobals()

    def __init__(self, model: nn.Module, analyse: Analyse, config: Any) -> None:
        self._own_original, self._analyse, self._config = model.__dict__.get("forward"), analyse, config
        self._bind(model)

    def _bind(self, model: nn.Module) -> None:
        self._model, self._lock, self._busy = weakref.ref(model), threading.RLock(), False
        self.__name__, self.__doc__ = "forward", type(model).forward.__doc__

    @property
    def module(self) -> nn.Module:
        """The model; raises `ReferenceError` once it is gone."""
        model = self._model()
        if model is None:
            raise ReferenceError("the model of this forward no longer exists; keep a reference to the model")
        return model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self.module
        if is_compiling():
            say_in_trace("the model", "it was not analysed before; call it once, or give hexa_fx.optimize an example")
        elif reason := "" if self._busy else why_not_analysed(model):
            log.warning("the model runs its own code, and is analysed in its next call: %s", reason)
        else:
            with self._lock:
                if not self._busy and model.__dict__.get("forward") is self:
                    self._busy = True  # the analysis itself may call the model
                    try:
                        self._analyse_call(model, args, kwargs)
                    finally:
                        self._busy = False
                        take_off(model)
        return self._now(model)(*args, **kwargs)

    def _now(self, model: nn.Module) -> Callable[..., Any]:
        """The forward in whose place this one was: the model itself may have become a rewritten block."""
        installed = model.__dict__.get("forward", self)
        if installed is not self:
            return installed  # type: ignore[no-any-return]
        return self._own_original or functools.partial(type(model).forward, model)

    def _analyse_call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            self._analyse(model, copied(args), copied(kwargs), self._config)
        except HexaError:
            raise
        except Exception:  # of the model's code, which the call itself then shows
            log.warning("the model runs its own code, since its first call could not be repeated", exc_info=True)

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: vars(self)[name] for name in ("_own_original", "_analyse", "_config")}
        return {**kept, "module": self.module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        model = state.pop("module")
        self.__dict__.update(state)
        self._bind(model)


def put_on(model: nn.Module, analyse: Analyse, config: Any) -> None:
    """Has a model analysed when it is first called."""
    model.__dict__["forward"] = FirstCall(model, analyse, config)


def take_off(model: nn.Module) -> Any:
    """Gives a model that waits for its first call its own forward back, and returns that; None if it is the class's."""
    waiting = model.__dict__.get("forward")
    if not isinstance(waiting, FirstCall):
        return None
    del model.__dict__["forward"]
    if waiting._own_original is not None:
        model.__dict__["forward"] = waiting._own_original
    return waiting._own_original


def own_forward(model: nn.Module) -> Any:
    """The forward of its own that a model that waits for its first call has; None if it is the class's."""
    waiting = model.__dict__.get("forward")
    return waiting._own_original if isinstance(waiting, FirstCall) else waiting
