"""State dicts of a model whose experts are slices: said once, marked, and refused where they are another rank's or whole.

Nothing would be noticed otherwise, since slices of equal shares have equal shapes: what the first rank saved would load on all.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import astuple
from typing import Any

from torch import Tensor, nn

from hexa_fx.contexts import set_to
from hexa_fx.distributed.shards import ShardedParameter
from hexa_fx.errors import PlanError

log = logging.getLogger(__name__)

MARK = "hexa_fx_slices"
_are_known: ContextVar[bool] = ContextVar("slices_are_known", default=False)


are_known = _are_known.get
"""Whether who takes a state dict knows that it has slices."""


def known_slices() -> AbstractContextManager[None]:
    """Within it, who takes a state dict knows that it has slices."""
    return set_to(_are_known, True)


class SliceStates:
    """Watches the state dicts that the modules give and take that hold what was cut, whatever module around them is asked.

    Args:
        shards: what was cut. DTensors say themselves what they are; of those in several pieces it is said who can write them.
    """

    def __init__(self, shards: Sequence[ShardedParameter]) -> None:
        self._of: dict[nn.Module, list[ShardedParameter]] = {}
        for shard in shards:
            if is_slice(shard) or len(shard.chunks) > 1:
                self._of.setdefault(shard.owner, []).append(shard)
        self._said = False

    @property
    def owners(self) -> Iterable[nn.Module]:
        """The modules to hook."""
        return self._of

    def given(self, owner: nn.Module, _state: Any, prefix: str, metadata: dict[str, Any]) -> None:
        """Called with every state dict that an owner gives."""
        slices = list(filter(is_slice, self._of[owner]))
        if slices:
            metadata[MARK] = mark_of(slices)  # torch keeps it beside what it saves of a state dict
        if self._said or are_known():
            return
        self._said, first = True, (slices or self._of[owner])[0]
        name, shape = prefix + _key(first), tuple(first.parameter.shape)
        log.warning(*(_OF_SLICES, name, shape, first.whole) if slices else (_OF_PIECES, name))

    def taken(
        self, owner: nn.Module, state: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any
    ) -> None:
        """Called with every state dict that an owner is to load.

        Raises:
            PlanError: what would be loaded into a slice is whole, or a slice of another rank or plan.
        """
        slices = list(filter(is_slice, self._of[owner]))
        here = {prefix + _key(shard): shard for shard in slices if prefix + _key(shard) in state}
        for name, shard in here.items():
            check_slice(f"{name!r} of the state dict", state[name], shard)
        mark = mark_of(slices)
        if here and metadata.get(MARK, mark) != mark:
            raise not_ours(f"{next(iter(here))!r} of the state dict")


_OF_SLICES = (
    "state_dict() of a model that is spread over devices has this rank's slices, %r as %s and not %s: "
    "hexa_fx.distributed.checkpoint.save writes whole weights, and load reads them, on one device too"
)
_OF_PIECES = (
    "%r is a DTensor of which each rank has several pieces (gate and up), which torch.distributed.checkpoint cannot write: "
    "hexa_fx.distributed.checkpoint.save does, and torch's save of what hexa_fx.distributed.checkpoint.state_dict returns"
)


def _key(shard: ShardedParameter) -> str:
    return shard.name.rpartition(".")[2]


def is_slice(shard: ShardedParameter) -> bool:
    """Whether a parameter has less than the whole, and nothing but this package knows. DTensors have the shape of the whole."""
    return tuple(shard.original.shape) != shard.whole


def mark_of(shards: Iterable[ShardedParameter]) -> int:
    """The same of no other slices."""
    held = [(_key(shard), shard.whole, *map(astuple, shard.chunks)) for shard in shards]
    return int(hashlib.sha256(repr(held).encode()).hexdigest()[:12], 16)


def check_slice(what: str, value: object, shard: ShardedParameter) -> None:
    """Raises `PlanError` if a value for a slice has the shape of the whole."""
    held = tuple(shard.parameter.shape)
    if isinstance(value, Tensor) and tuple(value.shape) == shard.whole != held:
        raise PlanError(
            f"{what} is whole, the model holds this rank's slice {held}: load it before optimize_, or use "
            "hexa_fx.distributed.checkpoint, which cuts what it loads"
        )


def check_element_wise(state: Mapping[str, object], shard: ShardedParameter) -> None:
    """Raises `PlanError` if an optimizer keeps something of a slice that is neither of its shape nor one number.

    Nobody could put that together, and what one rank has would be taken for all.
    """
    held = tuple(shard.parameter.shape)
    for key, value in state.items():
        if isinstance(value, Tensor) and value.numel() != 1 and tuple(value.shape) != held:
            raise PlanError(
                f"an optimizer keeps {key!r} of {shard.name!r} as {tuple(value.shape)}, which is {held}: only what "
                "it keeps of every element can be put together or moved. Give the experts, "
                "hexa_fx.distributed.gradients.expert_parameters(session), to one that works on single elements (AdamW, SGD)"
            )


def not_ours(what: str) -> PlanError:
    """What is said where another rank's slices, or those of another plan, would be taken for this rank's."""
    return PlanError(
        f"{what} is a slice of another rank or plan: use hexa_fx.distributed.checkpoint, which writes whole weights and cuts what "
        "it loads"
    )
