"""Host decisions on sizes and counts: conditions that every call checks, or reasons to refuse.

A size that follows from the sizes of the inputs can be asked before anything is computed. How many rows an expert gets is known
only after the routing. Whether there are any, and how many compared with a limit, is what verification varies (experts without
tokens, more than experts have room for); whether there are exactly seven, or an even number, no example shows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.fx

from hexa_fx.capture import record_of
from hexa_fx.passes.detect.graph import RANDOM, ancestors, is_float, is_tensor, literals, operation
from hexa_fx.passes.detect.tags import Tag
from hexa_fx.passes.detect.verdict import Refuse

SIZES = frozenset(("size", "numel", "nelement", "dim", "stride"))
COUNTING = frozenset(["nonzero", "where", "unique", "unique_consecutive", "masked_select", "argwhere"])
"""Operations whose result has as many rows as they find."""

NUMBERS = frozenset("item tolist __int__ __index__ __float__ numpy __array__".split())
_SUMS = frozenset("sum bincount count_nonzero histc".split())
_IDS = COUNTING | frozenset("topk argmax argmin argsort sort".split())
"""Operations that give numbers of experts or tokens, which code may compare with one."""

_EQUALITIES = frozenset("eq ne __eq__ __ne__".split())
_REMAINDERS = frozenset("mod __mod__ __rmod__ remainder fmod divmod __and__ and_ bitwise_and".split())


def sizes_asked(decision: torch.fx.Node) -> set[torch.fx.Node]:
    """The sizes that a decision hinges on, also by way of tensors made of them; empty if it hinges on values, or on none."""
    if is_tensor(decision) or operation(decision) == "unbind":
        return set()
    asked = ancestors([decision], stop=is_size)
    sizes = {n for n in asked if is_size(n)}
    given = any(not n.op.startswith("call") or operation(n) in RANDOM for n in asked - sizes)
    return set() if given else sizes


def is_condition(
    decision: torch.fx.Node,
    sizes: set[torch.fx.Node],
    tags: Mapping[torch.fx.Node, Tag],
    outputs: Collection[torch.fx.Node],
    after: set[torch.fx.Node],
) -> bool:
    """Whether a decision on ``sizes`` is to be checked in every call; else verification sees it.

    Sizes of the regions' ``outputs``, and of what comes ``after`` them, are known once the experts have run.

    Raises:
        Refuse: it can be neither checked before the experts run nor seen.
    """
    if not isinstance(record_of(decision).value, bool) and not counts_pieces(decision):
        return False  # range(n): a loop over rows, which verification sees at other sizes
    for size in sizes:
        if operation(size) == "stride" and any(n.op.startswith("call") for n in size.all_input_nodes):
            raise Refuse(
                "the code takes a host decision on how something that it computes lies in memory (stride()), which the rewritten "
                "block need not keep; one on sizes can be rewritten",
                decision,
            )
    behind = ancestors(sizes, stop=lambda n: n in outputs) - after
    inside = any(is_float(n) and tags[n].experts and not tags[n].weight for n in behind)
    if not inside and not any(map(_counts, behind)):
        return True
    if not all(map(_is_width, sizes)):
        refuse_exact_count(decision)
    if inside and not any(map(_counts, behind)):
        _refuse_size_inside(decision, sizes, tags)
    return False


def counts_pieces(node: torch.fx.Node) -> bool:
    """Whether the code took a tensor apart, as a loop over its rows does, and reads none of the parts: it can only have counted."""
    return operation(node) == "unbind" and not any(operation(n) != "getitem" or n.users for n in node.users)


def _refuse_size_inside(decision: torch.fx.Node, sizes: set[torch.fx.Node], tags: Mapping[torch.fx.Node, Tag]) -> None:
    """Refuses a decision on a size of what experts compute, unless their weights have it, or it is on whether there is anything.

    Verification need not reach the size at which it goes the other way: what experts compute may have a row for several tokens.

    Raises:
        Refuse: it is one.
    """
    weights = (record_of(n).value for n in decision.graph.nodes if n.op == "get_attr" and tags[n].weight)
    known = {size for weight in weights for size in weight.shape}
    of_weights = {n for n in sizes if _is_width(n) and record_of(n).value in known}
    numbers = literals(ancestors([decision], stop=is_size) - sizes)
    if sizes - of_weights and (len(sizes) > 1 or set(numbers) != {0}):
        raise Refuse(
            "the code takes a host decision on a size of what the experts compute, with a number other than 0 or another size; one "
            "on a size of what the block is given can be rewritten",
            decision,
        )


def refuse_exact_count(decision: torch.fx.Node) -> None:
    """Refuses a decision that hinges on an exact number of rows or choices, or on its remainder.

    Raises:
        Refuse: it does.
    """
    asked = ancestors([decision], stop=lambda n: _is_count(n) or operation(n) in _IDS)
    counts = {n for n in asked if _is_count(n)}
    if counts and any(_is_exact(n) for n in asked - counts):
        raise Refuse(
            "the code takes a host decision on the exact number of tokens that an expert gets, or on a remainder of it, which is "
            "known only after the routing; a decision on whether there are any can be rewritten",
            decision,
        )


def is_size(node: torch.fx.Node) -> bool:
    """Whether it asks a tensor for a size, or for how many there are."""
    return (node.op == "call_method" and operation(node) in SIZES) or node.target is len


def _is_width(size: torch.fx.Node) -> bool:
    """Whether it is the last size of a float matrix, which weights decide."""
    of = size.args[0]
    if operation(size) == "dim" or not isinstance(of, torch.fx.Node) or len(size.args) < 2:
        return operation(size) == "dim"
    dim = record_of(of).value.dim()
    return is_float(of) and dim > 1 and size.args[1] in (-1, dim - 1)


def counts(tensor: torch.fx.Node) -> bool:
    """Whether a size of a tensor depends on values."""
    return any(map(_counts, ancestors([tensor])))


def _counts(node: torch.fx.Node) -> bool:
    """Whether the size of the result depends on values."""
    if not node.op.startswith("call"):
        return False
    if operation(node) in COUNTING | NUMBERS or (operation(node) == "repeat_interleave" and _has_tensor(node.args[1:])):
        return True
    return operation(node) == "getitem" and _has_mask(node.args[1])


def _has_tensor(value: Any) -> bool:
    return any(isinstance(n, torch.fx.Node) and is_tensor(n) for n in value)


def _has_mask(index: Any) -> bool:
    parts = index if isinstance(index, (tuple, list)) else (index,)
    tensors = (record_of(n).value for n in parts if isinstance(n, torch.fx.Node) and is_tensor(n))
    return any(value.dtype in (torch.bool, torch.uint8) for value in tensors)


def _is_count(node: torch.fx.Node) -> bool:
    if not node.op.startswith("call"):
        return False
    counted = operation(node) in _SUMS and not any(is_float(n) for n in node.all_input_nodes)
    return counted or (is_size(node) and not _is_width(node) and any(map(_counts, ancestors([node]))))


def _is_exact(node: torch.fx.Node) -> bool:
    if not node.op.startswith("call"):
        return False
    if operation(node) in _REMAINDERS:
        return any(type(n) is int for n in node.args)
    return operation(node) in _EQUALITIES and any(map(_is_certain_number, node.args))


def _is_certain_number(value: Any) -> bool:
    """Whether a count is compared with a number that was not counted too: a constant, or a size of the inputs."""
    if isinstance(value, torch.fx.Node):
        return not is_tensor(value) and not any(map(_is_count, ancestors([value])))
    return type(value) in (int, float) and value not in (0, 1)
