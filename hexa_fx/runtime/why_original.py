"""What an installed forward did, and would do if it were called now."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from hexa_fx.runtime.forward import SMALL, HexaForward
from hexa_fx.runtime.guards import OwnCodeOnly
from hexa_fx.runtime.install import installed_forward


class Calls(NamedTuple):
    """How a block's calls ran.

    Args:
        rewritten: calls that ran a rewritten forward.
        small: calls that ran the block's own code since it is faster for so little, on a CPU.
        own: calls that ran it for another reason, by the reason.
        kinds: how many kinds of calls the block was rewritten for.
    """

    rewritten: int = 0
    small: int = 0
    own: Mapping[str, int] = MappingProxyType({})
    kinds: int = 0

    def __str__(self) -> str:
        """In words; empty if there was none."""
        said = [f"{self.rewritten} rewritten"] if self.rewritten else []
        said += [f"{self.small} by its own code, which is faster for so little"] if self.small else []
        said += [f"{count} by its own code ({reason})" for reason, count in self.own.items()]
        return f"calls: {', '.join(said)}" if said else ""


NO_CALLS = Calls()
_EXCHANGED = "the module is no part of the model any more, and what may be in its place was not rewritten"


def calls_of(forward: HexaForward) -> Calls:
    """What an installed forward counted."""
    own = {reason: count for reason, count in forward.own.items() if reason != SMALL}
    return Calls(forward.ran, forward.own[SMALL], own, len(forward.specialisations))


def why_original(forward: HexaForward) -> str:
    """Why ``forward`` would run the block's own code now, whatever its inputs; empty if it would not, in the current mode.

    Modules that were hooked since are such reasons. What a call is analysed for anew is none, unless nobody would analyse it.
    """
    model = forward.within() if forward.within is not None else None
    try:
        module = forward.module
    except ReferenceError:  # or of a model that is gone
        return _EXCHANGED if model is not None else ""
    if model is not None and all(other is not module for other in model.modules()):
        return _EXCHANGED
    if installed_forward(module) is not forward:  # taken off since
        return ""
    made = forward.in_mode(bool(module.training))
    miss = None if made is None else made.why_not_now(module)
    analysed = forward.analyst is not None and not isinstance(miss, OwnCodeOnly)
    return "" if miss is None or analysed else str(miss)
