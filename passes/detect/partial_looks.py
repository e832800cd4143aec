"""Host decisions on the choices of certain tokens: whoever hands out tokens has to look at the choices of all of them.

``if ids[0].tolist() == [3, 1]`` goes the other way for one choice among thousands, which no example need hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.fx

from hexa_fx.capture import record_of
from hexa_fx.capture.replay import CannotReplay, Replay
from hexa_fx.ir import SourceLocation
from hexa_fx.passes.detect.graph import ancestors, is_float, is_tensor, operation
from hexa_fx.passes.detect.size_decisions import counts, is_count, is_size, sizes_asked
from hexa_fx.passes.detect.verdict import Refuse

_TAKING_PARTS = frozenset(
    "getitem select unbind split chunk narrow squeeze unsqueeze view reshape flatten unflatten transpose t permute contiguous "
    "clone detach long int to cpu tolist item numpy __int__ __index__ __array__".split()
)


def refuse_partial_looks(
    graph: torch.fx.Graph, opaque: set[torch.fx.Node], tokens: int, given: torch.Tensor, replay: Replay
) -> None:
    """Refuses decisions on what certain tokens chose.

    Args:
        opaque: nodes in submodule calls that stay calls.
        tokens: how many there are.
        given: the tokens that experts are given.

    Raises:
        Refuse: the decisions of a line look at the choices of some tokens that experts are given, but not of all.
    """
    seen: dict[tuple[SourceLocation | None, torch.fx.Node], torch.Tensor] = {}
    last: dict[tuple[SourceLocation | None, torch.fx.Node], torch.fx.Node] = {}
    looks: defaultdict[torch.fx.Node, list[tuple[torch.fx.Node, SourceLocation | None, list[torch.fx.Node]]]]
    looks = defaultdict(list)
    routed = torch.zeros(tokens, dtype=torch.bool, device="cpu")
    routed[given.cpu()] = True
    for node in graph.nodes:
        if node.op == "output" or not record_of(node).decision or record_of(node).only_raises or node in opaque:
            continue
        if sizes_asked(node):
            continue
        for whole, parts in _parts_looked_at(node, tokens):
            looks[whole].append((node, record_of(node).location, parts))
    for whole, found in looks.items():
        of_parts = _tokens_of(whole, {part for _, _, parts in found for part in parts}, tokens, replay)
        for node, location, parts in found:
            key = location, whole
            here = torch.stack([of_parts[part] for part in parts]).any(0)
            seen[key], last[key] = seen[key] | here if key in seen else here, node
    for key, tokens_seen in seen.items():
        if bool((routed & ~tokens_seen).any()):
            raise Refuse(
                "the code takes a host decision on what certain tokens chose, which shows only where they choose just that; one on "
                "the choices of all tokens can be rewritten",
                last[key],
            )


def _parts_looked_at(decision: torch.fx.Node, tokens: int) -> Iterator[tuple[torch.fx.Node, list[torch.fx.Node]]]:
    """What holds something for every token, of which the decision follows from parts alone, and these parts."""
    found: defaultdict[torch.fx.Node, list[torch.fx.Node]] = defaultdict(list)
    behind = ancestors([decision], stop=is_size)
    ends = {decision} | {n for node in behind if not _is_part(node) and not is_size(node) for n in node.all_input_nodes}
    for part in ends & behind:
        whole = part
        while _is_part(whole) and whole.all_input_nodes and is_tensor(whole.all_input_nodes[0]):
            whole = whole.all_input_nodes[0]
        if _is_of_tokens(whole, tokens):
            found[whole].append(part)
    yield from ((whole, parts) for whole, parts in found.items() if whole not in parts)


def _is_part(node: torch.fx.Node) -> bool:
    return node.op.startswith("call") and operation(node) in _TAKING_PARTS


def _is_of_tokens(node: torch.fx.Node, tokens: int) -> bool:
    if not is_tensor(node) or is_float(node) or is_count(node) or counts(node):
        return False
    shape = record_of(node).value.shape
    return tokens > 1 and any(shape[:n].numel() == tokens for n in range(1, len(shape) + 1))


def _tokens_of(
    whole: torch.fx.Node, parts: Iterable[torch.fx.Node], tokens: int, replay: Replay
) -> dict[torch.fx.Node, torch.Tensor]:
    """(T,) of which tokens each part holds something."""
    value, everything = record_of(whole).value, torch.ones(tokens, dtype=torch.bool, device="cpu")
    each = value.numel() // tokens
    numbers = torch.arange(value.numel(), device=value.device).reshape(value.shape)
    found = {}
    for part in parts:
        try:
            held = replay.run({whole: numbers}, [part])[part]
        except CannotReplay:
            found[part] = everything
            continue
        places = torch.tensor(list(_numbers_in(held)), dtype=torch.long, device="cpu")
        marks = torch.zeros(tokens, dtype=torch.bool, device="cpu")
        marks[places // each] = True
        found[part] = marks
    return found


def _numbers_in(value: Any) -> Iterator[int]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _numbers_in(item)
    elif isinstance(value, torch.Tensor):
        yield from value.flatten().tolist()
    else:
        yield from torch.as_tensor(value).flatten().tolist()
