"""Verification accepts what is equal and finds what is not, however it differs."""

import threading

import pytest
import torch
import torch.fx
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import hexa_fx
from hexa_fx.analysis import analyse_model
from hexa_fx.inspection.inspector import Inspector
from hexa_fx.ir import InputGuard, RewrittenBlock
from hexa_fx.isolation.trial_modes import RaisesOnHost
from hexa_fx.passes.inputs.routing_override import ROUTINGS, rows_for_all
from hexa_fx.passes.verify import VerificationResult, comparison, verify_block
from hexa_fx.passes.verify.cases import VerifySettings
from hexa_fx.runtime.install import is_installed
from tests.runtime.handmade import (
    D,
    E,
    ListMoE,
    NumberedPlaces,
    StackedExperts,
    dense_moe,
    list_rewritten,
    routing,
    stacked_rewritten,
)


def example() -> tuple[torch.Tensor, ...]:
    return (torch.randn(2, 6, D),)


def failing(result: VerificationResult) -> set[str]:
    assert not result.ok
    assert result.reason
    return {case.name for case in result.cases if case.outcome == "different"}


# -- wrong stand-ins for the operator. Module level, so that the graphs' code can name them ---------------------------


def straight_through(x, index, weights, w1, w2):
    y = dense_moe(x, index, weights, w1, w2)
    return y.detach() + x - x.detach()


def weights_without_gradient(x, index, weights, w1, w2):
    return dense_moe(x, index, weights.detach(), w1, w2)


def one_expert_weight_without_gradient(x, index, weights, w1, w2):
    return dense_moe(x, index, weights, w1, torch.cat([w2[:-1], w2[-1:].detach()]))


def slightly_off(x, index, weights, w1, w2):
    return dense_moe(x, index, weights, w1, w2) * (1 + 1e-7)


def nan_for_an_unused_expert(x, index, weights, w1, w2):
    share = F.one_hot(index, E).sum((0, 1)).to(x.dtype)
    return dense_moe(x, index, weights, w1, w2) + 0 * (share / share).sum()


def drops_beyond_a_capacity(x, index, weights, w1, w2):
    place = F.one_hot(index.reshape(-1), E).cumsum(0).gather(1, index.reshape(-1, 1)).reshape(index.shape)
    return dense_moe(x, index, weights * (place <= 11), w1, w2)


def knows_one_routing(x, index, weights, w1, w2):
    return dense_moe(x, index.clamp(max=E - 2), weights, w1, w2)


def draws_random_numbers(x, index, weights, w1, w2):
    return dense_moe(x, index, weights, w1, w2) + 0 * torch.rand(())


def writes_to_its_input(x, index, weights, w1, w2):
    y = dense_moe(x.clone(), index, weights, w1, w2)
    x.mul_(2)
    return y


def twice_far_away(x, index, weights, w1, w2):
    return dense_moe(x, index, weights, w1, w2) * (1 + ((x > 1e8) & (x < 1e12)).any().to(x))


def half_the_width(x, index, weights, w1, w2):
    return dense_moe(x, index, weights, w1, w2)[:, : D // 2]


def breaks(x, index, weights, w1, w2):
    if x.shape[0] == 1:
        raise IndexError("one token")
    return dense_moe(x, index, weights, w1, w2)


WRONG = {
    straight_through: "gradient",
    weights_without_gradient: "gradient of router.proj.weight",
    one_expert_weight_without_gradient: "gradient of experts.3.w2.weight",
    slightly_off: "output 0 is off by 1.0e-07",
    nan_for_an_unused_expert: "NaN or inf in other places",
    drops_beyond_a_capacity: "output 0",
    knows_one_routing: "output 0",
    draws_random_numbers: "random numbers drawn",
    half_the_width: "raises RuntimeError",
    breaks: "the rewritten block raises IndexError: one token",
}


def test_equal_blocks_pass_in_both_modes():
    block = ListMoE()
    for training in (True, False):
        result = verify_block(block.train(training), list_rewritten(training), example())
        assert result.ok, result.reason
        assert result.dtype == torch.float64
        assert {case.outcome for case in result.cases} == {"equal"}
        assert len(result.cases) >= 11
        assert max(max(case.forward_error, case.gradient_error) for case in result.cases) < 1e-13
        assert 0 < result.seconds < 10


@pytest.mark.parametrize("moe", WRONG, ids=lambda moe: moe.__name__)
@pytest.mark.parametrize("make", ["list", "stacked"])
def test_wrong_blocks_are_found(moe, make):
    if make == "list":
        result = verify_block(ListMoE(), list_rewritten(True, moe), example())
        assert WRONG[moe] in result.reason
    else:
        result = verify_block(StackedExperts(), stacked_rewritten(moe), routing(6))
    assert failing(result)


# -- many experts, of which the example reaches a few --------------------------------------------------------------

MANY = 128


def one_without_gradient(x, index, weights, w1, w2):
    return dense_moe(x, index, weights, w1, torch.cat([w2[:77], w2[77:78].detach(), w2[78:]]))


def one_with_twice_the_gradient(x, index, weights, w1, w2):
    one = w1[64:65]
    return dense_moe(x, index, weights, torch.cat([w1[:64], 2 * one - one.detach(), w1[65:]]), w2)


def two_exchanged(x, index, weights, w1, w2):
    order = torch.arange(MANY)
    order[77], order[78] = 78, 77
    return dense_moe(x, index, weights, w1, w2[order])


def no_gradient_through_one(x, index, weights, w1, w2):
    through = torch.where((index == 100).any(-1, keepdim=True), x.detach(), x)
    return dense_moe(through, index, weights, w1, w2)


def the_last_slightly_off(x, index, weights, w1, w2):
    return dense_moe(x, index, weights, w1, torch.cat([w2[:-1], w2[-1:] * (1 + 1e-6)]))


OF_MANY = (
    one_without_gradient,
    one_with_twice_the_gradient,
    two_exchanged,
    no_gradient_through_one,
    the_last_slightly_off,
)
SHOWN_EARLIER = (two_exchanged, the_last_slightly_off)
"""By other tokens, or by all tokens to the last experts."""


@pytest.mark.parametrize("moe", OF_MANY, ids=lambda moe: moe.__name__)
@pytest.mark.parametrize("make", ["stacked", pytest.param("list", marks=pytest.mark.slow)])
def test_one_wrong_expert_of_many_is_found(moe, make):
    """Although the example's tokens reach twelve of them at most."""
    if make == "list":
        result = verify_block(ListMoE(MANY), list_rewritten(True, moe, MANY), example())
    else:
        result = verify_block(StackedExperts(MANY), stacked_rewritten(moe, MANY), routing(6, num_experts=MANY))
    assert failing(result) == {"one expert without tokens"} or (
        moe in SHOWN_EARLIER and result.cases[0].outcome == "equal"
    )


class OnlyFew(StackedExperts):
    """Takes six tokens and no other number of them, but four as well."""

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        x.expand({4: 4}.get(len(x), 6), -1)
        return super().forward(x, index, weights)


def test_a_block_that_takes_no_more_tokens_is_compared_on_those_it_takes():
    result = verify_block(OnlyFew(MANY), stacked_rewritten(num_experts=MANY), routing(6, num_experts=MANY))
    assert result.ok, result.reason
    assert {case.name: case.outcome for case in result.cases}["one expert without tokens"] == "equal"


@pytest.mark.parametrize(("candidates", "k"), [(4, 2), (2, 1), (128, 1), (128, 8), (129, 3), (9, 8), (5, 5)])
def test_tokens_that_reach_all_experts_but_one(candidates, k):
    rows = rows_for_all(candidates, k)
    ids = ROUTINGS[-1].choose(rows, candidates, k)
    expected = range(candidates) if k == candidates else range(1, candidates)
    assert set(ids.flatten().tolist()) == set(expected)


def test_what_was_given_counts_where_the_block_was_probed_on_something_else():
    block, wrong = ListMoE().eval(), list_rewritten(False, moe=twice_far_away)
    assert verify_block(block, wrong, example()).ok
    for times, differs in ((1e9, True), (1.0, False)):
        given = VerifySettings(given=((torch.randn(2, 6, D) * times,), {}))
        result = verify_block(block, wrong, example(), settings=given)
        assert result.ok is not differs
        assert ("the example as it was given" in result.reason) is differs


def test_a_probe_of_other_tokens_is_followed_by_the_example():
    (analysis,) = analyse_model(ListMoE(), (0 * example()[0],), hexa_fx.HexaConfig(), Inspector()).analyses
    assert analysis.rewritten
    assert analysis.check.cases[1].name == "the example as it was given"


def test_a_wrong_buffer_update_is_found_in_each_mode():
    block = ListMoE()
    result = verify_block(block.train(), list_rewritten(True, count_twice=True), example())
    assert "buffer seen" in result.reason
    assert verify_block(block.eval(), list_rewritten(False, count_twice=True), example()).ok


def test_a_changed_input_is_found():
    result = verify_block(StackedExperts(), stacked_rewritten(writes_to_its_input), routing(6))
    assert "input 0" in result.reason


def test_the_block_is_left_as_it_was():
    block = ListMoE()
    before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    given = example()
    state = torch.get_rng_state()
    for settings in (VerifySettings(), VerifySettings(analysis_bytes=0)):
        assert verify_block(block, list_rewritten(), given, settings=settings).ok
        assert torch.equal(state, torch.get_rng_state())
        assert not is_installed(block)
        assert all(parameter.grad is None for parameter in block.parameters())
        assert all(torch.equal(tensor, before[name]) for name, tensor in block.state_dict().items())
        assert not {"forward", "_hexa_w1", "_hexa_w2"} & set(block.__dict__)


def test_gradients_of_a_large_block_are_compared_in_two_cases():
    settings = VerifySettings(many_bytes=100)
    result = verify_block(ListMoE(), list_rewritten(), example(), settings=settings)
    assert [case.name for case in result.cases if case.gradient_error > 0] == [
        "the example",
        "one expert without tokens",
    ]
    assert len(result.cases) >= 11
    assert not verify_block(ListMoE(), list_rewritten(True, knows_one_routing), example(), settings=settings).ok


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_that_cannot_be_copied_is_compared_in_place(dtype: torch.dtype):
    block = ListMoE().to(dtype)
    block.lock = threading.Lock()
    result = verify_block(block, list_rewritten(), (example()[0].to(dtype),))
    assert result.ok, result.reason
    assert result.dtype == dtype
    assert not verify_block(block, list_rewritten(True, weights_without_gradient), (example()[0].to(dtype),)).ok


class Picky(ListMoE):
    """An operation fails with a single token and with none."""

    def forward(self, hidden: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        hidden.reshape(-1, D).narrow(0, 0, 2)
        return super().forward(hidden, scale)


def test_cases_in_which_the_original_fails_are_skipped():
    result = verify_block(Picky(), list_rewritten(), example())
    assert result.ok
    skipped = {case.name: case.detail for case in result.cases if case.outcome == "skipped"}
    assert skipped.keys() == {"batch 1, sequence 1", "batch 0, sequence 4", "batch 0 alone"}
    assert all("the original raises RuntimeError" in detail for detail in skipped.values())


def test_nothing_compared_is_not_accepted():
    result = verify_block(ListMoE(), list_rewritten(), (torch.randn(2, D),))
    assert not result.ok
    assert "nothing could be compared" in result.reason
    assert "3 dimensions" in result.reason


class Dice(ListMoE):
    rolls = 0

    def forward(self, hidden: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        Dice.rolls += 1
        return super().forward(hidden, scale) * Dice.rolls


def test_an_original_that_does_not_repeat_itself_is_named():
    assert "does not repeat itself" in verify_block(Dice(), list_rewritten(), example()).reason


# -- outputs and state beside the main one --------------------------------------------------------------------------


class Chatty(nn.Module):
    """Returns its logits too, keeps the last load, asks for float32 in the middle, draws jitter in training."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = StackedExperts()
        self.load = None
        self.calls = 0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        self.calls += 1
        if self.training:
            x = x * torch.empty_like(x).uniform_(0.9, 1.1)
        logits = self.gate(x)
        weights, index = torch.topk(F.softmax(logits, dim=-1, dtype=torch.float32), 2)
        weights = weights.float().to(x.dtype)
        self.load = weights.sum(0)
        return self.experts(x, index, weights), {"logits": logits}


def chatty_rewritten(flaw: str = "") -> RewrittenBlock:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    like = graph.call_function(torch.empty_like, (x,))
    jitter = graph.call_method("uniform_", (like, 0.9, 1.1))
    jittered = graph.call_function(torch.mul, (x, jitter))
    logits = graph.call_module("gate", (jittered,))
    scores = graph.call_function(F.softmax, (logits,), {"dim": -1, "dtype": torch.float32})
    top = graph.call_function(torch.topk, (scores, 2))
    weights = graph.call_method(
        "to", (graph.call_function(getattr, (top, "values")), graph.call_function(getattr, (x, "dtype")))
    )
    index = graph.call_function(getattr, (top, "indices"))
    stacked = [graph.get_attr(f"experts.{name}") for name in ("gate_up", "down")]
    y = graph.call_function(dense_moe, (jittered, index, weights, *stacked))
    if flaw == "aux gradient":
        logits = graph.call_method("detach", (logits,))
    if flaw == "aux value":
        logits = graph.call_method("mul", (logits, 1.5))
    graph.output({"a": y} if flaw == "structure" else (y, {"logits": logits}))
    return RewrittenBlock("chatty", graph, (), (InputGuard("x", "tensor", dtype=torch.float32, ndim=2),))


class Quiet(Chatty):
    """The part of `Chatty` that a graph can hold."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        result = super().forward(x)
        self.load, self.calls = None, 0
        return result


@pytest.mark.parametrize(
    ("flaw", "sentence"),
    [
        ("aux gradient", "gradient of gate.weight"),
        ("aux value", "output 1"),
        ("structure", "structure of the outputs"),
    ],
)
def test_auxiliary_outputs_are_compared(flaw, sentence):
    assert sentence in verify_block(Quiet(), chatty_rewritten(flaw), (torch.randn(5, D),)).reason


def test_values_kept_on_the_module_are_compared():
    assert "attribute .calls" in verify_block(Chatty(), chatty_rewritten(), (torch.randn(5, D),)).reason


class NotedFailures(TorchDispatchMode):
    """Operators of torch that failed: on a GPU an index out of range stops the device for good."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        try:
            return func(*args, **(kwargs or {}))
        except (IndexError, RuntimeError):
            self.names.append(func.name())
            raise


@pytest.mark.parametrize("guarded", [True, False])
def test_no_operator_gets_an_index_out_of_range(guarded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU it only raises, and the case is skipped."""
    if guarded:
        monkeypatch.setattr(comparison, "no_device_asserts", lambda module: RaisesOnHost())
    model = NumberedPlaces(6)
    with NotedFailures() as failed:
        report = hexa_fx.optimize(model, *example()).report
    assert report.rewritten
    assert ("aten::index.Tensor" in failed.names) is not guarded
