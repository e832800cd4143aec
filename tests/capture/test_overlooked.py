"""Blocks that hold what looks like experts and choose none by index are named, each with its reason; other modules are not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hexa_fx
from hexa_fx.capture import overlooked
from hexa_fx.capture.observe import observe
from tests.zoo.common import MLP, Looped, looped

D, I, E = 8, 12, 4  # noqa: E741


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E)


class Listed(Router):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, I), nn.ReLU(), nn.Linear(I, D)) for _ in range(E))


class Masked(Listed):
    """Experts get the rows whose score is above a limit."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, out = self.gate(x).softmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mask = scores[:, number] > 0.3
            out[mask] += expert(x[mask]) * scores[mask, number, None]  # here
        return out


class Soft(Listed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.stack([expert(x) for expert in self.experts], -1) * self.gate(x).softmax(-1)[:, None]).sum(-1)


class Slots(Listed):
    """Soft MoE: one slot an expert, a mixture of all tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x)
        mixed = scores.softmax(0).t() @ x
        given = torch.stack([expert(mixed[number]) for number, expert in enumerate(self.experts)])
        return scores.softmax(1) @ given


class Stacked(Router):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(E, D, I)), nn.Parameter(torch.randn(E, I, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum(
            "te,ted->td", self.gate(x).softmax(-1), torch.relu(x @ self.w1).matmul(self.w2).movedim(0, 1)
        )


class Unreached(Listed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gate(x).sum(-1, keepdim=True)


class Integers(Router):
    """A choice like any other, of experts that are buffers of integers."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in (("w1", (E, D, I)), ("w2", (E, I, D))):
            self.register_buffer(name, torch.randint(-9, 9, shape, dtype=torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number in range(E):
            token, slot = torch.where(chosen == number)
            hidden = torch.relu(x[token] @ self.w1[number].float())
            out.index_add_(0, token, hidden @ self.w2[number].float() * weights[token, slot, None])
        return out


class Chooses(Listed):
    """Two experts a token."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        return looped(x, weights, chosen, self.experts)


class InPlainList(Chooses):
    """Experts that torch does not know."""

    def __init__(self) -> None:
        super().__init__()
        known = list(self.experts)
        del self.experts
        self.experts = known


class ByPlace(Listed):
    """A part of the rows for every expert, whatever is in them."""

    def __init__(self) -> None:
        super().__init__()
        del self.gate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([expert(part) for expert, part in zip(self.experts, x.split(len(x) // E))])  # here


class Around(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.block(x)


X = torch.randn(20, D, generator=torch.Generator().manual_seed(0))
REASONS = {
    **dict.fromkeys((Masked, Soft, Stacked, Slots, ByPlace), overlooked.UNCHOSEN),
    InPlainList: overlooked.HIDDEN.format("list", "experts", "ModuleList"),
    Unreached: overlooked.NOT_REACHED,
    Integers: overlooked.INTEGERS.format("w1: int8, w2: int8"),
}


@pytest.mark.parametrize("kind", REASONS, ids=lambda kind: kind.__name__)
def test_it_is_named_with_its_reason(kind: type[nn.Module]) -> None:
    report = hexa_fx.explain(Around(kind()), X)
    assert [(block.path, block.status, block.reason) for block in report.blocks] == [
        ("block", "refused", REASONS[kind])
    ]
    assert f"block: left as it is: {REASONS[kind]}" in str(report)
    assert "no MoE block was found" not in str(report)


def test_the_place_of_a_model_whose_experts_did_not_run_is_in_its_own_code() -> None:
    (block,) = hexa_fx.explain(Unreached(), X).blocks
    assert block.location is None or block.location.file == __file__


@pytest.mark.parametrize("kind", [ByPlace, Masked])
def test_the_place_is_the_line_that_calls_an_expert(kind: type[nn.Module]) -> None:
    (block,) = hexa_fx.explain(Around(kind()), X).blocks
    assert block.location is not None
    with open(block.location.file) as source:
        assert source.readlines()[block.location.line - 1].endswith("# here\n")


@pytest.mark.parametrize("kind", [Masked, Chooses])
def test_integers_in_a_list_too(kind: type[Listed]) -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.randint(-9, 9, (D, D), dtype=torch.int8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.codes.float()

    block = kind()
    block.experts = nn.ModuleList(Packed() for _ in range(E))
    (found,) = hexa_fx.explain(Around(block), X).blocks
    assert found.reason == overlooked.INTEGERS.format("0.codes: int8, 1.codes: int8")


def test_heads_in_a_mixture_are_not_experts() -> None:
    """Of a model that has a mixture's name, on what other layers made."""

    class BranchesOfMoE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mergers = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
            self.layers = nn.Sequential(nn.Sequential(nn.Linear(D, 3 * D)), nn.Sequential(nn.Linear(3 * D, D)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum(merger(self.layers(x * number)) for number, merger in enumerate(self.mergers, 1))

    assert hexa_fx.explain(BranchesOfMoE(), torch.randn(24, D)).blocks == ()


class Chosen(Listed):
    """One expert a token, chosen in a way that a subclass gives: (T,) ids."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, out = self.gate(x), torch.zeros_like(x)
        ids = self.choose(scores)
        for number, expert in enumerate(self.experts):
            out[ids == number] = expert(x[ids == number])
        return out * scores.softmax(-1).gather(1, ids[:, None])


CHOICES = {
    "argmin": lambda scores: scores.argmin(-1),
    "min": lambda scores: scores.min(-1).indices,
    "bucketize": lambda scores: torch.bucketize(scores[:, 0], torch.tensor([-0.5, 0.0, 0.5])),
    "searchsorted": lambda scores: torch.searchsorted(torch.tensor([-0.5, 0.0, 0.5]), scores[:, 0].contiguous()),
    "position": lambda scores: torch.arange(len(scores)) % E,
    "random": lambda scores: torch.randint(0, E, (len(scores),)),
    "gumbel": lambda scores: F.gumbel_softmax(scores, hard=True).detach() @ torch.arange(E).float(),
}


@pytest.mark.parametrize("how", CHOICES)
def test_other_ways_to_choose_are_looked_at(how: str) -> None:
    model = Chosen()
    model.choose = lambda scores: CHOICES[how](scores).long()
    assert [candidate.reason for candidate in observe(model, (torch.randn(20, D),), {})] == [""]


class Decaying(nn.Module):
    """Attention over the tokens that score best, with a decay for each head that is stored as it is broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.scores = nn.Parameter(torch.ones(1, 1, 4, 1)), nn.Linear(D, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best = x[self.scores(x)[:, 0].topk(3).indices].view(3, 1, 4, -1)
        return x + (best * self.decay.exp()).sum((0, 1)).flatten()


def test_a_row_of_numbers_is_no_stack_of_experts() -> None:
    assert observe(Decaying(), (torch.randn(20, D),), {}) == []


class Indexer(nn.Module):
    """Chooses which keys an attention reads, with two matrices of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.gate = nn.Parameter(torch.randn(E, D)), nn.Parameter(torch.randn(D, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = F.linear(x, self.gate) @ self.keys.t()
        return scores.topk(2).indices


class Indexed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.indexer, self.experts = Indexer(), Looped(lambda: MLP(D, I), D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.indexer(x).float().mean(-1, keepdim=True)
        return self.experts(x) * chosen


def test_what_gives_ids_alone_is_no_block() -> None:
    report = hexa_fx.explain(Indexed(), torch.randn(9, D))
    assert [(block.path, block.status) for block in report.blocks] == [("experts", "rewritten")], report
