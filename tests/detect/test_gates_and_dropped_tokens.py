"""Gates of several tasks over one set of experts, experts in one convolution, and lists of dropped tokens."""

import copy
import linecache

import pytest
import torch
from torch import nn

import hexa_fx
from hexa_fx.capture import capture, record_of
from hexa_fx.ir import Refusal
from hexa_fx.passes.detect import detect_block
from hexa_fx.passes.detect.slots import Capacity
from tests.detect.mixture import D, E, Mixture
from tests.zoo.common import looped
from tests.zoo.compare import compare

Tensor = torch.Tensor


def routed(scores: Tensor) -> tuple[Tensor, Tensor]:
    weights, index = scores.softmax(-1).topk(2)
    return weights, index


class GateOfTask(Mixture):
    """A stack of gates, of which the number of the task picks one."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Parameter(torch.randn(3, D, E))

    def forward(self, x: Tensor, task: int = 1) -> Tensor:
        return looped(x, *routed(x @ self.gates[task]), self.experts)


def test_a_stack_of_gates_is_no_stack_of_experts() -> None:
    block, x = GateOfTask().double(), torch.randn(12, D, dtype=torch.float64)
    opt = hexa_fx.optimize(copy.deepcopy(block), x)
    assert opt.report.blocks[0].status == "rewritten", opt.report.blocks[0].reason
    for args in ((x,), (x[:5], 0), (x, 2)):
        assert compare(block, opt, args, {}).within(1e-9)


class Head(nn.Module):
    def __init__(self, experts: nn.ModuleList) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(D, E), experts

    def forward(self, x: Tensor) -> Tensor:
        return looped(x, *routed(self.gate(x)), self.experts)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        experts = Mixture().experts
        self.heads = nn.ModuleList(Head(experts) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(x) for head in self.heads], -1)


class Gates(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(D, E) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([looped(x, *routed(gate(x)), self.experts) for gate in self.gates], -1)


class GatesOnAll(Gates):
    """Every expert on every token, once, weighed by each gate."""

    def forward(self, x: Tensor) -> Tensor:
        given, found = torch.stack([expert(x) for expert in self.experts], 1), []
        for gate in self.gates:
            weights, index = gate(x).softmax(-1).topk(2)
            found.append((given * torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weights)[..., None]).sum(1))
        return self.together(found)

    def together(self, found: list[Tensor]) -> Tensor:
        return torch.cat(found, -1)


class SumOfGates(GatesOnAll):
    def together(self, found: list[Tensor]) -> Tensor:
        return found[0] + found[1]


def test_several_gates_over_one_set_of_experts() -> None:
    x = torch.randn(12, D, dtype=torch.float64)
    for kind in (GatesOnAll, SumOfGates):
        (report,) = hexa_fx.explain(kind().double(), x).blocks
        assert report.status == "refused"
    for block, count in ((Heads().double(), 2), (Gates().double(), 1)):
        opt = hexa_fx.optimize(copy.deepcopy(block), x)
        assert [block.status for block in opt.report.blocks] == ["rewritten"] * count
        assert compare(block, opt, (x,), {}).within(1e-9)


class Shown(Mixture):
    """Gives some rows too, as many of twelve as experts have room for."""

    def kept(self, token: Tensor, room: int) -> Tensor:
        return token[:room]

    def room(self, tokens: int) -> int:
        return tokens // E  # has room

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        room, shown = self.room(len(x)), len(x) // 2 - 3
        weights, index = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = (self.kept(each, room) for each in torch.where(index == number))
            out = out.index_add(0, token, expert(x[token]) * weights[token, slot, None])
        return out, x[:shown]


class ShownByMask(Shown):
    def kept(self, token: Tensor, room: int) -> Tensor:
        return token[torch.arange(len(token)) < room]


class ShownByConstant(ShownByMask):
    def room(self, tokens: int) -> int:
        return 3


def room_of(block: nn.Module) -> Capacity:
    torch.manual_seed(0)
    found = detect_block(capture(block, (torch.randn(12, D),), {}))
    assert not isinstance(found, Refusal), found.reason
    assert found.routing.capacity is not None
    return found.routing.capacity


@pytest.mark.parametrize("kind", [Shown, ShownByMask])
def test_room_is_what_lists_of_tokens_are_cut_at(kind: type[Shown]) -> None:
    """And not what is as large on the example, and cuts something else."""
    limit = room_of(kind()).limit
    assert isinstance(limit, torch.fx.Node)
    place = record_of(limit).location
    assert place is not None
    assert linecache.getline(place.file, place.line).endswith("# has room\n")


def test_room_is_a_number_that_the_code_names() -> None:
    assert room_of(ShownByConstant()).limit == 3


class TrashSlot(nn.Module):
    """First choices of all tokens queue first, in one row of numbers; those that are late go to a place that is cut off."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, E)
        self.up, self.first = nn.Parameter(torch.randn(E, D, 8)), nn.Parameter(torch.randn(E, 1, 8))
        self.down, self.second = nn.Parameter(torch.randn(E, 8, D)), nn.Parameter(torch.randn(E, 1, D))

    def forward(self, x: Tensor) -> Tensor:
        tokens, room = len(x), 3 * len(x) // E
        weights, index = (each.t().reshape(-1) for each in self.router(x).softmax(-1).topk(2))
        marks = nn.functional.one_hot(index, E)
        place = (marks.cumsum(0) - 1).gather(1, index[:, None])[:, 0]
        kept = place < room
        slot = torch.where(kept, index * room + place, E * room)
        given = x.new_zeros(E * room + 1, D).index_copy(0, slot, x.repeat(2, 1))[:-1].view(E, room, D)
        y = torch.baddbmm(self.second, torch.baddbmm(self.first, given, self.up).relu(), self.down).view(-1, D)
        y = torch.cat([y, y.new_zeros(1, D)])[slot] * (weights * kept)[:, None]
        return y.view(2, tokens, D).sum(0)


def test_late_choices_in_one_row_where_the_example_has_none() -> None:
    torch.manual_seed(0)
    block = TrashSlot().double()
    opt = hexa_fx.optimize(copy.deepcopy(block), torch.randn(12, D, dtype=torch.float64))
    assert opt.report.blocks[0].status == "rewritten", opt.report.blocks[0].reason
    alike = torch.randn(1, D, dtype=torch.float64) + 0.1 * torch.randn(40, D, dtype=torch.float64)
    for x in (alike, alike[:1], torch.randn(9, D, dtype=torch.float64)):
        assert compare(block, opt, (x,), {}).within(1e-9)
