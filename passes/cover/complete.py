"""Detection that loses nothing: matches are asked for what they do not cover, and looked for again until they cover everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch.fx

from hexa_fx.capture import CapturedBlock, record_of
from hexa_fx.capture.perturb import Replacements
from hexa_fx.errors import CaptureError
from hexa_fx.ir import Refusal
from hexa_fx.observers import announced
from hexa_fx.passes.cover.coverage import Lost, uncovered
from hexa_fx.passes.cover.replaced_values import replaced
from hexa_fx.passes.detect import Form, MoEMatch, detect_block
from hexa_fx.passes.detect.rules import constant
from hexa_fx.passes.detect.tags import expert_groups, tag
from hexa_fx.passes.detect.verdict import Refuse

Found: TypeAlias = tuple[MoEMatch | Refusal, tuple[Lost, ...]]

_MOST = 12
"""Values that are changed at most."""


def detect_all(
    record: Callable[[Replacements], CapturedBlock],
    prefer_earliest: bool = False,
) -> MoEMatch | Refusal:
    """`detect` on a recorded run, so that nothing is lost; a refusal that names what would be lost if that cannot be.

    Args:
        record: runs the block with other values for what has no effect on the example.
        prefer_earliest: as in `detect`.
    """
    look = partial(_announced, prefer_earliest=prefer_earliest)
    found, first = _covered(record, look, lambda item: True)
    if isinstance(found, Refusal) and first is not None and any(item.routed for item in first[1]):
        again, _ = _covered(record, look, lambda item: not item.routed)
        found = again if isinstance(again, MoEMatch) else found
    return found


def _covered(
    record: Callable[[Replacements], CapturedBlock], look: Callable[..., Found], counts: Callable[[Lost], bool]
) -> tuple[MoEMatch | Refusal, tuple[Refusal, tuple[Lost, ...]] | None]:
    """The match that loses nothing that counts, or a refusal; and what was lost at first, if anything, with a refusal for that."""
    first: tuple[Refusal, tuple[Lost, ...]] | None = None
    replacements: Replacements | None = Replacements()
    start: CapturedBlock | None = None
    while replacements is not None:
        try:
            captured = record(replacements)
        except CaptureError:
            if start is None:
                raise
            break
        start = start or captured
        found, all_lost = look(captured, replacements, forms=("any", "steps"))
        lost = tuple(filter(counts, all_lost))
        if not lost and (isinstance(found, MoEMatch) or first is None):
            return found, first
        if not lost:
            break
        first = first or (_refusal(captured, lost[0]), lost)
        replacements = replaced(replacements, captured, lost) if len(replacements) < _MOST else None
    assert start is not None
    assert first is not None
    found, all_lost = look(start, Replacements(), forms=("free",))
    return (found if isinstance(found, MoEMatch) and not any(map(counts, all_lost)) else first[0]), first


def _announced(
    captured: CapturedBlock,
    replacements: Replacements,
    prefer_earliest: bool,
    forms: Sequence[Form],
) -> Found:
    """The match in the first form that loses nothing; else the first one, with what it loses."""
    active = _replaced_nodes(captured, replacements)
    with announced("detect", captured.graph) as done:
        best: Found | None = None
        for form in forms:
            found = detect_block(captured, prefer_earliest, form)
            lost = () if isinstance(found, Refusal) else lost_by(found, active)
            if isinstance(found, MoEMatch) and not lost:
                best = found, ()
                break
            if best is None or isinstance(best[0], Refusal):
                best = found, lost
        assert best is not None
        said = _refusal(captured, best[1][0]) if best[1] else best[0]
        done.note = f"refused: {said.reason}" if isinstance(said, Refusal) else said.idiom
    return best


def _replaced_nodes(captured: CapturedBlock, replacements: Replacements) -> frozenset[torch.fx.Node]:
    names = {*replacements.arguments, *replacements.held}
    return frozenset(
        node
        for place, node in enumerate(captured.graph.nodes)
        if place in replacements.results or (node.op in ("placeholder", "get_attr") and node.target in names)
    )


def lost_by(match: MoEMatch, active: frozenset[torch.fx.Node] = frozenset()) -> tuple[Lost, ...]:
    """What the regions of a match lose. ``active``: nodes whose values were changed in the recorded run."""
    tags = tag(match.captured, expert_groups(match.captured.named_tensors()))
    return tuple(item for region in match.regions for item in uncovered(region, tags, active))


_REASONS = {
    "outputs": "{} is applied to what experts give, and would be lost",
    "added": "{} is added to what experts give, and would be lost",
    "hidden": "{} is part of what experts compute, and would be lost",
    "rows": "{} is applied to what experts are given, and would be lost",
    "factor": "{} is part of a factor on what experts give or are given, and would be lost",
    "weights": "{} is applied to parameters of the experts before these are read, and would be lost",
    "select": "{} has a part in which tokens an expert is given, and would be lost",
}


def _refusal(captured: CapturedBlock, lost: Lost) -> Refusal:
    name = str(lost.node.target) if lost.node.op in ("placeholder", "get_attr") else lost.node.name
    if name in captured.constants:
        try:
            constant(captured, lost.node)
        except Refuse as found:
            return found.at(captured.path)
        name = "a tensor that is made anew of plain numbers"
    return Refusal(captured.path, _REASONS[lost.role].format(name), record_of(lost.node).location)
