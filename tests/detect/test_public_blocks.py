"""Ways of writing that blocks of public repositories have and the zoo has not."""

from typing import Any

import pytest
import torch
from torch import nn

import hexa_fx
from tests.zoo.agree import agree, rewritten, tokens
from tests.zoo.common import MLP, TopKGate, experts, looped
from tests.zoo.variant import D, E, I, K


class Keeps(nn.Module):
    """Leaves shapes, counts and other numbers on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = TopKGate(), experts(MLP)

    def routed(self, flat: torch.Tensor) -> Any:
        return self.gate(flat)

    def forward(self, x: torch.Tensor) -> Any:
        self.shape = x.shape
        flat = x.reshape(-1, D)
        weights, index = self.routed(flat)
        self.rows, self.highest = len(flat), weights.detach().sum().item()
        order = index.flatten().argsort(stable=True)
        self.sizes = index.flatten().bincount(minlength=E).tolist()
        rows = flat[order // K].split(self.sizes)
        out = torch.cat([expert(given) for expert, given in zip(self.experts, rows)]) * weights.flatten()[order, None]
        return torch.zeros_like(flat).index_add(0, order // K, out).view(self.shape)


class WithLoss(TopKGate):
    """Has a loss in train mode, and none in eval mode."""

    def forward(self, x: torch.Tensor) -> Any:
        found = super().forward(x)
        self.loss = found[0].square().mean() if self.training else 0
        return found


class Asks(Keeps):
    """Returns what its router left on itself, which is a number in one mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = WithLoss()

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.gate.loss


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("kind", [Keeps, Asks], ids=lambda kind: kind.__name__)
def test_numbers_are_left_on_modules(kind: type[Keeps], train: bool) -> None:
    block = kind().double()
    optimized = hexa_fx.optimize(block, tokens(2, 7))
    for x in (tokens(3, 5), tokens(1, 1)):
        agree(block, optimized, x, train=train)
        assert (optimized.shape, optimized.rows, optimized.sizes) == (block.shape, block.rows, block.sizes)
        assert optimized.highest == pytest.approx(block.highest)
        assert list(map(type, (optimized.shape, optimized.rows, optimized.sizes))) == [torch.Size, int, list]


def test_a_router_alone_in_the_other_mode_leaves_what_it_leaves_there() -> None:
    optimized = hexa_fx.optimize(Asks().double(), tokens(2, 7)).eval()
    optimized.gate.train()
    assert isinstance(optimized(tokens(3, 5))[1], torch.Tensor)


class IntoBuffer(torch.autograd.Function):
    """Products of sorted rows with the matrices of their experts, written into parts of a buffer; so is backward."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sizes: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, sizes, weight)
        out = torch.empty((rows.size(0), weight.size(2)), dtype=rows.dtype)
        parts = sizes.tolist()
        for number, (given, into) in enumerate(zip(rows.split(parts), out.split(parts))):
            torch.mm(given, weight[number], out=into)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor]:
        rows, sizes, weight = ctx.saved_tensors
        parts, of_rows, of_weight = sizes.tolist(), torch.empty_like(rows), torch.empty_like(weight)
        slices = zip(rows.split(parts), gradient.split(parts), of_rows.split(parts))
        for number, (given, cotangent, into) in enumerate(slices):
            torch.mm(cotangent, weight[number].T, out=into)
            torch.mm(given.T, cotangent, out=of_weight[number])
        return of_rows, None, of_weight


class Parallel(nn.Module):
    def __init__(self, inp: int, out: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(E, inp, out) / 4)

    def forward(self, rows: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        return IntoBuffer.apply(rows, sizes, self.w)


class TwoStacks(nn.Module):
    """Each projection of all experts is a module, which is given how many rows every expert gets; the code around them chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.experts, self.output_experts = Parallel(D, I), Parallel(I, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        weights, index = self.gate(flat).softmax(-1).topk(K)
        order = index.flatten().argsort(stable=True)
        sizes = nn.functional.one_hot(index, E).sum((0, 1))
        rows = self.output_experts(self.experts(flat[order // K], sizes).relu(), sizes) * weights.flatten()[order, None]
        return torch.zeros_like(flat).index_add(0, order // K, rows).view(x.shape)


@pytest.mark.parametrize("train", [False, True])
def test_products_written_into_buffers_by_a_function_are_seen(train: bool) -> None:
    rewritten(TwoStacks().double(), tokens(2, 7), tokens(3, 5), tokens(1, 1), train=train)


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


class Guarded(nn.Module):
    """Keeps a sum off zero by the smallest step of its dtype, which is another one where it is compared in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(D, E, bias=False), experts(MLP)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        weights, index = self.gate(flat).softmax(-1).topk(K)
        weights = weights / (weights.sum(-1, keepdim=True) + torch.finfo(x.dtype).eps)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(index == number)
            out[token] += expert(flat[token]) * weights[token, slot, None]
        return out.view_as(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_limits_of_a_dtype(dtype: torch.dtype) -> None:
    block = Guarded().to(dtype)
    optimized = rewritten(block, tokens(2, 7, dtype=dtype), tolerance=1e-5 if dtype == torch.float32 else 2e-2)
    agree(
        block,
        optimized,
        tokens(3, 5, dtype=dtype),
        tolerance={torch.float32: 1e-5, torch.float64: 1e-10}.get(dtype, 3e-2),
    )
    assert torch.finfo(torch.float64).eps < 1e-15


class Shares(Guarded):
    """Counts which share of the tokens every expert got, but for those without tokens: of no tokens that would be 0 / 0."""

    def __init__(self) -> None:
        super().__init__()
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
