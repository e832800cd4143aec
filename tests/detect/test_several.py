"""Several mixtures in one forward: every one a region of its own; and host decisions on what came out of them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hexa_fx
from tests.zoo.common import looped
from tests.zoo.compare import compare

D = 8


def mlps(experts: int, hidden: int = 12) -> nn.ModuleList:
    return nn.ModuleList(nn.Sequential(nn.Linear(D, hidden), nn.ReLU(), nn.Linear(hidden, D)) for _ in range(experts))


def skipping(x: torch.Tensor, router: nn.Module, experts: nn.ModuleList) -> torch.Tensor:
    """A loop over all experts that leaves out those without tokens."""
    weight, index = router(x).softmax(-1).topk(2)
    out = torch.zeros_like(x)
    for e, expert in enumerate(experts):
        token, slot = torch.where(index == e)
        if token.numel() == 0:
            continue
        out.index_add_(0, token, expert(x[token]) * weight[token, slot, None])
    return out


def hit(x: torch.Tensor, router: nn.Module, experts: nn.ModuleList) -> torch.Tensor:
    """A loop over the experts that were hit."""
    weight, index = router(x).softmax(-1).topk(2)
    out = torch.zeros_like(x)
    mask = F.one_hot(index, len(experts)).permute(2, 1, 0)
    for e in mask.sum((-1, -2)).nonzero():
        slot, token = torch.where(mask[e[0]])
        out.index_add_(0, token, experts[e[0]](x[token]) * weight[token, slot, None])
    return out


def dense(x: torch.Tensor, router: nn.Module, up: nn.Parameter, down: nn.Parameter) -> torch.Tensor:
    weight, index = router(x).softmax(-1).topk(2)
    y = torch.einsum("tei,edi->ted", torch.einsum("td,eid->tei", x, up).relu(), down)
    return (y.gather(1, index[..., None].expand(-1, -1, D)) * weight[..., None]).sum(1)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.r1, self.r2, self.r3 = nn.Linear(D, 4), nn.Linear(D, 5), nn.Linear(D, 3)
        self.a, self.b, self.norm = mlps(4), mlps(5, 10), nn.LayerNorm(D)
        sizes = ((3, 12, D), (3, D, 12), (5, 14, D), (5, D, 14))
        self.u1, self.d1, self.u2, self.d2 = (nn.Parameter(torch.randn(*size) / 3) for size in sizes)


class SideBySide(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return hit(x, self.r1, self.a) + skipping(x, self.r2, self.b)


class OneRouter(Two):
    def __init__(self) -> None:
        super().__init__()
        self.b = mlps(4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return hit(x, self.r1, self.a) + skipping(x, self.r1, self.b)


class ThreeKinds(Two):
    """And experts that every token goes to, which stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = mlps(2, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + hit(x, self.r1, self.a)
        x = x + dense(self.norm(x), self.r3, self.u1, self.d1)
        return skipping(x, self.r2, self.b) + sum(expert(x) for expert in self.shared)


class SameAgain(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + hit(x, self.r1, self.a)
        return x + hit(x, self.r1, self.a)


class OneOfThemAgain(Two):
    """Two scales, each with experts of its own, of which one goes over the tokens a second time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fine, coarse = self.norm(x), x.mean(0, keepdim=True) - x
        return hit(fine, self.r1, self.a) + skipping(coarse, self.r2, self.b) + skipping(x, self.r2, self.b)


REGIONS = {SideBySide: 2, OneRouter: 2, ThreeKinds: 3, SameAgain: 2, OneOfThemAgain: 3}


@pytest.mark.parametrize("kind", REGIONS)
def test_every_mixture_is_rewritten(kind: type[Two]) -> None:
    model = kind().double()
    opt = hexa_fx.optimize(model, torch.randn(14, D).double())
    assert [block.status for block in opt.report.blocks] == ["rewritten"], opt.report
    graph = opt.graphs[""].rewritten.graph
    combines = [n for n in graph.nodes if n.target in (torch.ops.hexa.moe_ffn.default, torch.ops.hexa.combine.default)]
    assert len(combines) == REGIONS[kind]
    assert not any(n.target == "index_add_" for n in graph.nodes)
    for tokens in (9, 1, 30):
        for train in (False, True):
            assert compare(model, opt, (torch.randn(tokens, D).double(),), train=train).within(1e-10)


class SameIds(Two):
    """The same experts again, by what was chosen before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, index = self.r1(x).softmax(-1).topk(2)
        for e, expert in [*enumerate(self.a)] * 2:
            token, slot = torch.where(index == e)
            x = x.index_add(0, token, expert(x[token]) * weight[token, slot, None])
        return x


class BranchOnOne(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + hit(x, self.r1, self.a)
        return y * 2 if float(y.detach().sum()) > -100 else y


class BranchOnWeights(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, index = self.r1(x).softmax(-1).topk(2)
        if weight.max() > 1e-6:
            weight = weight / weight.sum(-1, keepdim=True)
        return looped(x, weight, index, self.a)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (SameIds, "the same experts run more than once"),
        (BranchOnOne, "host decision"),
        (BranchOnWeights, "host decision"),
    ],
)
def test_refused_with_a_reason(kind: type[Two], reason: str) -> None:
    """A branch that nearly always goes one way shows in no comparison."""
    report = hexa_fx.explain(kind().double(), torch.randn(14, D).double())
    assert [reason in block.reason for block in report.refused] == [True], report


class Asserts(Two):
    """A check that numbers are finite becomes a condition."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + hit(x, self.r1, self.a)
        if not torch.isfinite(y).all():
            y = torch.nan_to_num(y)
        return y


def test_a_check_of_the_result_is_made_again() -> None:
    model = Asserts().double()
    opt = hexa_fx.optimize(model, torch.randn(14, D).double())
    assert opt.report.rewritten
    x = torch.randn(5, D).double()
    x[1, 2] = float("inf")
    for given in (x, x.nan_to_num(posinf=1.0)):
        torch.testing.assert_close(opt(given), model(given), rtol=1e-10, atol=1e-12)
