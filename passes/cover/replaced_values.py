"""Other values for what is lost because it had no effect on the example, so that the next recorded run shows its effect."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hexa_fx.capture import CapturedBlock, record_of
from hexa_fx.capture.perturb import Replacements
from hexa_fx.passes.cover.coverage import Lost
from hexa_fx.passes.detect.graph import is_tensor, twins


def replaced(replacements: Replacements, captured: CapturedBlock, lost: Iterable[Lost]) -> Replacements | None:
    """``replacements`` and new values for what is lost: masks with zeros, scales other than one, comparisons that some rows fail,
    other factors (those of a softmax over scores far apart are exactly one).

    None if nothing of it can be given other values.
    """
    arguments, held, results = dict(replacements.arguments), dict(replacements.held), dict(replacements.results)
    same = twins(captured.graph)
    place = {node: number for number, node in enumerate(captured.graph.nodes)}
    for item in lost:
        node = item.node
        value = record_of(node).value
        if not is_tensor(node) or not value.numel():
            continue
        if node.op == "placeholder" and str(node.target) not in arguments:
            new, known = _mask_like(value), arguments
        elif node.op == "get_attr" and str(node.target) not in {**held, **captured.constants}:
            new, known = _scale_like(value) if value.is_floating_point() else _mask_like(value), held
        elif node.op.startswith("call") and place[node] not in results and not record_of(node).writes:
            alike = [n for n in place if n.op != "output" and same[n] is same[node]]
            if value.dtype == torch.bool:
                results |= {place[n]: _with_exceptions(value) for n in alike}
            elif value.is_floating_point() and item.role in ("factor", "select"):
                results |= {place[n]: _scale_like(value) for n in alike}
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


def _with_exceptions(value: torch.Tensor) -> torch.Tensor:
    """A condition that fails at some of the places where it holds; or that holds at some if it holds nowhere."""
    chosen = _chosen(value)
    return value & ~chosen if bool(value.any()) else chosen
