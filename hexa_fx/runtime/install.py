"""Puts rewritten forwards on the user's module, takes them off again, and says what they did.

The module keeps its class, parameters, buffers, submodules, hooks and ``state_dict``. An attribute of the instance merely
shadows ``forward``, so everything that goes through ``Module.__call__`` (hooks, torch.compile, torch.export, checkpointing,
functional_call) works as before.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import nn

from hexa_fx.errors import InputError
from hexa_fx.ir import RewrittenBlock
from hexa_fx.isolation.shadow import FORWARD, INSIDE_HOOK, REPLICATE, take_off
from hexa_fx.runtime.forward import SMALL, Analyst, HexaForward, slot_of
from hexa_fx.runtime.guards import OwnCodeOnly
from hexa_fx.runtime.listed_experts import readers


def install(
    block: nn.Module, *blocks: RewrittenBlock | None, path: str = "", analyst: Analyst | None = None
) -> HexaForward:
    """Replaces ``block.forward`` on this instance; the rest of the module is untouched.

    ``blocks`` run, for several kinds of calls, and the original in others. The same one may be there several times. Raises
    `InputError` if the block is installed already, or a packed weight's name is taken.
    """
    if is_installed(block):
        raise InputError(f"{type(block).__name__} already has a rewritten forward; call uninstall() first")
    made = list({id(each): each for each in blocks if each is not None}.values())
    experts, slot = readers(block, *made), slot_of(block)
    forward = HexaForward(block, made, block.__dict__.get("forward") if slot == FORWARD else None, path, analyst)
    block.__dict__.update({**experts, slot: forward, REPLICATE: forward.replica})
    for each in forward.specialisations:
        each.look_anew(block)
    return forward


def uninstall(block: nn.Module) -> None:
    """Gives ``block`` its own forward back; packed parameters stay where they are. Raises `InputError` if nothing is installed."""
    forward = installed_forward(block)
    if forward is None:
        raise InputError(f"{type(block).__name__} has no rewritten forward to remove")
    for name in forward.reads_under():
        del block.__dict__[name]
    take_off(block, forward, forward.own_forward)


def installed_forward(block: nn.Module) -> HexaForward | None:
    """The rewritten forward that ``block`` itself runs, if any."""
    found = (block.__dict__.get(slot) for slot in (FORWARD, INSIDE_HOOK))
    return next((forward for forward in found if isinstance(forward, HexaForward)), None)


def is_installed(block: nn.Module) -> bool:
    """Whether ``block`` itself runs a rewritten forward."""
    return installed_forward(block) is not None


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
_TAKEN_OFF = "undo_ gave it its own forward back; optimize_ has it rewritten again"
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
    if getattr(vars(module).get(REPLICATE), "__self__", None) is not forward:
        return _TAKEN_OFF
    made = forward.in_mode(bool(module.training))
    miss = None if made is None else made.why_not_now(module)
    analysed = forward.analyst is not None and not isinstance(miss, OwnCodeOnly)
    return "" if miss is None or analysed else str(miss)
