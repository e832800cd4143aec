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
from hexa_fx.passes.detect.graph import RANDOM, ancestors, is_chosen, is_float, is_tensor, literals, operation
from hexa_fx.passes.detect.tags import Tag
from hexa_fx.passes.detect.verdict import Refuse

SIZES = frozenset(("size", "numel", "nelement", "dim", "stride"))
COUNTING = frozenset(["nonzero", "where", "unique", "unique_consecutive", "masked_select", "argwhere"])
"""Operations whose result has as many rows as they find."""

NUMBERS = frozenset("item tolist __int__ __index__ __float__ numpy __array__".split())
_SUMS = frozenset("sum mean cumsum bincount count_nonzero histc scatter_add scatter_add_ index_add index_add_".split())
"""Operations that count, if what they are given follows from the routing."""

_IDS = COUNTING | frozenset("topk argmax argmin argsort sort".split())
"""Operations that give numbers of experts or tokens, which code may compare with one."""

_PLACES: dict[str, tuple[int | None, int]] = {
    **dict.fromkeys(("topk", "kthvalue"), (-1, 2)),
    **dict.fromkeys(("argsort", "sort"), (-1, 1)),
    **dict.fromkeys(("argmax", "argmin", "nonzero", "where", "argwhere"), (None, 1)),
}
"""Operations that say where something stands, and their dimension: by default, and its place among the arguments."""

_TAKING = frozenset("getitem gather index_select take take_along_dim".split())
_CUTS = frozenset("split chunk tensor_split unsafe_split unsafe_chunk hsplit vsplit dsplit".split())
UNIQUE = frozenset(("unique", "unique_consecutive"))
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
    routing: Collection[torch.fx.Node],
) -> bool:
    """Whether a decision on ``sizes`` is to be checked in every call; else verification sees it.

    What is counted in tokens or masks, before anything is chosen, is known in every call, and hardly varied.

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
    counts = [n for n in behind if _counts(n)]
    if not inside and not any(is_chosen(n) or not ancestors([n]).isdisjoint(routing) for n in counts):
        return True
    if not all(map(_is_width, sizes)):
        refuse_exact_count(decision)
    if inside and not counts:
        _refuse_size_inside(decision, sizes, tags)
    return False


def counts_pieces(node: torch.fx.Node) -> bool:
    """Whether the code took a tensor apart, as a loop over its rows does, and reads none of the parts: it can only have counted."""
    return operation(node) == "unbind" and not any(operation(n) != "getitem" or n.users for n in node.users)


def cuts_rows(node: torch.fx.Node) -> bool:
    """Whether it takes a tensor apart by a number, so that there are more parts of more rows, and the code may go through all.

    Those of features, which weights decide, are always as many.
    """
    if not node.op.startswith("call") or operation(node) not in _CUTS | {"unbind"}:
        return False
    whole, *given = node.args
    if operation(node) == "unbind":
        given = [1, *given]
    by = (*given, *(node.kwargs.get(name) for name in ("split_size", "split_size_or_sections", "chunks", "sections")))
    dim = node.kwargs.get("dim", given[1] if len(given) > 1 else 0)
    if isinstance(next(filter(None, by), None), (list, tuple)) or not isinstance(whole, torch.fx.Node):
        return False
    dims = record_of(whole).value.dim()
    is_width = dims > 1 and isinstance(dim, int) and dim % dims == dims - 1
    return not is_width and any(n.op == "placeholder" for n in ancestors([whole]))


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
    asked = ancestors([decision], stop=lambda n: is_count(n) or operation(n) in _IDS)
    counts = {n for n in asked if is_count(n)}
    if counts and any(_is_exact(n) for n in asked - counts):
        raise Refuse(
            "the code takes a host decision on the exact number of tokens that an expert gets, or on a remainder of it, which is "
            "known only after the routing; a decision on whether there are any can be rewritten",
            decision,
        )


def refuse_exact_place(decision: torch.fx.Node, experts: int) -> None:
    """Refuses a decision on which token, or which choice of a token, stands somewhere: an example may hold no 800th.

    Args:
        experts: how many there are; the code may ask for a certain one.

    Raises:
        Refuse: it compares such a number with a certain one.
    """
    for node in _values_behind(decision, experts):
        asked = operation(node) in _EQUALITIES | _REMAINDERS and not record_of(node).subscript
        if asked and any(_is_place(n, experts) for n in _values_behind(node, experts)):
            raise Refuse(
                "the code takes a host decision on which token, or which choice of a token, stands at a certain place (a result "
                "of argsort, argmax or where, compared with a number); one on the expert that was chosen can be rewritten",
                decision,
            )


def _values_behind(node: torch.fx.Node, experts: int) -> set[torch.fx.Node]:
    """Whose values it is made of: not of sizes, nor of what says where in a tensor they are taken from."""
    seen: set[torch.fx.Node] = set()
    frontier = [node]
    while frontier:
        item = frontier.pop()
        if item not in seen:
            seen.add(item)
            sources = item.all_input_nodes
            if operation(item) in _TAKING and item.op.startswith("call"):
                # the values of a sort are those of its operand
                sources = sources[0].all_input_nodes if _is_sorted(item) else sources[:1]
            frontier += [] if is_size(item) or _is_place(item, experts) else sources
    return seen


def _is_sorted(node: torch.fx.Node) -> bool:
    """Whether it holds the values that a sort gives, not where they stood."""
    first = operation(node) == "getitem" and isinstance(node.args[1], int) and node.args[1] == 0
    return first and operation(node.all_input_nodes[0]) in ("sort", "topk")


def _is_place(node: torch.fx.Node, experts: int) -> bool:
    """Whether it says where in more rows than there are experts, also with experts that do nothing."""
    default, place = _PLACES.get(operation(node), (None, 1))
    given = node.args[0] if node.op.startswith("call") and operation(node) in _PLACES else None
    if not isinstance(given, torch.fx.Node) or not is_tensor(given) or (operation(node) == "where" and node.args[1:]):
        return False
    dim = node.kwargs.get("dim", node.args[place] if len(node.args) > place else default)
    shape = list(record_of(given).value.shape)
    longest: int = max([shape[dim]] if isinstance(dim, int) and shape else shape, default=0)
    return longest > 2 * experts + 1


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


def is_count(node: torch.fx.Node) -> bool:
    """Whether it says how many there are of something, if what it is given follows from the routing."""
    if not node.op.startswith("call"):
        return False
    part = node.args[1] if operation(node) == "getitem" else 0
    of_unique = isinstance(part, int) and part != 0 and operation(node.all_input_nodes[0]) in UNIQUE
    counted = operation(node) in _SUMS or of_unique
    return counted or (is_size(node) and not _is_width(node) and any(map(_counts, ancestors([node]))))


def _is_exact(node: torch.fx.Node) -> bool:
    if not node.op.startswith("call"):
        return False
    if operation(node) == "equal":  # of whole tensors
        return True
    if operation(node) in _REMAINDERS:
        return any(type(n) is int for n in node.args)
    return operation(node) in _EQUALITIES and any(map(_is_certain_number, node.args))


def _is_certain_number(value: Any) -> bool:
    """Whether a count is compared with a number that was not counted too: a constant, or a size of the inputs."""
    if isinstance(value, torch.fx.Node):
        return not is_tensor(value) and not any(map(is_count, ancestors([value])))
    return type(value) in (int, float) and value not in (0, 1)
