"""What an installed forward would do if it were called now."""

from __future__ import annotations

from hexa_fx.runtime.guards import GuardMiss
from hexa_fx.runtime.install import HexaForward


def why_original(forward: HexaForward) -> str:
    """Why ``forward`` would run the block's own code now, whatever its inputs; empty if it would not, in the current mode.

    Modules that were exchanged or hooked since, and attributes that are not what they were, are such reasons.
    """
    try:
        module = forward.module
    except ReferenceError:  # of a model that is gone
        return ""
    training = bool(module.training)
    if forward.programs[training] is None:
        return ""
    try:
        forward.attributes[training].check()
        for name in forward.packed_names[training]:
            getattr(module, name).check()
    except GuardMiss as miss:
        return str(miss)
    return ""
