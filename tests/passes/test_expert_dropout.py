"""Dropout inside experts draws the original's random numbers: expert after expert, each for its rows in the original's order."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hexa_fx
from hexa_fx import analysis
from hexa_fx.analysis import analyse_model
from hexa_fx.inspection.inspector import Inspector
from hexa_fx.ops import reindex
from hexa_fx.passes.partition.layers import that_spread
from hexa_fx.passes.rewrite.emit_rows import drop, kept_rows
from tests.zoo.common import MLP, Looped, looped

D, EXPERTS, K = 8, 4, 2
ROUGH = hexa_fx.HexaConfig(verify=False)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(D, 12), nn.Linear(12, D), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(F.relu(self.up(F.dropout(x, 0.2, self.training)))))


class Mixture(nn.Module):
    def __init__(self, rows: str) -> None:
        super().__init__()
        self.router, self.rows = nn.Linear(D, EXPERTS), rows
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(F.dropout(x, 0.1, self.training)).softmax(-1).topk(K, -1)
        if self.rows == "all":
            dense = torch.stack([expert(x) for expert in self.experts], 1)
            return (dense.gather(1, ids[..., None].expand(-1, -1, D)) * weights[..., None]).sum(1)
        chosen, out = F.one_hot(ids, EXPERTS).permute(2, 1, 0), torch.zeros_like(x)
        for number in reversed(range(EXPERTS)) if self.rows == "last expert first" else range(EXPERTS):
            token, slot = torch.where(chosen[number].T)
            if self.rows == "by slot":
                slot, token = torch.where(chosen[number])
            if self.rows == "heaviest first":
                order = weights[token, slot].argsort(descending=True)
                token, slot = token[order], slot[order]
            result = self.experts[number](x[token]) * weights[token, slot, None]
            out = out.index_add(0, token, F.dropout(result, 0.4, self.training) if self.rows == "weighted" else result)
        return F.dropout(out, 0.1, self.training)


def outcome(block: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(3)
    x = x.clone().requires_grad_()
    y = block(x)
    found = torch.autograd.grad(y.square().sum(), [x, *block.parameters()], allow_unused=True, materialize_grads=True)
    return [y.detach(), *found, torch.rand(1)]


@pytest.mark.parametrize("rows", ["by token", "by slot", "weighted"])
def test_equal_seeds_give_equal_numbers(rows: str) -> None:
    block, x = Mixture(rows), torch.randn(9, D)
    optimized = hexa_fx.optimize(block, x, ROUGH)
    assert "train mode" not in str(optimized.report)
    for each in (x, torch.randn(70, D), torch.randn(1, D), x[:0]):
        torch.testing.assert_close(outcome(optimized.train(), each), outcome(block.train(), each))


class CopiedAfterNoise(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K, -1)
        out = looped(x, weights, ids, self.experts)
        noise = torch.randn(x.shape)
        return noise + out.clone()


def test_experts_draw_before_what_the_code_draws_after_them() -> None:
    block, x = CopiedAfterNoise("").train(), torch.randn(9, D)
    optimized = hexa_fx.optimize(block, x)
    assert optimized.report.rewritten, optimized.report
    torch.testing.assert_close(outcome(optimized, x), outcome(block, x))


@pytest.mark.parametrize("rows", ["last expert first", "heaviest first", "all"])
def test_other_draws_are_refused_in_train_mode(rows: str) -> None:
    block, x = Mixture(rows), torch.randn(9, D)
    optimized = hexa_fx.optimize(block, x, ROUGH)
    assert "dropout is active inside the experts" in str(optimized.report)
    torch.testing.assert_close(outcome(optimized.train(), x), outcome(block.train(), x))


def test_over_ranks_only_the_mode_without_dropout_is_spread(caplog: pytest.LogCaptureFixture) -> None:
    block, x = Mixture("by token"), torch.randn(9, D)
    forms = dict(analyse_model(block, (x,), ROUGH, Inspector(), spread=True).forms[""])
    assert that_spread(forms) == {"eval": forms["eval"]}
    assert "has its own code in train mode" in caplog.text
    assert that_spread({"train": forms["train"]}) == {"train": forms["train"]}


@pytest.mark.parametrize(
    ("make", "modes"), [(lambda: Mixture("by token"), 2), (lambda: Looped(lambda: MLP(D, 12), D), 1)]
)
def test_over_ranks_blocks_that_are_alike_are_analysed_once_a_mode(
    make: Callable[[], nn.Module], modes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for name in ("_analyse_dense", "under_any_autocast"):
        original = getattr(analysis, name)
        monkeypatch.setattr(analysis, name, lambda *args, f=original, n=name: made.append(n) or f(*args))
    model, x = nn.Sequential(*(make() for _ in range(3))), torch.randn(9, D)
    forms = analyse_model(model, (x,), ROUGH, Inspector(), spread=True).forms
    assert {(path, form.path) for path, each in forms.items() for form in each.values()} == {(n, n) for n in "012"}
    assert [len(each) for each in forms.values()] == [modes] * 3
    assert [made.count(name) for name in ("_analyse_dense", "under_any_autocast")] == [modes] * 2


@pytest.mark.parametrize("p", [0.3, 1.0])
@pytest.mark.parametrize("slots_first", [False, True])
def test_kept_rows(p: float, slots_first: bool) -> None:
    """Rows of sentinel ids are kept; others as one draw for each expert in turn says."""
    ids = torch.tensor([[1, 0], [4, 1], [1, 3], [0, 1]])
    v, inv, offs = reindex(ids, EXPERTS)
    torch.manual_seed(0)
    (kept,) = kept_rows(torch.ones(1), v, offs, K, slots_first, [((5,), None, p)])
    dropped = drop(torch.ones(8, 5), kept, p)
    torch.manual_seed(0)
    for number in range(EXPERTS):
        slot, token = torch.where(number == ids.T)
        rows = (token * K + slot) if slots_first else (token * K + slot).sort().values
        expected = F.dropout(torch.ones(len(rows), 5), p)
        torch.testing.assert_close(dropped[inv[rows]], expected)
    assert kept[offs[-1] :].all()


class SlotAfterSlot(Mixture):
    """Goes through all experts for the first choices, and then for the second ones."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).sigmoid().topk(K, -1)
        out = torch.zeros_like(x)
        for slot in range(K):
            for number, expert in enumerate(self.experts):
                mask = ids[:, slot] == number
                if mask.any():
                    out.index_add_(0, torch.where(mask)[0], expert(x[mask]) * weights[:, slot, None][mask])
        return out


def test_an_order_that_the_example_does_not_show_is_the_reason() -> None:
    torch.manual_seed(0)
    block = SlotAfterSlot("").train()
    nn.init.normal_(block.router.weight, std=0.005)  # as many routers start
    nn.init.zeros_(block.router.bias)
    report = hexa_fx.explain(block, torch.randn(14, D))
    assert not report.rewritten
    assert "its random numbers depend on the order experts run in" in report.blocks[0].reason


class RunsOneForItsShape(Mixture):
    """The first expert runs on all tokens besides; the last one never does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K, -1)
        out = torch.zeros_like(self.experts[0](x))
        for number, expert in enumerate(self.experts[:-1]):
            token, slot = torch.where(ids == number)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


def test_an_odd_expert_is_not_the_reason_where_dropout_is() -> None:
    block = RunsOneForItsShape("").train()
    block.router = nn.Linear(D, EXPERTS + 1)
    block.experts.append(nn.Identity())
    assert hexa_fx.explain(block, torch.randn(14, D)).blocks[0].reason.startswith("dropout is active")
