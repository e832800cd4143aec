"""What a run does to lists, deques and dicts: what it adds, by which way, in whose code, and whatever else it does."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hexa_fx.capture import CapturedBlock, capture
from hexa_fx.passes.canonicalize import canonicalize_block
from hexa_fx.passes.detect import MoEMatch, detect_block
from tests.zoo.common import MLP, TopKGate, experts
from tests.zoo.variant import D

torch.set_num_threads(1)

LOSSES: list[Any] = []
BY_NAME: dict[str, Any] = {}
HERE = sys.modules[__name__]


class Manager:
    def __init__(self) -> None:
        self.losses: list[Any] = []
        self.parts: dict[str, list[Any]] = {"aux": []}


MANAGER = Manager()


class Gate(TopKGate):
    """Has a list of its own, which it adds to if asked."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: Any = []
        self.look: Callable[[Any], Any] = lambda losses: None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.look(self.losses)
        return super().forward(x)


class Block(nn.Module):
    """Code that sees the routing weights before and after the experts."""

    def __init__(self, before: Callable[[Block, Any], Any], kept: Any = None, after: Any = None) -> None:
        super().__init__()
        self.gate, self.experts = Gate(), experts(MLP)
        self.before, self.after = before, after or (lambda m, w: None)
        self.losses: Any = [] if kept is None else kept
        self.manager = Manager()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.losses is not None  # mentioned, but not looked into
        self.before(self, x.square().mean())
        weights, index = self.gate(x)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(index == number)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        self.after(self, weights.mean())
        return out


def tokens() -> torch.Tensor:
    return torch.randn(9, D, generator=torch.Generator().manual_seed(1))


def run(block: Block) -> CapturedBlock:
    return capture(block, (tokens(),), {}, "block")


def refusal(block: Block) -> str:
    found = detect_block(canonicalize_block(run(block)))
    assert not isinstance(found, MoEMatch)
    return found.reason


def _onto(m: Block, loss: Any) -> None:
    m.losses += [loss, None]


def _global_onto(m: Block, loss: Any) -> None:
    HERE.LOSSES += (loss,)


ADDED: dict[str, tuple[Callable[[Block, Any], Any], Any, list[str]]] = {
    "append": (lambda m, loss: m.losses.append(loss), [], ["self.losses"]),
    "extend": (lambda m, loss: m.losses.extend((loss, loss + 1)), [], ["self.losses"] * 2),
    "onto": (_onto, [], ["self.losses"] * 2),
    "a pair": (lambda m, loss: m.losses.append(("aux", loss)[1:]), [], ["self.losses"]),
    "number": (lambda m, loss: m.losses.append(loss.item()), [], ["self.losses"]),
    "deque": (lambda m, loss: m.losses.append(loss), deque([1.0], maxlen=1), ["self.losses"]),
    "dict": (lambda m, loss: m.losses.__setitem__("aux", loss), {"aux": 0.0}, ["self.losses['aux']"]),
    "update": (lambda m, loss: m.losses.update({3: loss}, z=loss), {}, ["self.losses[3]", "self.losses['z']"]),
    "of a submodule": (lambda m, loss: m.gate.losses.append(loss), [], ["gate.losses"]),
    "of an object": (lambda m, loss: m.manager.losses.append(loss), [], ["self.manager.losses"]),
    "in a dict": (lambda m, loss: m.manager.parts["aux"].append(loss), [], ["self.manager.parts.aux"]),
    "global": (lambda m, loss: LOSSES.append(loss), [], ["LOSSES"]),
    "global onto": (_global_onto, [], ["LOSSES"]),
    "global dict": (lambda m, loss: BY_NAME.update(z=loss), [], ["BY_NAME['z']"]),
    "of a global object": (lambda m, loss: MANAGER.losses.append(loss), [], ["MANAGER.losses"]),
}


@pytest.mark.parametrize("name", ADDED)
def test_what_is_added(name: str) -> None:
    add, kept, labels = ADDED[name]
    block = Block(add, kept)
    before = list(kept)
    captured = run(block)
    assert [str(access) for access in captured.accesses if not access.problem] == labels
    added = [access for access in captured.accesses if str(access) in labels]
    assert not any(access.problem or access.scope for access in added)
    assert not captured.changed
    assert isinstance(captured.graph.output_node().args[0], tuple), "they are results of the graph"
    assert block.losses is kept, "the stand-in is taken away"
    assert list(kept) == before
    assert [LOSSES, BY_NAME, MANAGER.losses] == [[], {}, []]
    match = detect_block(canonicalize_block(captured))
    assert isinstance(match, MoEMatch)
    assert [str(item) for item in match.stored] == labels


def test_a_list_that_is_only_added_to_is_no_setting() -> None:
    def losses_held(look: Callable[[Block, Any], Any]) -> list[Any]:
        return [read.value for read in run(Block(look)).reads if read.steps[0] == "losses"]

    assert losses_held(lambda m, loss: m.losses.append(loss)) == []
    assert losses_held(lambda m, loss: None) == [], "as in eval mode, where nothing is added"
    assert losses_held(lambda m, loss: len(m.losses)) == [[]]


MORE: dict[str, tuple[Callable[[Block, Any], Any], Any, str]] = {
    "len": (lambda m, loss: len(m.losses) < 3 and m.losses.append(loss), [], "reads self.losses"),
    "truth": (lambda m, loss: m.losses or m.losses.append(loss), [], "reads self.losses"),
    "in": (lambda m, loss: "aux" in m.losses or m.losses.update(aux=loss), {}, "reads self.losses"),
    "not there": (lambda m, loss: m.losses.get("last") or m.losses.update(aux=loss), {}, "reads self.losses"),
    "sum": (lambda m, loss: (m.losses.append(loss), sum(m.losses)), [], "reads self.losses"),
    "by another name": (lambda m, loss: (LOSSES.append(loss), sum(HERE.LOSSES)), [], "reads LOSSES"),
    "unchanged but full": (lambda m, loss: len(m.losses) < 1 and 1, [torch.ones(())], "reads self.losses"),
    "pop": (lambda m, loss: (m.losses.append(loss), m.losses.pop(0)), [], "self.losses in place by pop"),
    "clear": (lambda m, loss: (m.losses.clear(), m.losses.append(loss)), [], "self.losses in place by clear"),
    "insert": (lambda m, loss: m.losses.insert(0, loss), [], "self.losses in place by insert"),
    "an item": (lambda m, loss: m.losses.__setitem__(0, loss), [0], "self.losses in place by __setitem__"),
    "left": (lambda m, loss: m.losses.appendleft(loss), deque(), "self.losses in place by appendleft"),
    "default": (lambda m, loss: m.losses.setdefault("a", loss), {}, "self.losses in place by setdefault"),
    "text": (lambda m, loss: m.losses.append("x"), [], "puts something other than tensors into self.losses"),
    "size": (lambda m, loss: m.losses.append(m.gate), [], "puts something other than tensors into self.losses"),
    "key": (lambda m, loss: m.losses.__setitem__(loss.item(), loss), {}, "by a key that is neither text nor"),
}


@pytest.mark.parametrize("name", MORE)
def test_what_else_is_done_is_refused_by_name(name: str) -> None:
    look, kept, words = MORE[name]
    assert words in refusal(Block(look, kept))


def test_a_list_of_parameters_may_be_read() -> None:
    block = Block(lambda m, loss: len(m.losses))
    block.losses = [expert.fc1.weight for expert in block.experts]
    assert isinstance(detect_block(canonicalize_block(run(block))), MoEMatch)


def test_two_names_of_one_list_are_two_ways() -> None:
    shared = [torch.ones(())]
    block = Block(lambda m, loss: (m.losses.append(loss), m.gate.losses.append(loss)), shared)
    block.gate.losses = shared
    first, second = run(block).accesses
    assert [str(first), str(second)] == ["self.losses", "gate.losses"]
    assert first.owner == second.owner
    block.before = lambda m, loss: (m.losses.append(loss), len(m.gate.losses))
    assert "reads gate.losses" in refusal(block)


def test_a_way_that_is_not_seen() -> None:
    """The closure's own name for the list has no stand-in."""
    hidden: list[Any] = []
    block = Block(lambda m, loss: (m.losses.append(loss), hidden.append(loss)), hidden)
    assert "the code changes self.losses in place, which" in refusal(block)
    assert hidden == []


def test_a_module_that_stays_a_call_does_as_it_likes() -> None:
    block = Block(lambda m, loss: None)
    block.gate.look = lambda losses: losses.append(torch.ones(())) if len(losses) < 3 else losses.clear()
    captured = run(block)
    assert {access.scope for access in captured.accesses} == {"gate"}
    match = detect_block(canonicalize_block(captured))
    assert isinstance(match, MoEMatch)
    assert match.stored == ()


def test_the_order_of_what_calls_add_and_what_the_block_adds() -> None:
    block = Block(lambda m, loss: None, after=lambda m, loss: m.gate.losses.append(loss))
    block.gate.look = lambda losses: losses.append(torch.ones(()))
    match = detect_block(canonicalize_block(run(block)))
    assert isinstance(match, MoEMatch)
    assert [str(item) for item in match.stored] == ["gate.losses"]
    block.before, block.after = block.after, block.before
    assert "before gate, which is called as it is, uses it too" in refusal(block)
