"""The attributes of a module's instance under which a rewritten forward lies."""

from __future__ import annotations

from typing import Any

from torch import nn

FORWARD, REPLICATE = "forward", "_replicate_for_data_parallel"
INSIDE_HOOK = "_old_forward"
"""Where accelerate keeps the forward that it calls once it has brought the weights, or the inputs, to where they are needed."""

PUT_ON = (FORWARD, INSIDE_HOOK, REPLICATE)
"""Names of attributes of a module's instance under which a rewritten forward may lie."""


def slot_of(block: nn.Module) -> str:
    """Where the forward of a block lies: inside of accelerate's hook, if it has one."""
    own = vars(block)
    return INSIDE_HOOK if "_hf_hook" in own and INSIDE_HOOK in own else FORWARD


def take_off(block: nn.Module, forward: Any, original: Any) -> None:
    """Puts ``original`` in the place of ``forward``: what the instance had of its own before, if anything."""
    own = block.__dict__
    own.pop(REPLICATE, None)
    for slot in (FORWARD, INSIDE_HOOK):
        if own.get(slot) is forward:
            del own[slot]
            if slot == INSIDE_HOOK:
                own[slot] = type(block).forward.__get__(block)
            elif original is not None:
                own[slot] = original
