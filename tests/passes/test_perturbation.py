"""What verification runs a block on: fresh inputs that keep what belongs together, forced routings, and what is inactive."""

from dataclasses import replace

import pytest
import torch
import torch.fx
from torch import nn
from torch.nn import functional as F

import hexa_fx
from hexa_fx.capture import capture
from hexa_fx.ir import InputGuard, RewrittenBlock
from hexa_fx.isolation.outcome import Difference, Outcome, difference
from hexa_fx.passes.inputs.fresh_inputs import FreshInputs
from hexa_fx.passes.inputs.routing_override import ROUTINGS, ChoiceSpy, LogitsOverride, RoutingOverride
from hexa_fx.passes.verify import verify_block
from hexa_fx.passes.verify.cases import ByRows, VerifySettings, factors_past_limits
from hexa_fx.passes.verify.perturbed_runs import perturbations
from tests.runtime.handmade import D, E, ListMoE, around, list_rewritten, plain, routing


class Masked(ListMoE):
    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * mask[..., None]


def bounded(self: ListMoE, hidden: torch.Tensor) -> torch.Tensor:
    """Rows with tiny norms are left as they are, so that division is safe."""
    norm = hidden.norm(dim=-1, keepdim=True)
    return plain(self, hidden) * norm / norm.clamp(min=1e-4)


BOUNDED, CLAMPED_FAR_OUT = around(bounded), around(lambda self, hidden: plain(self, hidden.clamp(-65504, 65504)))
FORGOTTEN: dict[str, tuple[type[nn.Module], str]] = {
    "clamped": (around(lambda self, hidden: plain(self, hidden.clamp(-50, 50))), "tokens of other magnitudes"),
    "clamped far out": (CLAMPED_FAR_OUT, "tokens of other magnitudes"),
    "bounded": (BOUNDED, "tokens of other magnitudes"),
    "no batch of one": (around(lambda self, hidden: plain(self, hidden).squeeze(0)), "batch 1, sequence 7"),
    "no sequence of one": (around(lambda self, hidden: plain(self, hidden).squeeze(1)), "batch 6, sequence 1"),
}


@pytest.mark.parametrize(("block", "said"), FORGOTTEN.values(), ids=FORGOTTEN)
def test_forgotten_features_are_named(block: type[nn.Module], said: str) -> None:
    """The rewritten block is that of the plain class."""
    made = list_rewritten(False)
    assert said in _verified(block(), replace(made, guards=made.guards[:1]), (torch.randn(2, 6, D),))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32])
def test_a_forgotten_mask_of_ones_is_named(dtype: torch.dtype) -> None:
    made = list_rewritten(False)
    guards = (made.guards[0], InputGuard("mask", "tensor", dtype=dtype, ndim=2))
    example = (torch.randn(2, 6, D), torch.ones(2, 6, dtype=dtype))
    assert "'mask' drawn at random" in _verified(Masked(), replace(made, guards=guards), example)


class Strict(ListMoE):
    """Fails for what is not allowed, as an embedding does."""

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        torch.zeros(1, device=hidden.device)[ids]
        return super().forward(hidden)


def test_where_the_original_raises_both_must() -> None:
    made = list_rewritten(False)
    guards = (made.guards[0], InputGuard("ids", "tensor", dtype=torch.int64, ndim=2))
    example = (torch.randn(2, 6, D), torch.zeros(2, 6, dtype=torch.long))
    assert "only the original raises IndexError" in _verified(Strict(), replace(made, guards=guards), example)


def test_rows_are_compared_by_their_own_scale() -> None:
    one = torch.tensor([[1e6, 1e6], [1e-6, 1e-6]], dtype=torch.float64)
    two = one.clone()
    two[1, 0] *= 2
    assert _apart(one, two).forward == pytest.approx(1.0)
    gone = torch.tensor([[1e6, torch.nan], [1e-6, 1e-6]], dtype=torch.float64)
    assert "NaN" in _apart(one, gone).reason
    assert _apart(gone, one, finite=False) == Difference(worst_value="")
    assert "NaN" in _apart(gone, one).reason


def _apart(one: torch.Tensor, two: torch.Tensor, finite: bool = True) -> Difference:
    return difference(*ByRows(finite).compared(*(Outcome({"y": value}, {}, {}) for value in (one, two))))


def test_masks_of_floats() -> None:
    """0 and -inf, as they are added to scores, and ones, which are zeros elsewhere."""
    mask = torch.zeros(2, 6)
    mask[0, 0] = float("-inf")
    for given, tried in ((mask, True), (torch.ones(2, 6), True), (torch.full((2, 6), 0.5), False)):
        inputs = FreshInputs((torch.randn(2, 6, D), given), {}, E)
        names = [p.name for p in perturbations(inputs, Masked(), ())]
        assert any("'mask'" in name for name in names) is tried


def _verified(block: nn.Module, rewritten: RewrittenBlock, example: tuple[torch.Tensor, ...]) -> str:
    captured = capture(block.eval(), example, {}, "")
    settings = VerifySettings(factors=factors_past_limits(captured.graph))
    result = verify_block(block, rewritten, example, settings=settings)
    assert not result.ok
    return result.reason


def test_fresh_inputs_keep_tokens_and_routing_consistent():
    x, index, weights = routing(6)
    inputs = FreshInputs((x.reshape(2, 3, D), index), {"weights": weights, "mask": F.one_hot(index, E).sum(1)}, E)
    assert inputs.given_routing
    args, kwargs = inputs.at(3, 7, torch.float64)
    assert args[0].shape == (3, 7, D)
    assert args[0].dtype == torch.float64
    assert args[1].shape == (21, 2)
    assert kwargs["weights"].shape == (21, 2)
    assert torch.equal(F.one_hot(args[1], E).sum(1), kwargs["mask"])
    args, kwargs = inputs.like_example(torch.float64, ROUTINGS[3])
    assert args[1].min() == 1
    assert kwargs["mask"][:, 0].sum() == 0
    assert inputs.at(0, 4, torch.float32)[0][1].shape == (0, 2)


def test_sparse_weights_keep_their_pattern():
    scores = torch.rand(6, E) * F.one_hot(torch.arange(6) % E, E)
    inputs = FreshInputs((torch.randn(6, D), scores), {}, E)
    fresh = inputs.at(3, 4, torch.float32)[0][1]
    assert fresh.shape == (12, E)
    assert (fresh.ne(0).sum(-1) == 1).all()
    assert torch.equal(inputs.like_example(torch.float32, ROUTINGS[1])[0][1].argmax(-1), torch.full((6,), E - 1))


@pytest.mark.parametrize("routed", ROUTINGS, ids=lambda routed: routed.name)
@pytest.mark.parametrize(("rows", "candidates", "k"), [(5, 4, 2), (3, 4, 4), (1, 1, 1), (0, 4, 2)])
def test_routings_are_distinct_ids_in_range(routed, rows, candidates, k):
    ids = routed.choose(rows, candidates, k)
    assert ids.shape == (rows, k)
    assert ((ids >= 0) & (ids < candidates)).all()
    assert all(len(set(row)) == k for row in ids.tolist())


def test_the_override_forces_every_way_to_choose_an_expert():
    scores = torch.randn(2, 3, E, requires_grad=True)
    override = RoutingOverride(ROUTINGS[1], E)
    with override:
        values, index = torch.topk(scores, 2, dim=-1)
        assert torch.equal(index, torch.tensor([3, 2]).expand(2, 3, 2))
        assert torch.equal(values, scores.gather(-1, index))
        assert torch.equal(scores.topk(k=2).indices, index)
        assert (scores.argmax(-1) == 3).all()
        assert (scores.max(dim=-1).indices == 3).all()
        assert (scores.transpose(1, 2).max(1, keepdim=True)[1] == 3).all()
        assert scores.sort(-1, descending=True).indices[0, 0].tolist() == [3, 0, 1, 2]
        assert scores.argsort(-1)[0, 0].tolist() == [2, 1, 0, 3]
        values.sum().backward()
        assert override.forced == 7
        assert torch.equal(scores.max(), scores.detach().max())
        assert torch.equal(torch.arange(4).flip(0).sort().values, torch.arange(4))
    assert scores.grad[..., 2:].eq(1).all()
    assert scores.grad[..., :2].eq(0).all()


def test_raised_logits_give_routings_that_can_occur():
    router = nn.Linear(D, E)
    x = torch.randn(6, D, requires_grad=True)
    for routed in ROUTINGS:
        with LogitsOverride(routed, E, 2) as override:
            logits = router(x)
            kth = logits.topk(2, dim=-1).values[..., -1:]
            second = logits.scatter(1, logits.argmax(-1, keepdim=True), float("-inf")).argmax(-1)
        assert override.forced == 1
        wanted = routed.choose(6, E, 2).sort(-1).values
        assert torch.equal(logits.topk(2).indices.sort(-1).values, wanted)
        assert torch.equal((logits >= kth).nonzero()[:, 1].reshape(6, 2), wanted)
        assert (second[:, None] == wanted).any(-1).all()
    assert torch.autograd.grad(logits.sum(), x)[0].ne(0).any()
    with LogitsOverride(ROUTINGS[0], E, 2) as override:
        F.linear(x, torch.randn(E, D))
        F.linear(x, nn.Parameter(torch.randn(E + 1, D)))
        torch.randn(3, E) @ torch.randn(E, E)
        assert override.forced == 0
        assert (x @ router.weight.t()).argmax(-1).lt(2).all()
    with LogitsOverride(ROUTINGS[0], E, 2, experts=(router.weight,)) as override:
        router(x)
        assert override.forced == 0, "as wide as there are experts, but an expert's"


def test_the_spy_counts_choices():
    scores = torch.randn(3, E)
    with ChoiceSpy(E) as spy:
        assert spy.top_k == 1
        scores.argmax(-1), torch.argmax(scores, dim=-1)
        assert spy.top_k == 2
        torch.topk(scores, 3, dim=-1)
        torch.randn(3, E + 1).topk(5)
    assert spy.top_k == 3


def test_tokens_as_wide_as_there_are_experts_are_no_scores():
    assert not FreshInputs((torch.randn(6, E),), {}, E).given_routing
    tokens, scores = torch.randn(6, E), torch.randn(6, E)
    inputs = FreshInputs((tokens, scores), {}, E)
    assert inputs.given_routing
    (x, scores), _ = inputs.like_example(torch.float64, ROUTINGS[1])
    assert set(scores.argmax(-1).tolist()) <= {E - 1, E - 2}
    assert x.argmax(-1).unique().numel() > 1


COUNTS = torch.tensor([5, 0, 7, 4])


@pytest.mark.parametrize("given", [COUNTS, COUNTS.cumsum(0), nn.functional.pad(COUNTS.cumsum(0), (1, 0)).int()])
def test_counts_fit_the_rows(given: torch.Tensor) -> None:
    inputs = FreshInputs((torch.randn(16, 6), given), {}, E)
    for forced in (None, *ROUTINGS):
        for rows in (16, 3):
            (x, made), _ = inputs.at(1, rows, torch.float64, forced)
            counts = made if given is COUNTS else made[-E:].diff(prepend=made.new_zeros(1))
            assert made.dtype == given.dtype
            assert int(counts.sum()) == len(x) == rows
            assert int(counts.min()) >= 0
    (x, made), _ = inputs.with_fresh_tokens((2, 5), None)
    assert int(made.sum() if given is COUNTS else made[-1]) == len(x) == 10


class Experts(nn.Module):
    """Casts for `torch._grouped_mm`, around weights of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(E, 16, 24) / 4), nn.Parameter(torch.randn(E, 24, 16) / 4)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ends = counts.cumsum(0, dtype=torch.int32)
        inside = torch._grouped_mm(rows.bfloat16(), self.up.bfloat16(), offs=ends).relu()
        return torch._grouped_mm(inside, self.down.bfloat16(), offs=ends).type_as(rows)


class BySorting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(16, E, bias=False), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(2, -1)
        order = ids.view(-1).argsort(stable=True)
        rows = self.experts(x[order // 2], torch.bincount(ids.view(-1), minlength=E))
        return torch.zeros_like(x).index_add(0, order // 2, rows * weights.view(-1)[order][:, None])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_of_their_own_get_counts_of_their_rows(dtype: torch.dtype) -> None:
    block, x = BySorting().to(dtype), torch.randn(24, 16).to(dtype)
    optimized = hexa_fx.optimize(block, x)
    assert optimized.report.rewritten, optimized.report
    torch.testing.assert_close(optimized(x), block(x), rtol=2e-2, atol=2e-2)


def test_inputs_lie_in_memory_and_want_gradients_as_the_example_does() -> None:
    """Code that views a transposed input, as CLIP's blocks do, runs on no other."""
    example = torch.randn(6, 5, 8).transpose(0, 1).requires_grad_()
    inputs = FreshInputs((example,), {}, None)
    found = inputs.example(torch.float64), inputs.at(3, 4, torch.float64), inputs.with_fresh_tokens((3, 4), None)
    for made in found:
        assert made is not None
        ((x,), _) = made
        assert x.transpose(0, 1).is_contiguous()
        assert x.requires_grad
