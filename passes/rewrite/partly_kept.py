"""Submodules that the code calls in more places than the rewritten graph, as an activation of experts and of a layer beside them.

Their code runs in part of these places only: what it reads and its hooks count as the block's own, and what else it does is lost.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable

from hexa_fx.capture import UNKNOWN, Access, CapturedBlock, StoredValue
from hexa_fx.passes.detect.graph import ancestors, nodes_in
from hexa_fx.passes.rewrite.kept_calls import KeptNodes
from hexa_fx.runtime.attribute_guards import is_within


def replaced(captured: CapturedBlock, kept: KeptNodes) -> frozenset[str]:
    """Paths of the submodules of which the rewritten graph makes a call neither itself nor inside of another."""
    spans = sorted({(kept.calls[node].start, kept.calls[node].end) for node in kept.order if node in kept.calls})
    starts = [start for start, _ in spans]
    ends = [*(end for _, end in spans), -1]
    calls = captured.calls
    return frozenset(call.path for call in calls if call.end > ends[bisect_right(starts, call.start) - 1])


def left_by_opened(
    captured: CapturedBlock, called: Collection[str], stored: Iterable[Access | StoredValue]
) -> tuple[StoredValue, ...]:
    """What the code of submodules sets as attributes, where these are not ``called``, and of which ``stored`` has nothing.

    Not what is no tensor of this run, or follows from what an earlier one kept.
    """
    known = {id(item) for item in stored}

    def is_made_here(item: StoredValue) -> bool:
        behind = () if item.value is UNKNOWN else ancestors(nodes_in(item.value))
        return item.value is not UNKNOWN and not any(
            n.op == "get_attr" and n.target in captured.recalled for n in behind
        )

    lost = (item for item in captured.stored if not any(is_within(scope, called) for scope in item.scopes))
    return tuple(item for item in lost if id(item) not in known and is_made_here(item))
