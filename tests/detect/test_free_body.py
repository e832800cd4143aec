"""Experts of unusual form become steps over all routed rows; whatever mixes rows, draws numbers or differs is refused."""

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hexa_fx
from tests.zoo.common import looped
from tests.zoo.compare import compare

D, I = 6, 10  # noqa: E741


class Expert(nn.Module):
    """Subclasses say what stands between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(D, I), nn.Linear(I, D)

    def between(self, h: torch.Tensor) -> torch.Tensor:
        return torch.relu(h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.between(self.fc1(x)))


class Experts(nn.Module):
    """A loop over experts whose routing is given, as in transformers."""

    def __init__(self, make: type[nn.Module], count: int = 4) -> None:
        super().__init__()
        self.experts = nn.ModuleList(make() for _ in range(count))

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return looped(x, weights, ids, self.experts)


def routing(tokens: int, experts: int, k: int = 2, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, D, generator=generator, dtype=torch.float64)
    ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :k]
    return x, ids, torch.rand(tokens, k, generator=generator, dtype=torch.float64)


def optimized(make: type[nn.Module], count: int = 4) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    model = Experts(make, count).double()
    return model, hexa_fx.optimize(model, routing(9, count))


def code(opt: nn.Module) -> str:
    (block,) = opt.report.blocks
    assert block.status == "rewritten", block.reason
    return opt.graphs[block.path].rewritten.code


def reason(make: type[nn.Module]) -> str:
    (block,) = optimized(make)[1].report.blocks
    assert block.status == "refused", block.expert
    return block.reason


class Tanhs(Expert):
    """A linear layer in the middle, and a function that is no known activation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.middle = nn.LayerNorm(I), nn.Linear(I, I, bias=False)
        nn.init.normal_(self.norm.weight)

    def between(self, h: torch.Tensor) -> torch.Tensor:
        return self.middle(torch.tanh(self.norm(h)))


class NoEpsilon(Expert):
    """Divides by the row's own size, which is 0/0 in a row of zeros; the scale's shape needs broadcasting."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(D, I, bias=False)
        self.scale, self.gain = nn.Parameter(torch.randn(1, I)), nn.Parameter(torch.randn(()))

    def between(self, h: torch.Tensor) -> torch.Tensor:
        return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True)) * self.scale + self.gain


class Residual(Expert):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class InPlace(Expert):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        rows = h.shape[0]
        return h.mul_(0.5).tanh_().view(rows, 2, I // 2).flip(2).reshape(rows, h.shape[1])


class Long(Expert):
    """So many steps that its tokens are not seen from its end."""

    def between(self, h: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            h = torch.sin(h) + 0.5
        return h


FORMS = (Tanhs, NoEpsilon, Residual, InPlace, Long)


@pytest.mark.parametrize("make", FORMS)
def test_equal_whatever_the_routing(make):
    model, opt = optimized(make)
    assert "esmm" in code(opt)
    x, ids, weights = routing(7, 4, seed=3)
    given = {
        "random": ids,
        "all to one": torch.tensor([[2, 0]]).expand(7, 2),
        "two experts without tokens": ids % 2,
        "sentinels": torch.where(torch.arange(7)[:, None] % 3 == 0, 4, ids),
        "nothing but sentinels": torch.full_like(ids, 4),
    }
    for name, chosen in given.items():
        found = compare(model, opt, (x, chosen, weights))
        assert found.within(1e-10), f"{name}: {found}"
    empty = (x[:0], ids[:0], weights[:0])
    assert compare(model, opt, empty).within(1e-10)


@pytest.mark.parametrize("make", FORMS)
def test_no_gradient_is_nan_with_sentinels(make):
    _, opt = optimized(make)
    x, ids, weights = routing(7, 4)
    x.requires_grad_(True)
    weights.requires_grad_(True)
    opt(x, torch.where(ids == 1, 4, ids), weights).sum().backward()
    for tensor in (x, weights, *opt.parameters()):
        assert tensor.grad is not None
        assert bool(torch.isfinite(tensor.grad).all())


def test_graph_does_not_grow_with_the_experts():
    few, many = (code(optimized(Tanhs, count)[1]) for count in (3, 9))
    assert few.count("\n") == many.count("\n")
    assert few.count("hexa.esmm.default(") == 3
    assert few.count("hexa.reindex.default(") == few.count("hexa.combine.default(") == 1
    assert "moe_ffn" not in few


def test_the_report_lists_the_operations():
    _, opt = optimized(Tanhs)
    (block,) = opt.report.blocks
    assert block.expert == "linear, layer_norm, tanh, linear, linear"
    assert (block.num_experts, block.top_k, block.hidden_size, block.intermediate_size) == (4, 2, D, I)
    assert opt.graphs[block.path].lowered is None
    assert "hexa.esmm" in str(opt.graphs[block.path])


class BatchNormed(Expert):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(I)

    def between(self, h: torch.Tensor) -> torch.Tensor:
        return self.norm(h)


def between(step: Callable[[torch.Tensor], torch.Tensor]) -> type[Expert]:
    return type("Other", (Expert,), {"between": lambda self, h: step(h)})


class OnSequences(Experts):
    """Each expert on all of (1, T, D), times the weights of the tokens that chose it."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        chosen = (weights[:, None] * (ids[:, None] == torch.arange(len(self.experts))[:, None])).sum(2)
        return sum(expert(x[None])[0] * chosen[:, number, None] for number, expert in enumerate(self.experts))


@pytest.mark.parametrize(
    "step",
    [
        lambda h: h.softmax(dim=2) - h.mean(2, keepdim=True) + F.normalize(h, 2, 2),
        lambda h: torch.cat([part * h.size(2) for part in h.chunk(2, dim=2)], 2),
        lambda h: h.unflatten(2, (2, -1)).cumsum(3).flatten(2) - h.sum((2,)).unsqueeze(2),
    ],
)
def test_dimensions_of_rows_are_counted_from_the_front_too(step: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch.manual_seed(1)
    model = OnSequences(between(step)).double()
    opt = hexa_fx.optimize(model, routing(9, 4))
    assert "esmm" in code(opt)
    assert compare(model, opt, routing(7, 4, seed=3)).within(1e-10)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (BatchNormed, "batch_norm"),
        (between(lambda h: F.softmax(h, dim=0)), "softmax inside the experts mixes rows"),
        (between(lambda h: h - h.mean(0)), "mean inside the experts"),
        (between(lambda h: h.cumsum(0)), "cumsum inside the experts mixes rows"),
        (between(lambda h: torch.sin(h) + torch.randn_like(h)), "random numbers"),
    ],
)
def test_refused(make, words):
    assert words in reason(make)


def test_experts_that_differ_are_refused():
    kinds = itertools.cycle((nn.Tanh, nn.Softsign))

    class Different(Expert):
        def __init__(self) -> None:
            super().__init__()
            self.act = next(kinds)()

        def between(self, h: torch.Tensor) -> torch.Tensor:
            return self.act(h)

    assert reason(Different)
