"""What verification runs a block on: fresh inputs that keep what belongs together, and forced routings."""

import pytest
import torch
import torch.fx
from torch import nn
from torch.nn import functional as F

from hexa_fx.passes.inputs.fresh_inputs import FreshInputs
from hexa_fx.passes.inputs.routing_override import ROUTINGS, ChoiceSpy, LogitsOverride, RoutingOverride
from tests.runtime.handmade import (
    D,
    E,
    routing,
)


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
