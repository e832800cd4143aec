"""Puts rewritten forwards on the user's module, and takes them off again.

The module keeps its class, parameters, buffers, submodules, hooks and ``state_dict``. An attribute of the instance merely
shadows ``forward``, so everything that goes through ``Module.__call__`` (hooks, torch.compile, torch.export, checkpointing,
functional_call) works as before.
"""

from __future__ import annotations

from torch import nn

from hexa_fx.errors import InputError
from hexa_fx.ir import RewrittenBlock
from hexa_fx.runtime.analyst import Analyst
from hexa_fx.runtime.forward import HexaForward
from hexa_fx.runtime.readers import readers
from hexa_fx.runtime.slots import FORWARD, INSIDE_HOOK, REPLICATE, slot_of, take_off


def install(
    block: nn.Module, *blocks: RewrittenBlock | None, path: str = "", analyst: Analyst | None = None
) -> HexaForward:
    """Replaces ``block.forward`` on this instance; the rest of the module is untouched.

    Args:
        block: the original module that the rewritten graphs' targets are relative to.
        blocks: what runs, for several kinds of calls; the original runs in others. The same one may be there several times.
        path, analyst: see `HexaForward`.

    Raises:
        InputError: the block is installed already, or a packed weight's name is taken.
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
