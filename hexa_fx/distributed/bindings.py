"""What a session sets on modules while it runs, and takes back when it is closed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling

from hexa_fx.distributed.saved_tensors import SavedTensors
from hexa_fx.errors import PlanError
from hexa_fx.runtime.install import HexaForward
from hexa_fx.runtime.program import Program


class Bindings:
    """Forwards that are wrapped, and how to undo it.

    Args:
        saved: autograd's hooks while a bound forward runs.
        guard: makes a context that names the place of a failed collective.
    """

    def __init__(self, saved: SavedTensors, guard: Callable[[str], AbstractContextManager[None]]) -> None:
        self._saved, self._guard = saved, guard
        self._undo: list[Callable[[], None]] = []

    def bind(self, module: nn.Module, label: str, traced: Mapping[str, Program]) -> None:
        """Wraps a module's forward, or the programs inside a rewritten one, so that its guards, copies and signature stay."""
        forward = module.forward
        if not isinstance(forward, HexaForward):
            self._set(module.__dict__, "forward", self._wrapped(forward, label, None))
            return
        modes = {"train": forward.programs[True], "eval": forward.programs[False]}
        for mode, program in {id(p): (mode, p) for mode, p in modes.items() if p is not None}.values():
            instead = traced.get(mode)
            function = self._wrapped(program.function, label, None if instead is None else instead.function)
            self._set(program.__dict__, "function", function)

        def refuse(*_: Any, **__: Any) -> Any:
            raise PlanError(
                f"{label!r} was called in a way it was not recorded for (see the log). Its expert weights are cut, so its "
                "original forward cannot run: record with such inputs, in both train and eval mode"
            )

        self._set(forward.__dict__, "_own_original", refuse)

    def before_forward(self, model: nn.Module, begin: Callable[[], None]) -> None:
        """Calls ``begin`` whenever a forward of the model begins."""
        self._undo.append(model.register_forward_pre_hook(lambda *_: begin(), prepend=True).remove)

    def undo(self) -> None:
        """Gives modules their forward back."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _wrapped(
        self, function: Callable[..., Any], label: str, traced: Callable[..., Any] | None
    ) -> Callable[..., Any]:
        guard = self._guard(f"forward of {label!r}")

        @functools.wraps(function)
        def bound(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return traced(*args, **kwargs) if traced is not None else untraced(*args, **kwargs)
            self._saved.enter_bound()
            try:
                with guard:
                    return function(*args, **kwargs)
            finally:
                self._saved.leave_bound()

        untraced = torch.compiler.disable(bound, reason="experts in a form that is not traced: lists, or DTensors")
        return bound

    def _set(self, owner: dict[str, Any], name: str, value: Any) -> None:
        self._undo.append(functools.partial(owner.__setitem__, name, owner.get(name)))
        owner[name] = value
