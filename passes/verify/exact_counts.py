"""Routings with just as many tokens for an expert as the code names a number.

Python code that takes choices one by one may count them in plain numbers, ``if expert == 1: n += 1``, or in numpy. What it then
decides on these leaves no node. That there are more than a limit shows in cases with many tokens for an expert; that there are
exactly 97 only where there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
import torch.fx

from hexa_fx.capture import CapturedBlock, record_of
from hexa_fx.ir import SourceLocation
from hexa_fx.isolation.read_values import values_of
from hexa_fx.passes.detect.graph import ancestors, is_float, is_tensor, operation
from hexa_fx.passes.detect.size_decisions import NUMBERS, UNIQUE, is_count, sizes_asked
from hexa_fx.passes.inputs.routing_override import ForcedRouting
from hexa_fx.passes.verify.cases import NO_ROUTER, VerificationCase

_CHOICES = frozenset("topk argmax argmin argsort sort max min one_hot multinomial nonzero where".split())
_ROWS = 4096
_BUDGET = 4 * _ROWS
"""Tokens of all cases together."""

_SO_MANY, _FIRST_OF = " tokens for each of ", " choices before the first one of expert "
_PLACES, _EXPERTS = 6, 3
"""How many numbers are tried as the place of a first choice, and of how many experts."""
_DECIDED = (
    "the code decides on how many tokens an expert gets, or on which token is the {}th, with choices that it has read as plain "
    "numbers ({}), of which a graph knows nothing; leave out what it does then, or put it where the block is called"
)
_UNTRIED = (
    "the code takes what was chosen one by one, or as plain numbers ({}), and chooses without topk or argmax, so that no other "
    "choices can be tried to see what it does with these; leave them in tensors, as torch.where(ids == e) does"
)


@dataclass(frozen=True)
class CountsToTry:
    """Numbers of tokens for an expert that the code may ask for.

    Args:
        numbers: what to try, in this order.
        decisions: how many decisions the host takes on what was chosen; a loop over experts takes one or two for each.
        unseen: whether it takes choices as plain numbers all at once.
        rows: how many tokens there may be in a case.
        far: the least number that is not tried, since it is too large, where the code may count; 0 if there is none.
        location: where the code takes choices, first of all.
    """

    numbers: tuple[int, ...] = ()
    decisions: int = 0
    unseen: bool = False
    rows: int = 0
    far: int = 0
    location: SourceLocation | None = None

    def routings(self, experts: int, top_k: int) -> Iterator[tuple[ForcedRouting, int]]:
        """Routings and their numbers of tokens, in which experts, as many as there is room for, get a number of tokens.

        For each number there is one in which they do by all choices of the tokens, and one by the first choices alone.
        """
        if not self.unseen and self.decisions <= 2 * experts:
            return
        left = _BUDGET
        for number, step in product(self.numbers, sorted({top_k, 1}, reverse=True)):
            among = min(experts, self.rows * step // number)
            rows = -(-number * among // step)
            left -= rows
            if among >= top_k and left >= 0:
                name = f"{number}{_SO_MANY}{among} experts" + ", by first choices" * (step < top_k)
                yield ForcedRouting(name, partial(_in_turns, among, step), in_order=step < top_k), rows
        if self.unseen and top_k < experts:
            yield from self._first_at(experts, top_k)

    def _first_at(self, experts: int, top_k: int) -> Iterator[tuple[ForcedRouting, int]]:
        """Routings in which an expert that the code may name gets a choice, or a token, of a number before any other one."""
        named = [expert for expert in dict.fromkeys((1, 0, *self.numbers)) if expert < experts][:_EXPERTS]
        for number, expert, each in product(self.numbers[:_PLACES], named, sorted({top_k, 1})):
            place = number * each
            if place // top_k < self.rows:
                name = f"{number}{_FIRST_OF}{expert}" + " by tokens" * (each > 1)
                yield ForcedRouting(name, partial(_other_before, expert, place), in_order=True), place // top_k + 1

    def cause(self, cases: Iterable[VerificationCase]) -> str:
        """A sentence if the rewritten block differed in a case of these routings; else empty."""
        for case in cases:
            forced = next((words for words in (_SO_MANY, _FIRST_OF) if words in case.name), "")
            if case.outcome == "different" and forced:
                if case.detail == NO_ROUTER:
                    return _UNTRIED.format(self.location)
                return _DECIDED.format(case.name.partition(forced)[0], self.location)
        return ""


def _in_turns(among: int, step: int, rows: int, candidates: int, k: int) -> torch.Tensor:
    """(rows, k) ids of the first experts in turns; each token goes on ``step`` experts further."""
    number = torch.arange(rows, device="cpu")[:, None]
    return (step * number + torch.arange(k, device="cpu")) % max(k, min(among, candidates))


def _other_before(expert: int, place: int, rows: int, candidates: int, k: int) -> torch.Tensor:
    """(rows, k) ids without ``expert``, but for one of it at a place."""
    others = torch.arange(rows * k, device="cpu") % (candidates - 1)
    ids = others + (others >= expert)
    ids[place] = expert
    return ids.reshape(rows, k)


def counts_to_try(captured: CapturedBlock, rows: int) -> CountsToTry:
    """Of a recorded run, for cases of up to so many ``rows``."""
    read = {value for read in captured.reads for value in values_of(read) if type(value) is int}
    numbers = [*sorted(captured.numbers), *sorted(read - captured.numbers)]
    decisions, unseen, location = 0, False, None
    for node in captured.graph.nodes:
        if node.op == "output" or not record_of(node).decision or sizes_asked(node):
            continue
        if any(_chooses(n) for n in ancestors([node])):
            decisions, location = decisions + 1, location or record_of(node).location
            unseen = unseen or _leaves_no_trace(node)
    far = min((n for n in numbers if unseen and n > _ROWS), default=0)
    return CountsToTry(tuple(n for n in numbers if 1 < n <= _ROWS), decisions, unseen, min(rows, _ROWS), far, location)


def _chooses(node: torch.fx.Node) -> bool:
    """Whether it is a choice, or whole numbers that the block is given, by which tables may choose."""
    if node.op.startswith("call"):
        return operation(node) in _CHOICES
    return node.op == "placeholder" and is_tensor(node) and not is_float(node)


def _leaves_no_trace(node: torch.fx.Node) -> bool:
    """Whether the host has plain numbers from here on: a number made plain, or all of a tensor.

    Not of lists of counts, which stay symbolic, and of the experts that were hit.
    """
    taken = operation(node)
    if taken in ("numpy", "__array__", "__repr__", "__format__"):
        return True
    if any(operation(n) in UNIQUE for n in ancestors([node]) if n.op.startswith("call")):
        return False
    made_plain = type(record_of(node).value) in (int, float)
    return made_plain or (taken in NUMBERS and not is_count(node.all_input_nodes[0]))
