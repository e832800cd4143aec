"""A run of the module that holds a router, in which the choice of experts is read or replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hexa_fx.errors import InputError
from hexa_fx.ir import Choice, RoutingSite
from hexa_fx.isolation.choices import ChoiceCounter, ChoosingCall, choosing_call, with_groups
from hexa_fx.routing.calls import ModelCall
from hexa_fx.torch_private import _get_current_function_mode_stack


class RoutingTap(TorchFunctionMode):
    """A mode that notes the ids of a site, or replaces them.

    Args:
        site: the calls that choose.
        call: the model's call that the run is part of.
        forced: (tokens, k) ids of the tokens that are no padding, and (tokens,) which of them stay live; None only notes.
        path: of the block, for messages.
    """

    note: Callable[[Tensor], None] | None = None
    """Takes the (tokens, k) ids at the end."""

    def __init__(
        self, site: RoutingSite, call: ModelCall, forced: tuple[Tensor, Tensor | None] | None, path: str
    ) -> None:
        super().__init__()
        self._site, self._call, self._forced, self._path = site, call, forced, path
        self._place = {choice: place for place, calls in enumerate(site.columns) for choice in calls}
        self.restart()

    def restart(self) -> None:
        """Begins again: the block's own code runs from its beginning."""
        self._counter = ChoiceCounter()
        self._found: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = choosing_call(func, args, kwargs)
        if call is None:
            return func(*args, **kwargs)
        choice = self._counter.numbered(call)
        if choice in self._site.groups and self._forced is not None:
            return self._among_groups(call, func(*args, **kwargs))
        if choice not in self._place:
            return func(*args, **kwargs)
        return self._chosen(choice, call, func(*args, **kwargs))

    def _chosen(self, choice: Choice, call: ChoosingCall, result: Any) -> Any:
        """The result of a call that chooses experts."""
        place, single = self._place[choice], len(self._site.columns) > 1
        width = 1 if single else self._site.top_k
        own = call.ids(result)[:, :width]
        self._check_rows(call)
        if self._forced is None:
            self._found[place] = own
            return result
        columns = slice(place, place + 1) if single else slice(0, width)
        ids = self._spread(own, columns)
        for tap in (self, *_get_current_function_mode_stack()):  # what is noted around this context is where tokens go
            if isinstance(tap, RoutingTap) and tap._site is self._site:
                tap._found[place] = ids
        return call.forced(ids)

    def _among_groups(self, call: ChoosingCall, result: Any) -> Any:
        self._check_rows(call)
        assert self._forced is not None
        experts = self._site.columns[0][0].size
        size = experts // call.size
        live = (call.ids(result) * size).repeat(1, self._site.top_k)[
            :, : self._site.top_k
        ]  # any expert of these groups
        return call.forced(with_groups(self._spread(live, slice(None)), call, experts))

    def _spread(self, own: Tensor, columns: slice) -> Tensor:
        """(rows, n) ids: those of the log, and the router's ``own`` where it has none."""
        assert self._forced is not None
        ids, live = self._forced
        wanted = ids[:, columns].to(own.device, own.dtype)
        if live is not None:
            wanted = torch.where(live.to(own.device)[:, None], self._without_padding(own), wanted)
        if self._call.real is None or len(own) == self._call.tokens:
            return wanted
        spread = own.clone()
        spread[self._call.real.to(own.device)] = wanted
        return spread

    def _without_padding(self, own: Tensor) -> Tensor:
        if self._call.real is None or len(own) == self._call.tokens:
            return own
        return own[self._call.real.to(own.device)]

    def _check_rows(self, call: ChoosingCall) -> None:
        if call.rows not in (self._call.rows, self._call.tokens):
            raise InputError(
                f"{self._path} routes {call.rows} tokens, and the model was called with {self._call.rows}, of which "
                f"{self._call.tokens} are no padding"
            )

    def finish(self, failed: bool) -> None:
        """Hands on the ids that were chosen, unless the run ended early."""
        if failed or self.note is None:
            return
        if len(self._found) < len(self._site.columns):
            raise InputError(f"{self._path} did not choose experts in the way in which it did when it was optimized")
        ids = torch.cat([self._found[place] for place in range(len(self._site.columns))], 1)
        self.note(self._without_padding(ids))
