"""What runs beside the experts' products and may be why a block is refused: hooks on experts, and results kept from inside them."""

from __future__ import annotations

from torch import nn

from hexa_fx.capture import Access, CapturedBlock, StoredValue
from hexa_fx.passes.detect.graph import ancestors, nodes_in
from hexa_fx.passes.detect.tags import ExpertGroups
from hexa_fx.runtime.guards import HOOKS


def beside_experts(captured: CapturedBlock, groups: ExpertGroups, apart: bool) -> str:
    """A sentence about what experts do beside their products; empty if nothing is known.

    Args:
        apart: whether their outputs do not come together, which they do not where the code keeps one before it adds it up.
    """
    return _hooks_on_experts(captured.block, groups) or (_kept_of_one_expert(captured, groups) if apart else "")


def _hooks_on_experts(block: nn.Module, groups: ExpertGroups) -> str:
    """A hook may change what an expert is given and gives, so that its own code is not all that was recorded."""
    names = [name for members in groups.members.values() for name in members]
    for path, module in block.named_modules():
        inside = path and any(name.startswith(f"{path}.") for name in names)
        if inside and any(getattr(module, kind) for kind in HOOKS):
            return f"{path!r} has hooks, which only its own code calls; remove them to have the block rewritten"
    return ""


def _kept_of_one_expert(captured: CapturedBlock, groups: ExpertGroups) -> str:
    """What is kept of several experts, such as the block's result, is no reason."""
    kept: tuple[Access | StoredValue, ...] = (*captured.accesses, *captured.stored)
    for item in kept:
        behind = ancestors(nodes_in(item.value))
        found = [groups.of(str(node.target)) for node in behind if node.op == "get_attr"]
        if len({member[1] for member in found if member is not None}) == 1:
            return (
                f"the code keeps what a single expert computes ({item}), and a rewritten block computes all of them at once; it is "
                "rewritten if it keeps what is summed over experts"
            )
    return ""
