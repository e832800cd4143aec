"""Names of the operators in a graph, and how their numbers differ."""

from __future__ import annotations

from collections.abc import Mapping

import torch.fx

from hexa_fx.torch_private import OpOverload

CHECKS = ("require", "require_experts", "require_finite", "require_routing")
"""What asks in every call whether it is as it was when the block was analysed, and computes nothing."""


def op_name(node: torch.fx.Node) -> str:
    """``hexa.esmm``, ``aten.cat.default``, ``getitem``, ``size``: what a node calls, in short."""
    if isinstance(node.target, OpOverload):
        name = str(node.target)
        return name.removesuffix(".default") if name.startswith("hexa.") else name
    if isinstance(node.target, str):
        return node.target
    return getattr(node.target, "__name__", str(node.target))


def op_count_difference(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """``hexa.esmm -1, hexa.esmm_act +1``; empty when nothing changed."""
    names = sorted(set(before) | set(after))
    deltas = ((n, after.get(n, 0) - before.get(n, 0)) for n in names)
    return ", ".join(f"{n} {d:+d}" for n, d in deltas if d)
