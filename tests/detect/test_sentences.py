"""What is said of MoE code that stays: what was seen, where, and what would be rewritten."""

import linecache
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hexa_fx
from hexa_fx.inspection.advice import advice
from tests.detect.test_what_strangers_write import Mixture
from tests.zoo.agree import tokens
from tests.zoo.common import MLP, TopKGate
from tests.zoo.variant import D, E, I

MASKS: defaultdict[tuple[int, ...], dict[str, torch.Tensor]] = defaultdict(dict)


class GateAndUp(Mixture):
    """In a dimension of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = None
        self.first, self.down = nn.Parameter(torch.randn(E, 2, I, D)), nn.Parameter(torch.randn(E, D, I))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        weights, index = self.gate(flat)
        out = torch.zeros_like(flat)
        for number in range(E):
            token, slot = torch.where(index == number)
            gate, up = (F.linear(flat[token], weight) for weight in self.first[number])
            out.index_add_(0, token, F.linear(F.silu(gate) * up, self.down[number]) * weights[token, slot, None])
        return out.view(x.shape)


class Convolutions(Mixture):
    """Images with channels first, an expert for each."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Conv1d(D, D, 1) for _ in range(E))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images, index = x.transpose(1, 2), self.gate.weight(x.mean(1)).argmax(-1)
        out = torch.zeros_like(images)
        for number, expert in enumerate(self.experts):
            out[index == number] = expert(images[index == number])
        return out.transpose(1, 2)


class Threshold(Mixture):
    def chosen(self, scores: torch.Tensor) -> torch.Tensor:
        return scores > 0.2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        scores = self.gate.weight(flat).softmax(-1)
        chosen, out = self.chosen(scores), torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token = chosen[:, number].nonzero().squeeze(1)
            out.index_add_(0, token, expert(flat[token]) * scores[token, number, None])
        return out.view(x.shape)


class ExpertsChoose(Threshold):
    def chosen(self, scores: torch.Tensor) -> torch.Tensor:
        best = scores.topk(3, 0).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter(0, best, True)


class ExpertsChooseInEach(Mixture):
    """Of every sample's tokens, by products with one-hot vectors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.gate.weight(x).softmax(-1).transpose(1, 2).topk(3)
        given = F.one_hot(index, x.shape[1]).to(x)
        rows = torch.einsum("becs,bsd->becd", given, x)
        out = torch.stack([expert(rows[:, number]) for number, expert in enumerate(self.experts)], 1)
        return torch.einsum("becs,bec,becd->bsd", given, weights, out)


class Cached(Mixture):
    """Keeps a tensor for every size that it has met."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = MASKS[tuple(x.shape)]
        if "ones" not in held:
            held["ones"] = torch.ones_like(x)
        return super().forward(x * held["ones"])


class Groups(Mixture):
    """A group is chosen, then an expert of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(D, 2) for _ in range(E))
        self.experts = nn.ModuleList(nn.ModuleList(nn.Linear(D, D) for _ in range(2)) for _ in range(E))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        group, out = self.gate.weight(flat).argmax(-1), torch.zeros_like(flat)
        for one, (router, experts) in enumerate(zip(self.inner, self.experts)):
            rows = torch.where(group == one)[0]
            weight, index = router(flat[rows]).softmax(-1).max(-1)
            for number, expert in enumerate(experts):
                chosen = torch.where(index == number)[0]
                out[rows[chosen]] = expert(flat[rows[chosen]]) * weight[chosen, None]
        return out.view(x.shape)


class SeveralGates(Mixture):
    """All experts on every token once, of which a sparse gate of each task sums up its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs, summed = torch.stack([expert(x) for expert in self.experts]), []
        for scores in (self.gate.weight(x), -self.gate.weight(x)):
            weights, index = scores.topk(2)
            summed.append(
                torch.einsum("...e,e...d->...d", torch.zeros_like(scores).scatter(-1, index, weights), outputs)
            )
        return torch.cat(summed, -1)


class SharedFactor(Mixture):
    """A matrix of all experts is a factor of each expert's."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.own = nn.Parameter(torch.randn(D, D)), nn.Parameter(torch.randn(E, D, D))

    def expert(self, e: int, rows: torch.Tensor) -> torch.Tensor:
        return self.experts[e](F.linear(rows, self.shared * self.own[e]))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            SharedFactor,
            "parameters that do not all have a part for each expert (shared does not); a weight has to be one",
        ),
        (GateAndUp, "an expert's part of first has more than two dimensions"),
        (Convolutions, "its experts are convolutions (conv1d)"),
        (Threshold, "each is given 1 to 3 experts here, perhaps by a comparison"),
        (ExpertsChoose, "every expert takes 3 of them, and some tokens are taken more often than others"),
        (ExpertsChooseInEach, "every expert takes 6 of them, and some tokens are taken more often than others"),
        (Groups, "experts lie in groups here (experts is a list of lists)"),
        (Cached, "by tolist(), item() or shape; as keys of a dict"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_the_sentence_names_the_place_and_what_helps(kind: type[nn.Module], said: str) -> None:
    torch.manual_seed(0)
    (block,) = hexa_fx.explain(kind().double(), tokens(2, 7)).blocks
    assert said in block.reason
    assert block.location is not None
    assert __file__.endswith(block.location.file.rpartition("/")[2])
    assert not advice(block.reason)  # it says so itself


class ByKey(Mixture):
    """One expert for all tokens."""

    def forward(self, x: torch.Tensor, number: str = "1") -> torch.Tensor:
        return x + self.experts._modules[number](self.gate.weight(x) @ self.gate.weight.weight)


class Centred(Mixture):
    def expert(self, e: int, rows: torch.Tensor) -> torch.Tensor:
        y = self.experts[e](rows) * 2
        return y - y.mean(0)  # decides


class Soft(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = self.gate.weight(x).softmax(-1)
        outputs = [expert(x) for expert in self.experts]  # decides
        return sum(gates[..., number, None] * y for number, y in enumerate(outputs))


@pytest.mark.parametrize(
    ("kind", "said"), [(Centred, "mixed between tokens"), (Soft, "nothing in torch chooses among its experts")]
)
def test_the_line_is_the_reason(kind: type[nn.Module], said: str) -> None:
    (block,) = hexa_fx.explain(kind().double(), tokens(2, 7)).blocks
    assert said in block.reason
    assert block.location is not None
    assert linecache.getline(__file__, block.location.line).endswith("# decides\n")


class TwoTasks(Mixture):
    """Two soft mixtures of the same experts, of tokens beside a category each."""

    def forward(self, x: torch.Tensor, category: torch.Tensor) -> list[torch.Tensor]:
        x = x + F.embedding(category, self.gate.weight.weight)
        y = torch.stack([expert(x) for expert in self.experts], -1)
        scores = self.gate.weight(x)
        return [(y * gates.softmax(-1)[..., None, :]).sum(-1) for gates in (scores, -scores)]


class OfSortedRows(nn.Module):
    """Gets rows by expert, and how many each gets."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(E, D, I)), nn.Parameter(torch.randn(E, I, D))

    def forward(self, rows: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        ends, out = sizes.cumsum(0), torch.zeros_like(rows)
        for number in range(E):
            part = slice(ends[number] - sizes[number], ends[number])
            out[part] = (rows[part] @ self.up[number]).relu() @ self.down[number]
        return out


class Dispatcher:
    """A plain object that keeps what it needs to put rows back, past its class."""

    def sort(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        vars(self)["order"] = index.flatten().argsort(stable=True)
        return x[self.order // index.shape[1]]


class Dispatched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.dispatcher, self.experts = TopKGate(), Dispatcher(), OfSortedRows()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        weights, index = self.gate(flat)
        rows = self.experts(self.dispatcher.sort(flat, index), index.flatten().bincount(minlength=E))
        back = torch.zeros_like(rows).index_copy(0, self.dispatcher.order, rows)
        return (back.view(-1, index.shape[1], D) * weights[..., None]).sum(1).view(x.shape)


class Mapped(nn.Module):
    """Every expert on every token by `torch.vmap`."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.gate(x).softmax(-1).topk(2, -1)
        stacked, _ = torch.func.stack_module_state(list(self.experts))
        outputs = torch.vmap(lambda p, v: torch.func.functional_call(self.experts[0], p, (v,)), (0, None))(stacked, x)
        return torch.einsum("etd,te->td", outputs, torch.zeros(len(x), 4).to(x).scatter(1, index, weights))


def _doubled(module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (args[0] * 2,)


def test_hooks_on_an_expert_are_named_where_their_work_is_not_understood() -> None:
    model = Mixture().double()
    model.experts[1].register_forward_pre_hook(_doubled)
    (block,) = hexa_fx.explain(model, tokens(2, 7)).blocks
    assert "'experts.1' has hooks, which only its own code calls" in block.reason
    assert not advice(block.reason)


class Counting(MLP):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += int(len(x) > 0)
        return super().forward(x)


class Uses(Mixture):
    """Notes what each expert got when it last got anything."""

    def __init__(self) -> None:
        super().__init__()
        self.usage = torch.zeros(E)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.gate(x)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(index == number)
            if token.numel():
                out[token] += expert(x[token]) * weights[token, slot, None]
                self.usage[number] = (index == number).sum().item()
        return out


class PassesOn(Mixture):
    """Tokens beyond the capacity, by lists that only experts with too many of them make."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.gate(x)
        room, dropped = int(x.shape[0] / E), []
        lists = [torch.where(index[:, 0] == number)[0] for number in range(E)]
        for number in range(E):
            if len(lists[number]) > room:
                dropped.append(lists[number][room:])
                lists[number] = lists[number][:room]
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out[lists[number]] = expert(x[lists[number]])
        if dropped:
            out[torch.cat(dropped)] = x[torch.cat(dropped)]
        return out * weights[:, :1]


class Nudged(Mixture):
    """Moves the bias of one expert after the other, as beginners' versions of balancing without a loss do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(E))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = (self.gate.weight(x) + self.bias).softmax(-1).topk(2, -1)
        out, used = torch.zeros_like(x), torch.zeros(E)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(index == number)
            used[number] = (index == number).sum()
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        for number in range(E):
            self.bias[number] += -0.5 if used[number] > used.mean() else 0.5
        return out


BY_COUNTS = "by how many tokens an expert gets, and one run shows what it does"
UNCHOSEN = "nothing in torch chooses among its experts by an index"
OTHERWISE = "which the rewritten block would leave otherwise"
SAID: dict[str, tuple[Callable[[], nn.Module], str, tuple[torch.Tensor, ...]]] = {
    "gates of tasks": (SeveralGates, "or are summed up several times (for the gate of each task, perhaps)", ()),
    "by a key": (ByKey, "Python chooses for all tokens alike (by a key, perhaps)", ()),
    "a part that is given rows by expert": (Dispatched, "the code changes self.dispatcher in place", ()),
    "soft, for several tasks": (TwoTasks, UNCHOSEN, (tokens(2, 7), torch.randint(E, (2, 7)))),
    "under vmap": (Mapped, "inside torch.func (vmap or grad), which hides the numbers", (torch.randn(9, 8).double(),)),
    "what single experts count": (lambda: Mixture(Counting), f".calls, {OTHERWISE}", ()),
    "what experts were given": (Uses, f"the code keeps usage, {OTHERWISE}", (tokens(3, 7).flatten(0, 1),)),
    "passed on": (PassesOn, BY_COUNTS, (torch.randn(24, D).double(),)),
    "moved one by one": (Nudged, BY_COUNTS, (torch.randn(24, D).double(),)),
}


@pytest.mark.parametrize(("kind", "said", "given"), SAID.values(), ids=SAID)
def test_the_sentence_names_the_cause(
    kind: Callable[[], nn.Module], said: str, given: tuple[torch.Tensor, ...]
) -> None:
    (block,) = hexa_fx.explain(kind().double(), given or tokens(2, 7)).blocks
    assert said in block.reason
