"""Submodules that the code calls in more places than the rewritten graph, as an activation of experts and of a layer beside them.

Their code runs in part of these places only: what it reads and its hooks count as the block's own, and what else it does is lost.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable

from hexa_fx.capture import UNKNOWN, Access, CapturedBlock, ChangedInPlace, StoredValue
from hexa_fx.passes.detect.graph import ancestors, nodes_in
from hexa_fx.passes.detect.rules import refusal_of_change
from hexa_fx.passes.detect.verdict import Refuse
from hexa_fx.passes.rewrite.kept_calls import KeptNodes
from hexa_fx.runtime.attribute_guards import is_within

_LOST = (
    "the code keeps {}, in a submodule whose work the rewritten block does itself, without that; what a module around the experts "
    "keeps, or the block itself, is kept"
)


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


def refuse_lost(
    captured: CapturedBlock, called: Collection[str], elsewhere: Collection[str], stored: Iterable[Access | StoredValue]
) -> None:
    """Refuses what is left beside the output by code that the rewritten graph neither calls wherever it runs nor makes up for.

    Args:
        called: paths of the submodules that it calls.
        elsewhere: of those that run in other places too.
        stored: what it leaves itself.

    Raises:
        Refuse: something is.
    """
    left: list[ChangedInPlace | StoredValue | Access] = [*captured.changed, *captured.stored, *captured.accesses]
    known = {id(item) for item in stored}
    for item in left:
        scopes = frozenset({item.scope}) if isinstance(item, Access) else item.scopes
        if id(item) in known or all(is_within(scope, called) and scope not in elsewhere for scope in scopes):
            continue
        if isinstance(item, ChangedInPlace):
            raise refusal_of_change(item)
        raise Refuse(_LOST.format(item))
