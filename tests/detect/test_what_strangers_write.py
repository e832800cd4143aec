"""Ways of writing that people have and the zoo has not, of which some are in public repositories."""

import collections
from typing import Any

import pytest
import torch
from torch import nn

import hexa_fx
from tests.zoo.agree import agree, rewritten, tokens
from tests.zoo.bodies import SharedPostNorm
from tests.zoo.common import MLP, TopKGate, experts, looped
from tests.zoo.refusals import DifferentWidths
from tests.zoo.unjustified import AddsUpInItsInput
from tests.zoo.variant import D, E, I, K

VOCABULARY = 40


class Mixture(DifferentWidths):
    """The zoo's loop over experts, these being alike."""

    def __init__(self, expert: type[nn.Module] = MLP) -> None:
        super().__init__()
        self.experts = experts(expert)


class OneDown(Mixture):
    """All experts have the same last layer."""

    def __init__(self) -> None:
        super().__init__()
        for expert in self.experts:
            expert.fc2 = self.experts[0].fc2


class TwoAlike(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.experts[1].fc1.weight = self.experts[0].fc1.weight


class Maxout(nn.Module):
    """The larger of every two hidden channels."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * I), nn.Linear(I, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).unflatten(-1, (I, 2)).max(-1).values)


class MaxoutMixture(Mixture):
    def __init__(self) -> None:
        super().__init__(Maxout)


class Nested(Mixture):
    def forward(self, x: torch.Tensor) -> Any:
        out = super().forward(x)
        return {"outputs": [out, collections.OrderedDict(twice=2 * out, size=x.shape[0])], "logits": (self.gate(x)[0],)}


class DictGate(TopKGate):
    """Returns a dict with a list for every expert, and the weights; what is made of the dict may stand outside of the mixture."""

    def forward(self, x: torch.Tensor) -> Any:
        weights, index = super().forward(x)
        places = [torch.where(index == number) for number in range(E)]
        lists = {e: [token, weights[token, slot]] for e, (token, slot) in enumerate(places)}
        return lists, weights


class ByDict(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.gate = DictGate()

    def forward(self, x: torch.Tensor) -> Any:
        flat = x.reshape(-1, D)
        (lists, weights), out = self.gate(flat), torch.zeros_like(flat)
        for number, (token, weight) in lists.items():
            out.index_add_(0, token, self.experts[number](flat[token]) * weight[:, None])
        return out.view(x.shape), weights.pow(2).mean() + lists[0][1].sum()


class InHeads(nn.Module):
    """Values and outputs of an attention are mixtures of single layers, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.values, self.outputs = (nn.ModuleList(nn.Linear(D, D, bias=False) for _ in range(E)) for _ in range(2))
        self.gates = nn.ModuleList(TopKGate() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = self.mix(x, self.values, self.gates[0])
        return self.mix(nn.functional.scaled_dot_product_attention(x, x, values), self.outputs, self.gates[1])

    def mix(self, x: torch.Tensor, layers: nn.ModuleList, gate: nn.Module) -> torch.Tensor:
        flat = x.reshape(-1, D)
        weights, index = gate(flat)
        return looped(flat, weights, index, layers).view(x.shape)


class ScaledRows(Mixture):
    """The sorted weights, not the router's, are multiplied by a number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        weights, index = self.gate(flat)
        order = index.flatten().argsort()
        rows = flat[order // index.shape[1]].split(index.flatten().bincount(minlength=E).tolist())
        outputs = torch.cat([expert(each) for expert, each in zip(self.experts, rows)])
        scaled = outputs * (weights.flatten()[order].unsqueeze(-1) * 4.0)
        return torch.zeros_like(flat).index_add(0, order // index.shape[1], scaled).view(x.shape)


class ListedAhead(Mixture):
    """A list of layers with biases, all of which work on every token before one is routed."""

    def __init__(self) -> None:
        super().__init__()
        self.views = nn.ModuleList(nn.Linear(D, D) for _ in range(E))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + sum(view(x) for view in self.views))


class Filled(Mixture):
    """Some hidden channels are switched off, the same ones for all experts; each run of an expert inverts the mask anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keep", torch.arange(I) % 3 > 0)

    def masked(self, h: torch.Tensor) -> torch.Tensor:
        return h.masked_fill(~self.keep, 0)

    def expert(self, e: int, rows: torch.Tensor) -> torch.Tensor:
        own = self.experts[e]
        return own.fc2(self.masked(own.act(own.fc1(rows))))


class Multiplied(Filled):
    def masked(self, h: torch.Tensor) -> torch.Tensor:
        return h * ~self.keep


class Written(Filled):
    def masked(self, h: torch.Tensor) -> torch.Tensor:
        h = h.clone()
        h[:, ~self.keep] = 0
        return h


class Scale(nn.Module):
    """Holds a plain tensor, which a caller may change at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class ScaledNorm(SharedPostNorm):
    """The norm behind the experts is taken apart, with the tensor in it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Sequential(Scale(), self.norm)


class Swapped(AddsUpInItsInput):
    """Takes the router's probabilities for ids: no expert runs."""

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().route(x)[::-1]


class UpBeforeGate(nn.Module):
    """Batched experts that add their biases after the products, the up projection's first."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, E)
        self.up, self.gate = (nn.Parameter(torch.randn(E, D, I) / D**0.5) for _ in range(2))
        self.up_bias, self.gate_bias = (nn.Parameter(torch.randn(E, I)) for _ in range(2))
        self.down = nn.Parameter(torch.randn(E, I, D) / I**0.5)

    def biased(self, gate: torch.Tensor) -> torch.Tensor:
        return gate + self.gate_bias.unsqueeze(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape, x = x.shape, x.flatten(0, 1)
        weights, index = self.router(x).softmax(-1).topk(2)
        share = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weights)
        up, gate = (torch.einsum("td,edi->eti", x, weight) for weight in (self.up, self.gate))
        hidden = (up + self.up_bias.unsqueeze(1)) * nn.functional.silu(self.biased(gate))
        return (torch.bmm(hidden, self.down) * share.t().unsqueeze(-1)).sum(0).view(shape)


class OnlyUpBiased(UpBeforeGate):
    def biased(self, gate: torch.Tensor) -> torch.Tensor:
        return gate


class PassesOn(nn.Module):
    """Its router gives the state that it was given on beside its choice, and takes from every weight what its expert had lately, as
    GramSpec-MoE does where its router has no recurrent layer; the weights are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.start, self.experts = StatefulGate(), nn.Linear(D, E), experts(MLP)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, D)
        self.weights, ids, state = self.gate(rows, self.start(x.mean(1)).sum(0))
        return looped(rows, self.weights, ids, self.experts).view_as(x) + state.sum()


class StatefulGate(TopKGate):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("load", torch.rand(E))

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> Any:
        weights, ids = super().forward(x)
        return weights - 0.1 * (self.load / self.load.sum())[ids], ids, state


class Hashed(nn.Module):
    """Experts by the ids of tokens, which the module embeds itself, from a table in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, D)
        self.register_buffer("table", torch.randint(0, E, (VOCABULARY,), dtype=torch.uint8))
        self.w1, self.w2 = nn.Parameter(torch.randn(E, D, I)), nn.Parameter(torch.randn(E, I, D))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, ids = self.embedding(tokens), self.table[tokens].long()
        return torch.einsum("bti,btid->btd", torch.einsum("btd,btdi->bti", x, self.w1[ids]).relu(), self.w2[ids])


@pytest.mark.parametrize(
    "kind",
    [OneDown, MaxoutMixture, Nested, ByDict, InHeads, ScaledRows, ListedAhead, ScaledNorm, UpBeforeGate, PassesOn],
    ids=lambda kind: kind.__name__,
)
def test_rewritten_and_equal(kind: type[nn.Module]) -> None:
    rewritten(kind().double(), tokens(2, 7), tokens(3, 5), tokens(1, 1))


def test_the_up_projection_may_have_the_only_bias() -> None:
    found = rewritten(OnlyUpBiased().double(), tokens(2, 7), tokens(3, 5), tokens(1, 1))
    assert found.report.rewritten[0].expert == "silu(x Wg) * (x Wu + bu) Wd"


class Rotated(Mixture):
    """Positions are complex numbers, as in Llama 4."""

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (D // 2, 2)))
        return super().forward(torch.view_as_real(pairs * turns).flatten(-2))


def test_an_argument_of_complex_numbers() -> None:
    calls = [
        (tokens(2, n), torch.polar(torch.ones(n, D // 2), torch.randn(n, D // 2)).to(torch.complex128)) for n in (7, 5)
    ]
    rewritten(Rotated().double(), *calls, train=False)


def test_experts_from_a_table_by_the_tokens_ids() -> None:
    """Another table is another routing: it is read in every call."""
    block = Hashed().double()
    optimized = rewritten(block, torch.randint(0, VOCABULARY, (2, 7)))
    for size in ((3, 5), (1, 1)):
        agree(block, optimized, torch.randint(0, VOCABULARY, size))
        for each in (block, optimized):
            each.table.bitwise_xor_(1)


@pytest.mark.parametrize("kind", [Filled, Multiplied, Written], ids=lambda kind: kind.__name__)
def test_a_mask_over_features_is_read_in_every_call(kind: type[nn.Module]) -> None:
    block = kind().double()
    optimized = hexa_fx.optimize(block, tokens(2, 7))
    for _ in range(2):
        agree(block, optimized, tokens(3, 5))
        for each in (block, optimized):
            each.keep.logical_not_()


GIVEN: dict[str, Any] = {
    "a layer": lambda block: block.scores,
    "its forward": lambda block: block.scores.forward,
    "a dict of layers": lambda block: block.by_name,
    "a list of layers": lambda block: [block.scores],
    "a function": lambda block: torch.tanh,
    "a class": lambda block: nn.Linear,
    "limits": lambda block: torch.finfo(torch.float32),
}


class Given(nn.Module):
    """Has one layer of its own, and works with what it is given besides."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E)

    def forward(self, given: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given = given[0] if isinstance(given, list) else given["scores"] if isinstance(given, nn.ModuleDict) else given
        logits = self.gate(x)
        if given in (torch.tanh, nn.Linear):
            logits = torch.tanh(logits)
        elif callable(given):
            logits = logits + given(x)
        return logits.softmax(-1).topk(2, -1)


class Giving(nn.Module):
    """Its router is given a layer or a function of the block, as in public rewritings of DeepSeek-V3's gate."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.router, self.experts = what, Given(), experts(MLP)
        self.scores = nn.Linear(D, E)
        self.by_name = nn.ModuleDict({"scores": nn.Linear(D, E)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        weights, ids = self.router(GIVEN[self.what](self), flat)
        return looped(flat, weights, ids, self.experts).view_as(x)


@pytest.mark.parametrize("what", GIVEN)
def test_a_router_that_is_given_layers_and_functions(what: str) -> None:
    """No graph can spell these: the generated code was no Python, or named what it did not know."""
    rewritten(Giving(what).double(), tokens(2, 7), tokens(3, 5), tokens(1, 1))


def test_a_result_inside_a_result_keeps_its_class() -> None:
    optimized = hexa_fx.optimize(Nested().double(), tokens(2, 7))
    inner = optimized(tokens(3, 5))["outputs"][1]
    assert type(inner) is collections.OrderedDict
    assert inner["size"] == 3


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (TwoAlike, "some experts share a parameter: experts.1.fc1.weight is experts.0.fc1.weight"),
        (Swapped, "and would be lost"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_refused_with_a_sentence(kind: type[nn.Module], reason: str) -> None:
    report = hexa_fx.explain(kind().double(), tokens(2, 7))
    assert not report.rewritten
    assert reason in report.blocks[0].reason
    assert "hexa_fx itself failed" not in report.blocks[0].reason


class Keeps(nn.Module):
    """Leaves shapes, counts and other numbers on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = TopKGate(), experts(MLP)

    def forward(self, x: torch.Tensor) -> Any:
        self.shape = x.shape
        flat = x.reshape(-1, D)
        weights, index = self.gate(flat)
        self.rows, self.highest = len(flat), weights.detach().sum().item()
        order = index.flatten().argsort(stable=True)
        self.sizes = index.flatten().bincount(minlength=E).tolist()
        rows = flat[order // K].split(self.sizes)
        out = torch.cat([expert(given) for expert, given in zip(self.experts, rows)]) * weights.flatten()[order, None]
        return torch.zeros_like(flat).index_add(0, order // K, out).view(self.shape)


@pytest.mark.parametrize("train", [False, True])
def test_numbers_are_left_on_modules(train: bool) -> None:
    block = Keeps().double()
    optimized = hexa_fx.optimize(block, tokens(2, 7))
    for x in (tokens(3, 5), tokens(1, 1)):
        agree(block, optimized, x, train=train)
        assert (optimized.shape, optimized.rows, optimized.sizes) == (block.shape, block.rows, block.sizes)
        assert optimized.highest == pytest.approx(block.highest)
        assert list(map(type, (optimized.shape, optimized.rows, optimized.sizes))) == [torch.Size, int, list]


class Calculator(nn.Module):
    """Gets all that the gate gives, and reads some of it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = experts(MLP)

    def forward(
        self, x: torch.Tensor, weights: torch.Tensor, index: torch.Tensor, **others: torch.Tensor
    ) -> torch.Tensor:
        return looped(x, weights, index, self.experts)


class AsksOthers(Calculator):
    def forward(
        self, x: torch.Tensor, weights: torch.Tensor, index: torch.Tensor, **others: torch.Tensor
    ) -> torch.Tensor:
        factor = 2.0 if others["load"].is_floating_point() else 1.0
        return super().forward(x * factor, weights, index)


class GivesMore(nn.Module):
    """How many tokens every expert gets is a number in eval mode, and a probability in train mode."""

    def __init__(self, calculator: type[Calculator]) -> None:
        super().__init__()
        self.gate, self.calculator = TopKGate(), calculator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        weights, index = self.gate(flat)
        load = weights.sum() if self.training else index.flatten().bincount(minlength=E)
        return self.calculator(flat, weights, index, load=load).view(x.shape)


@pytest.mark.parametrize(("kind", "kinds"), [(Calculator, 1), (AsksOthers, 2)], ids=["unread", "asked"])
def test_an_argument_of_which_nothing_is_read_may_be_of_any_kind(kind: type[Calculator], kinds: int) -> None:
    block = GivesMore(kind).double().eval()
    optimized = hexa_fx.optimize(block, tokens(2, 7))
    assert [found.path for found in optimized.report.rewritten] == ["calculator"]
    for train in (False, True):
        agree(block, optimized, tokens(3, 5), train=train)
    assert optimized.report.rewritten[0].calls.kinds == kinds


class InOneMatrix(nn.Module):
    """Both stacks in matrices, the first of which only its memory tells apart from (D, E * I), permuted by a map of choices."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(D, E * I)), nn.Parameter(torch.randn(E * I, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        weights, index = self.gate(flat).softmax(-1).topk(K)
        probs = torch.zeros(len(flat), E).to(x).scatter(1, index, weights)
        chosen = torch.zeros(len(flat), E, dtype=torch.bool).scatter(1, index, True).T.contiguous()
        token = torch.arange(len(flat)).expand(E, -1).masked_select(chosen)
        up, down = self.up.view(E, D, -1), self.down.view(E, -1, D)
        parts = flat.index_select(0, token).split(chosen.sum(1).tolist())
        given = torch.cat([(part @ up[e]).relu() @ down[e] for e, part in enumerate(parts)])
        given = given * probs.T.contiguous().masked_select(chosen).unsqueeze(-1)
        return torch.zeros_like(flat).scatter_add(0, token[:, None].expand(-1, D), given).view(x.shape)


def test_stacks_that_lie_in_matrices() -> None:
    rewritten(InOneMatrix().double(), tokens(2, 7), tokens(3, 5), tokens(1, 1))


class Shares(nn.Module):
    """Counts which share of the tokens every expert got, but for those without tokens: of no tokens that would be 0 / 0."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(D, E, bias=False), experts(MLP)
        self.register_buffer("share", torch.zeros(E))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        weights, index = self.gate(flat).softmax(-1).topk(K)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            chosen = (index == number).any(-1)
            if chosen.any():
                self.share[number] += chosen.sum() / len(flat)
                token, slot = torch.where(index == number)
                out[token] += expert(flat[token]) * weights[token, slot, None]
        return out.view_as(x)


def test_shares_of_no_tokens() -> None:
    block = Shares().double()
    optimized = rewritten(block, tokens(2, 7), tokens(3, 5), tokens(1, 1))
    block(tokens(0, 4)), optimized(tokens(0, 4))
    assert not optimized.share.isnan().any()
    agree(block, optimized, tokens(3, 5))
