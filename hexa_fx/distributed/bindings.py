"""What a session sets on modules while it runs, and takes back when it is closed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling

from hexa_fx.distributed import slice_states
from hexa_fx.distributed.shards import ShardedParameter, adapted
from hexa_fx.distributed.shared_cache import SavedTensors
from hexa_fx.distributed.slice_states import SliceStates
from hexa_fx.errors import PlanError
from hexa_fx.runtime.forward import HexaForward
from hexa_fx.runtime.program import Program
from hexa_fx.runtime.specialisation import Specialisation


class _Bound(functools.partial[Any]):
    """A function that a session has put on a module, and for its sake the module can be neither copied nor pickled."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PlanError(
            "a model whose experts are spread over devices cannot be copied or pickled, since it is one with its session. "
            "checkpoint.save writes it; for an average of its weights (EMA) keep copies of its parameters, or optimize_ a second "
            "model that was copied before, with capacities=model.partition.plan.capacities and the same strategy"
        )


def unbind(shadow: nn.Module) -> None:
    """Takes a session's hooks off modules that are copies of its own."""
    for module in shadow.modules():
        module._state_dict_hooks.clear()
        module._load_state_dict_pre_hooks.clear()
        for key in [key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, _Bound)]:
            del module._forward_pre_hooks[key]


def _check_unchanged(owner: nn.Module, shards: Iterable[ShardedParameter]) -> None:
    """Raises `PlanError` if something parametrizes what is cut of a module."""
    for shard in shards:
        if shard.owner is owner and shard.key in owner.parametrizations:  # type: ignore[operator]
            raise adapted(shard.name)


class Bindings:
    """Forwards that are wrapped, and how to undo it.

    Args:
        saved: autograd's hooks while a bound forward runs.
        guard: makes a context that names the place of a failed collective.
    """

    def __init__(self, saved: SavedTensors, guard: Callable[[str], AbstractContextManager[None]]) -> None:
        self._saved, self._guard = saved, guard
        self._undo: list[Callable[[], None]] = []

    def bind(
        self, module: nn.Module, path: str, traced: Mapping[bool | None, Program], shards: Iterable[ShardedParameter]
    ) -> None:
        """Wraps a module's forward, or the programs inside a rewritten one, so that its guards, copies and signature stay."""
        forward, label = module.forward, path or type(module).__name__
        inside = [shard for shard in shards if shard.name.startswith(f"{path}." if path else "")]
        if not isinstance(forward, HexaForward):
            self._set(module.__dict__, "forward", self._wrapped(forward, label, None, inside))
            return
        for made in forward.specialisations:
            instead = traced.get(made.training)
            self._bind_made(made, label, None if instead is None else instead.function, inside)

        def bind_added(made: Specialisation) -> None:
            self._bind_made(made, label, None, inside)

        forward.lost = "Its expert weights are cut"  # also when the session has ended
        self._set(forward.__dict__, "bind_added", _Bound(bind_added))
        self._set(forward.__dict__, "takes_adapters", lambda: False)

    def before_forward(self, model: nn.Module, begin: Callable[..., None]) -> None:
        """Calls ``begin`` whenever a forward of the model begins."""
        self._undo.append(model.register_forward_pre_hook(_Bound(begin), prepend=True).remove)

    def around_states(self, shards: Sequence[ShardedParameter]) -> None:
        """Hooks the state dicts that modules and optimizers give and take of what was cut."""
        states = SliceStates(shards)
        for owner in states.owners:
            self._undo.append(owner.register_state_dict_post_hook(_Bound(states.given)).remove)  # type: ignore[no-untyped-call]
            self._undo.append(owner.register_load_state_dict_pre_hook(_Bound(states.taken)).remove)
        self._undo.append(slice_states.watch_optimizers(shards))

    def undo(self) -> None:
        """Gives modules their forward back."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _wrapped(
        self,
        function: Callable[..., Any],
        label: str,
        traced: Callable[..., Any] | None,
        shards: Sequence[ShardedParameter],
    ) -> Callable[..., Any]:
        guard = self._guard(f"forward of {label!r}")
        owners = tuple({id(shard.owner): shard.owner for shard in shards}.values())

        @functools.wraps(function)
        def bound(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return traced(*args, **kwargs) if traced is not None else untraced(*args, **kwargs)
            for owner in owners:
                if "parametrizations" in owner._modules:
                    _check_unchanged(owner, shards)
            self._saved.enter_bound()
            try:
                with guard:
                    return function(*args, **kwargs)
            finally:
                self._saved.leave_bound()

        untraced = torch.compiler.disable(bound, reason="experts in a form that is not traced: lists, or DTensors")
        return bound

    def _bind_made(
        self,
        made: Specialisation,
        label: str,
        traced: Callable[..., Any] | None,
        shards: Sequence[ShardedParameter],
    ) -> None:
        self._set(made.program.__dict__, "function", self._wrapped(made.program.function, label, traced, shards))

    def _set(self, owner: dict[str, Any], name: str, value: Any) -> None:
        before = (
            functools.partial(owner.__setitem__, name, owner[name])
            if name in owner
            else functools.partial(owner.pop, name)
        )
        self._undo.append(before)
        owner[name] = value
