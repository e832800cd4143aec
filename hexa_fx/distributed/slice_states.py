"""State dicts of a model whose experts are slices: said once, marked, and refused where they are another rank's or whole.

Nothing would be noticed otherwise, since slices of equal shares have equal shapes: what the first rank saved would load on all.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import astuple
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from hexa_fx.distributed.shards import ShardedParameter
from hexa_fx.errors import PlanError

log = logging.getLogger(__name__)

_MARK = "hexa_fx_slices"
_are_known: ContextVar[bool] = ContextVar("slices_are_known", default=False)


@contextmanager
def known_slices() -> Iterator[None]:
    """Within it, who takes a state dict knows that it has slices."""
    token = _are_known.set(True)
    try:
        yield
    finally:
        _are_known.reset(token)


class SliceStates:
    """Watches the state dicts that a partitioned model gives and takes.

    Args:
        shards: what was cut. DTensors say themselves what they are, and are left alone.
    """

    def __init__(self, shards: Sequence[ShardedParameter]) -> None:
        self._shards = shards
        self._plain = [shard for shard in shards if not isinstance(shard.original, DTensor)]
        self._said = False

    @functools.cached_property
    def _mark(self) -> str:
        """The same of no other slices. torch keeps it beside what it saves of a state dict."""
        held = [(shard.name, shard.whole, *map(astuple, shard.chunks)) for shard in self._plain]
        return hashlib.sha256(repr(held).encode()).hexdigest()

    def given(self, _module: Any, _state: Any, _prefix: str, metadata: dict[str, Any]) -> None:
        """Called with every state dict that the model gives."""
        if not self._plain:
            return
        metadata[_MARK] = self._mark
        if self._said or _are_known.get():
            return
        self._said, first = True, self._plain[0]
        log.warning(
            "state_dict() of a model that is spread over devices has this rank's slices, %r as %s and not %s: "
            "hexa_fx.distributed.checkpoint.save writes whole weights, and load reads them, on one device too",
            *(first.name, tuple(first.parameter.shape), first.whole),
        )

    def taken(self, _module: Any, state: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any) -> None:
        """Called with every state dict that the model is to load.

        Raises:
            PlanError: what would be loaded into a slice is whole, or a slice of another rank or plan.
        """
        for shard in self._shards:
            value, held = state.get(prefix + shard.name), shard.parameter
            if isinstance(value, Tensor) and tuple(value.shape) == shard.whole != tuple(held.shape):
                raise PlanError(
                    f"{shard.name!r} of the state dict is whole, the model holds this rank's slice {tuple(held.shape)}: "
                    "load it before optimize_, or use hexa_fx.distributed.checkpoint, which cuts what it loads"
                )
        name = next((shard.name for shard in self._plain if prefix + shard.name in state), None)
        if name is not None and metadata.get(_MARK, self._mark) != self._mark:
            raise PlanError(
                f"{name!r} of the state dict is a slice of another rank or plan: use hexa_fx.distributed.checkpoint, which writes "
                "whole weights and cuts what it loads"
            )
