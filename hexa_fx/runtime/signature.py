"""Binds a forward's arguments to names, without the cost of `inspect` at every call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from hexa_fx.runtime.guards import GuardMiss


@dataclass(frozen=True)
class ArgumentNames:
    """The names of a forward's arguments.

    Args:
        positional: names that positional arguments fill, in order.
        accepted: names that keywords may use besides.
        defaults: values of arguments that were left out.
        open_ended: whether any other keyword is taken too (``**kwargs``).
        rest: name of ``*args``, if there is one.
    """

    positional: tuple[str, ...]
    accepted: frozenset[str]
    defaults: Mapping[str, Any]
    open_ended: bool
    rest: str | None = None

    @classmethod
    def of(cls, forward: Callable[..., Any], unbound: bool) -> ArgumentNames:
        parameters = list(inspect.signature(forward).parameters.values())[1 if unbound else 0 :]
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return cls(
            positional=tuple(p.name for p in parameters if p.kind in by_position),
            accepted=frozenset(p.name for p in parameters if p.kind in by_name),
            defaults={p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty},
            open_ended=any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters),
            rest=next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), None),
        )

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name: those of ``**kwargs`` under their own names, those of ``*args`` as ``args_0``, ...

        Raises:
            GuardMiss: too many arguments or an unknown keyword; the original then says what is wrong.
        """
        values = dict(self.defaults)
        given = self.positional[: len(args)]
        values.update(zip(given, args))
        if len(args) > len(self.positional):
            if self.rest is None:
                raise GuardMiss("there are more positional arguments than names for them")
            values.update({f"{self.rest}_{i}": value for i, value in enumerate(args[len(self.positional) :])})
        for name, value in kwargs.items():
            if name in given or (name not in self.accepted and not self.open_ended):
                raise GuardMiss(f"the keyword {name!r} is not one of its arguments")
            values[name] = value
        return values


class SignatureOfOriginal:
    """Descriptor that gives a `HexaForward` the ``inspect.signature`` of the forward it stands for."""

    def __get__(self, instance: Any, owner: type) -> inspect.Signature | None:
        if instance is None:
            return None
        if instance._own_original is not None:
            return inspect.signature(instance._own_original)
        return inspect.signature(type(instance.module).forward.__get__(instance.module))


class NoGlobals:
    """``__globals__`` of a rewritten forward: `torch.jit.script` asks for it before it compiles a function's code."""

    def __get__(self, forward: object, owner: type) -> NoReturn:
        raise AttributeError(
            "a forward that hexa_fx rewrote has no Python code of its own for torch.jit.script; call hexa_fx.undo_ on the model "
            "first, or use torch.jit.trace, torch.export or torch.compile, which take it"
        )
