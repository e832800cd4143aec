"""Detection that loses nothing: matches are asked for what they do not cover, and looked for again until they cover everything."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias

import torch
from torch.fx import Node

from hexa_fx.capture import CapturedBlock, record_of
from hexa_fx.capture.record import Replacements
from hexa_fx.errors import CaptureError
from hexa_fx.ir import Refusal
from hexa_fx.observers import announced
from hexa_fx.operations import operation
from hexa_fx.passes.cover.coverage import Lost, uncovered
from hexa_fx.passes.detect import Form, MoEMatch, detect_block
from hexa_fx.passes.detect.graph import is_tensor
from hexa_fx.passes.detect.rules import constant
from hexa_fx.passes.detect.tags import expert_groups, tag
from hexa_fx.passes.detect.verdict import Refuse

Found: TypeAlias = tuple[MoEMatch | Refusal, tuple[Lost, ...]]

_MOST = 12
"""Values that are changed at most."""


def detect_all(record: Callable[[Replacements], CapturedBlock], prefer_earliest: bool = False) -> MoEMatch | Refusal:
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
        found, all_lost = look(captured, replacements)
        lost = tuple(filter(counts, all_lost))
        if not lost and (isinstance(found, MoEMatch) or first is None):
            return found, first
        if not lost:
            break
        first = first or (_refusal(captured, lost[0]), lost)
        replacements = replaced(replacements, captured, lost) if len(replacements) < _MOST else None
    assert start is not None
    assert first is not None
    found, all_lost = look(start, Replacements(), form="free")
    return (found if isinstance(found, MoEMatch) and not any(map(counts, all_lost)) else first[0]), first


def _announced(captured: CapturedBlock, replacements: Replacements, prefer_earliest: bool, form: Form = "any") -> Found:
    """The match, with what it loses."""
    active = _replaced_nodes(captured, replacements)
    with announced("detect", captured.graph) as done:
        found = detect_block(captured, prefer_earliest, form)
        lost = () if isinstance(found, Refusal) else lost_by(found, active)
        said = _refusal(captured, lost[0]) if lost else found
        done.note = f"refused: {said.reason}" if isinstance(said, Refusal) else said.idiom
    return found, lost


def _replaced_nodes(captured: CapturedBlock, replacements: Replacements) -> frozenset[Node]:
    names = {*replacements.arguments, *replacements.held}
    return frozenset(
        node
        for node in captured.graph.nodes
        if record_of(node).number in replacements.results
        or (node.op in ("placeholder", "get_attr") and node.target in names)
    )


def lost_by(match: MoEMatch, active: frozenset[Node] = frozenset()) -> tuple[Lost, ...]:
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
    name = operation(lost.node)
    place = next(iter(lost.node.users), lost.node) if lost.node.op == "placeholder" else lost.node
    if name in captured.constants:
        try:
            constant(captured, lost.node)
        except Refuse as found:
            return found.at(captured.path)
        name = "a tensor that is made anew of plain numbers"
    return Refusal(captured.path, _REASONS[lost.role].format(name), record_of(place).location)


def replaced(replacements: Replacements, captured: CapturedBlock, lost: Iterable[Lost]) -> Replacements | None:
    """``replacements`` and new values for what is lost: masks with zeros, scales other than one, comparisons that some rows fail,
    other factors (those of a softmax over scores far apart are exactly one).

    None if nothing of it can be given other values.
    """
    arguments, held, results = dict(replacements.arguments), dict(replacements.held), dict(replacements.results)
    for item in lost:
        node = item.node
        value, number = record_of(node).value, record_of(node).number
        if not is_tensor(node) or not value.numel():
            continue
        if node.op == "placeholder":
            new, known = _mask_like(value), arguments
        elif node.op == "get_attr" and str(node.target) not in captured.constants:
            new, known = _scale_like(value) if value.is_floating_point() else _mask_like(value), held
        elif node.op.startswith("call") and number not in results and not record_of(node).writes:
            if value.dtype == torch.bool:
                # One that fails at some of the places where it holds; or that holds at some if it holds nowhere.
                results[number] = value & ~_chosen(value) if bool(value.any()) else _chosen(value)
            elif value.is_floating_point() and item.role in ("factor", "select"):
                results[number] = _scale_like(value)
            continue
        else:
            continue
        if new is not None:
            known[str(node.target)] = new
    found = Replacements(arguments, held, results)
    return found if len(found) > len(replacements) else None


def _chosen(value: torch.Tensor) -> torch.Tensor:
    """A quarter of the places at random, at least one; none of a single one."""
    count = max(1, value.numel() // 4) if value.numel() > 1 else 0
    order = torch.randperm(value.numel(), generator=torch.Generator().manual_seed(value.numel()), device="cpu")
    chosen = torch.zeros(value.numel(), dtype=torch.bool, device="cpu")
    chosen[order[:count]] = True
    return chosen.reshape(value.shape).to(value.device)


def _mask_like(value: torch.Tensor) -> torch.Tensor | None:
    """A mask of one number, with the other number at some places."""
    first = value.flatten()[0]
    if not bool((value == first).all()) or value.is_complex():
        return None
    other = (
        ~first if value.dtype == torch.bool else torch.zeros_like(first) if bool(first != 0) else torch.ones_like(first)
    )
    return torch.where(_chosen(value), other, value)


def _scale_like(value: torch.Tensor) -> torch.Tensor:
    """Numbers between a half and three halves of the scale, none of them one."""
    noise = torch.rand(
        value.shape, generator=torch.Generator().manual_seed(value.numel() + 1), dtype=torch.float64, device="cpu"
    )
    factor = (0.5 + noise * 0.45 + (noise > 0.5)).to(value)
    return value * factor if bool((value != 0).all()) else value + factor / 8
