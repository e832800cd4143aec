"""What a trainer sets on modules later, and what buffers say, is asked in every call."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import hexa_fx
from tests.zoo.common import MLP, TopKGate
from tests.zoo.common import Mixture as Loop
from tests.zoo.compare import compare, operators_run
from tests.zoo.variant import D, E, K


class Tuned(Loop):
    """Reads attributes of its own, of its experts and of a router that it calls, and conditions on buffers."""

    def __init__(self) -> None:
        super().__init__(MLP)
        self.temperature, self.top_k, self.doubled, self.unread = 1.5, K, False, 7
        self.called = TopKGate()
        self.drop = nn.Dropout(0.0)
        self.register_buffer("limit", torch.tensor(2.0))

    @property
    def chosen(self) -> int:
        return self.top_k

    def logits(self, flat: torch.Tensor) -> torch.Tensor:
        if self.training:
            flat = flat + 0.1 * torch.randn_like(flat)
        if self.limit > 1:
            flat = flat * 2
        return self.gate.weight(flat) / self.temperature

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        weights, indices = self.logits(flat).softmax(-1).topk(self.chosen)
        if getattr(self, "doubled", False):
            weights = weights * 2
        y = self.mix(self.drop(flat), weights, indices)
        return (y + self.called(flat)[0].sum(-1, keepdim=True)).view_as(x)


def inputs() -> torch.Tensor:
    return torch.randn(2, 7, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Tuned().double().eval()
    return model, hexa_fx.optimize(copy.deepcopy(model), inputs())


CHANGES: dict[str, Any] = {
    "temperature": 0.5,
    "top_k": 3,
    "doubled": True,
    "experts.1.act.approximate": "tanh",
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_value_is_analysed_anew(pair, name):
    path, _, attribute = name.rpartition(".")
    before = getattr(pair[0].get_submodule(path), attribute)
    assert operators_run(pair[1], (inputs(),))
    for model in pair:
        setattr(model.get_submodule(path), attribute, CHANGES[name])
    try:
        one_expert = name.startswith("experts")  # it is no longer like the others
        assert bool(operators_run(pair[1], (inputs(),))) is not one_expert
        for train in (False, True):
            assert compare(*pair, (inputs(),), train=train).within(1e-10)
    finally:
        for model in pair:
            setattr(model.get_submodule(path), attribute, before)
            model.eval()
    assert operators_run(pair[1], (inputs(),))
    assert compare(*pair, (inputs(),), train=True).within(1e-10)


@pytest.mark.parametrize("train", [False, True])
def test_a_condition_on_a_buffer_is_asked_before_random_numbers_are_drawn(train):
    model = Tuned().double().eval()
    optimized = hexa_fx.optimize(copy.deepcopy(model), inputs())
    assert operators_run(optimized.train(train), (inputs(),))
    for m in (model, optimized):
        m.limit.fill_(0.5)
    assert compare(model, optimized, (inputs(),), train=train).within(1e-10)
    assert operators_run(optimized.train(train), (inputs(),))  # another one was made


def test_copies_have_conditions_of_their_own(pair):
    copied = pickle.loads(pickle.dumps(copy.deepcopy(pair[1])))
    copied.temperature = 3.0
    pair[0].temperature = 3.0
    torch.testing.assert_close(copied.eval()(inputs()), pair[0].eval()(inputs()))
    pair[0].temperature = pair[1].temperature
    torch.testing.assert_close(pair[1].eval()(inputs()), pair[0](inputs()))


def test_the_attributes_that_are_asked(pair):
    found = {(read.root, *read.steps) for read in pair[1].forward.specialisations[0].attributes.reads}
    assert {("", "temperature"), ("", "top_k"), ("", "doubled"), ("experts.2.act", "approximate")} <= found
    assert not {("", "unread"), ("called", "top_k"), ("drop", "p")} & found, "what is called asks for itself"


class Choosing(nn.Module):
    """A router that is called as it is; its choice is read from outside, or only what it makes of it."""

    def __init__(self, gives_ids: bool) -> None:
        super().__init__()
        self.weight, self.top_k, self.gives_ids = nn.Linear(D, E), K, gives_ids

    def forward(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = self.weight(flat)
        chosen, indices = logits.topk(self.top_k)
        gates = torch.full_like(logits, -torch.inf).scatter(-1, indices, chosen).softmax(-1)
        return (gates, indices) if self.gives_ids else (gates,)


class Masked(Loop):
    def __init__(self, gives_ids: bool) -> None:
        super().__init__()
        self.gate = Choosing(gives_ids)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        gates, *given = self.gate(flat)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token = ((given[0] == e).any(-1) if given else gates[:, e] > 0).nonzero()[:, 0]
            out.index_add_(0, token, expert(flat[token]) * gates[token, e, None])
        return out.view_as(x)


@pytest.mark.parametrize("gives_ids", [True, False])
def test_how_many_experts_a_router_chooses_may_change(gives_ids):
    model = Masked(gives_ids).double()
    optimized = hexa_fx.optimize(copy.deepcopy(model), inputs())
    assert operators_run(optimized, (inputs(),))
    for top_k in (1, 3):
        model.gate.top_k = optimized.gate.top_k = top_k
        assert compare(model, optimized, (inputs(),)).within(1e-10)
        if gives_ids or top_k > 1:
            assert operators_run(optimized, (inputs(),))


class NumberOfBuffer(Loop):
    """A buffer as a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("order", torch.arange(E))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        weights, indices = self.gate(flat)
        return self.mix(flat, weights * float(self.scale), indices).view_as(x)


class OrderOfBuffer(NumberOfBuffer):
    """A loop in the order that a buffer says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        weights, indices = self.gate(flat)
        out = torch.zeros_like(flat)
        for e in self.order.tolist():
            token, slot = torch.where(indices == e)
            out.index_add_(0, token, self.experts[e](flat[token]) * weights[token, slot, None])
        return out.view_as(x)


def test_an_order_in_a_buffer_is_refused():
    (block,) = hexa_fx.explain(OrderOfBuffer(), torch.randn(2, 7, D)).blocks
    assert "which may change" in block.reason
