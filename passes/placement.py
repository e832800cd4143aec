"""Refuses blocks whose weights are not all on one device, each with a sentence that says what to do instead."""

from __future__ import annotations

from torch import nn

from hexa_fx.runtime.preflight import is_offloaded

OFFLOADED = (
    "its weights are offloaded (accelerate brings them to the device for each call), and cannot be read in place; a block is "
    "rewritten if it stays on one device: leave room for it in device_map or max_memory, or optimize the model before it is "
    "dispatched"
)
SPREAD = (
    "its weights lie on several devices ({}); a block is rewritten if it is on one: keep it together in device_map "
    "(no_split_module_classes)"
)


def why_misplaced(block: nn.Module) -> str:
    """A sentence if the block's weights are elsewhere or on several devices; else empty."""
    devices = {parameter.device for parameter in block.parameters()}
    if any(device.type == "meta" for device in devices):
        return OFFLOADED
    if any(is_offloaded(module) for module in block.modules()):
        return OFFLOADED
    return SPREAD.format(", ".join(sorted(map(str, devices)))) if len(devices) > 1 else ""
