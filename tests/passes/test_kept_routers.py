"""What a trainer sets later, and what buffers say, is asked in every call; routers that stay calls may count, anneal and draw."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import hexa_fx
from tests.zoo.common import MLP, TopKGate, experts
from tests.zoo.common import Mixture as Loop
from tests.zoo.compare import compare, operators_run
from tests.zoo.variant import D, E, K


class Scheduled(nn.Module):
    """A router that reads what schedules change: numbers, flags, and a counter and a scale of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, D))
        self.top_k, self.step, self.temperature, self.noise, self.scaled, self.full = K, 0, 2.0, 0.5, False, True
        self.seen, self.decayed, self.capacity = 0, 1.0, None
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = F.linear(flat, self.weight) / max(0.5, self.temperature * 0.9**self.step)
        if self.scaled:
            logits = logits * 3
        if self.training:
            self.seen += 1
            self.decayed *= 0.9
            self.calls += 1
            logits = logits + torch.randn_like(logits) * self.noise * self.decayed / (self.seen + self.calls)
        weights, indices = logits.softmax(-1).topk(self.top_k)
        return weights if self.full else weights.float(), indices


class Quiet(Scheduled):
    """Neither draws nor counts."""

    def forward(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = 1.0 if self.step % 2 else self.temperature
        weights, indices = (F.linear(flat, self.weight) * scale).softmax(-1).topk(self.top_k)
        return weights if self.full else weights.float(), indices


class Block(nn.Module):
    """All experts on all tokens, so that weights of another dtype give an output of another one."""

    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        self.gate, self.experts = gate, experts()

    def mix(self, flat: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        every = torch.stack([expert(flat) for expert in self.experts], 1)
        return (every.gather(1, indices[..., None].expand(-1, -1, D)) * weights[..., None]).sum(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        return self.mix(flat, *self.gate(flat)).view_as(x)


def inputs(seed: int = 1) -> torch.Tensor:
    return torch.randn(2, 7, D, generator=torch.Generator().manual_seed(seed))


def both(gate: type[nn.Module] = Scheduled) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Block(gate())
    return model, hexa_fx.optimize(copy.deepcopy(model), inputs())


def is_rewritten(model: nn.Module, dtype: torch.dtype = torch.float32) -> bool:
    return operators_run(copy.deepcopy(model), (inputs().to(dtype),)) > 0


@pytest.mark.parametrize("gate", [Scheduled, Quiet])
def test_results_of_another_form_run_rewritten_without_another_call_of_the_router(gate):
    """The router has been called by then: what is made of the call is given what it gave."""
    model, optimized = (m.double() for m in both(gate))
    optimized = hexa_fx.optimize(hexa_fx.undo_(optimized), inputs().double())
    hooked: list[Any] = []
    optimized.gate.register_forward_hook(lambda *call: hooked.append(call))
    (block,) = optimized.report.blocks
    for number, setting in enumerate(({"top_k": 1}, {"top_k": 3}, {"top_k": K, "full": False}), 1):
        for m in (model, optimized):
            vars(m.gate).update(setting)
        for train in (True, False):
            before = len(hooked)
            assert compare(model, optimized, (inputs().double(),), train=train).within(1e-6)
            assert len(hooked) == before + 1
            assert (sum(block.calls.own.values()), block.calls.kinds) == (0, number + 1)
            assert operators_run(copy.deepcopy(optimized).train(train), (inputs().double(),))
            assert block.calls.rewritten == 2 * number - train
    assert model.gate.seen == optimized.gate.seen
    assert "_compiled_call_impl" not in vars(optimized.gate)
    model.gate.full = optimized.gate.full = True
    assert is_rewritten(optimized, torch.float64)
    assert compare(model, optimized, (inputs().double(),)).within(1e-10)


def test_schedules_under_checkpointing():
    model, optimized = both()
    for step in (0, 1, 2):
        found = []
        for m in (model.train(), optimized.train()):
            m.gate.step, m.gate.top_k = step, 1 if step == 2 else K
            found.append(results(lambda x, m=m: checkpoint(m, x, use_reentrant=False), m, step))
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("gate", [Scheduled, Quiet])
def test_schedules_under_a_compiler(gate):
    """Where the router draws and counts, another number of it means the original there: no part of a trace can be taken back."""
    model, optimized = both(gate)
    traced: list[bool] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        traced.append("moe_ffn" in graph.code)
        return graph.forward

    compiled = torch.compile(optimized.train(), backend=backend, fullgraph=True)
    model.train()
    for step, top_k in ((0, K), (1, K), (2, 1)):
        for m in (model, optimized):
            m.gate.step, m.gate.top_k = step, top_k
        for ours, theirs in zip(results(model, model, step), results(compiled, optimized, step), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        assert traced[-1] == (top_k == K and (step == 0 or gate is Quiet))
    torch.compiler.reset()


def results(call: Callable[[torch.Tensor], torch.Tensor], model: nn.Module, seed: int) -> list[torch.Tensor | None]:
    model.zero_grad()
    torch.manual_seed(seed)
    out = call(inputs(seed))
    out.square().sum().backward()
    return [out, *(p.grad for p in model.parameters())]


class Listing(Quiet):
    """Gives places in lists that are cut at a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 3.0

    def forward(self, flat: torch.Tensor) -> Any:
        weights, indices = super().forward(flat)
        places = [torch.where((indices == e).any(-1))[0][: int(self.most)] for e in range(E)]
        return weights, indices, places


class OfLists(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        weights, indices, places = self.gate(flat)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            scale = (weights * (indices == e))[places[e]].sum(-1, keepdim=True)
            out.index_add_(0, places[e], expert(flat[places[e]]) * scale)
        return out.view_as(x)


class Plain(Quiet):
    """Gives a number beside tensors, or counts with it."""

    def forward(self, flat: torch.Tensor) -> Any:
        self.seen += 1
        return *super().forward(flat), self.noise, (None if self.scaled else self.seen)


class Optional(Quiet):
    """Gives a loss, or None."""

    def forward(self, flat: torch.Tensor) -> Any:
        return *super().forward(flat), (F.linear(flat, self.weight).logsumexp(-1).mean() if self.scaled else None)


class WithMore(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        weights, indices, *more = self.gate(flat)
        out = self.mix(flat, weights, indices).view_as(x)
        return sum((out * number for number in more if number is not None), out)


class Dense(Quiet):
    """Gates for all experts, which may come to be of more experts than the ids that it gives too, and nobody reads."""

    def forward(self, flat: torch.Tensor) -> Any:
        weights, indices = super().forward(flat)
        probabilities = F.linear(flat, self.weight).softmax(-1)
        gates = torch.zeros_like(probabilities).scatter(1, indices, weights)
        return probabilities if self.scaled else gates, indices


class OfGates(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        gates, _ = self.gate(flat)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token = (gates[:, e] > 0).nonzero()[:, 0]
            out.index_add_(0, token, expert(flat[token]) * gates[token, e, None])
        return out.view_as(x)


@pytest.mark.parametrize(
    ("block", "gate", "name", "value"),
    [
        (OfLists, Listing, "most", 5.0),
        (OfGates, Dense, "scaled", True),
        (WithMore, Plain, "noise", 1.5),
        (WithMore, Plain, "scaled", True),
        (WithMore, Optional, "scaled", True),
    ],
)
def test_what_the_form_of_a_result_does_not_tell_is_a_condition(block, gate, name, value):
    model = block(gate())
    optimized = hexa_fx.optimize(copy.deepcopy(model), inputs())
    called = copy.deepcopy(optimized)
    called(inputs())
    assert called.report.blocks[0].calls == (1, 0, {}, 1)
    before = model(inputs())
    vars(model.gate).update(seen=0)
    setattr(model.gate, name, value)
    setattr(optimized.gate, name, value)
    assert not torch.allclose(model(inputs()), before)
    vars(model.gate).update(seen=0)
    assert compare(model, optimized, (inputs(),)).within(1e-5)
    calls = optimized.report.blocks[0].calls
    assert calls.kinds == 2 or calls.own


class Masks(nn.Module):
    """Gives weights by expert and no ids: what chooses inside is needed, and in train mode, where it draws, cannot run twice."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(D, E), kind

    def forward(self, flat: torch.Tensor) -> Any:
        logits, count = self.linear(flat), len(flat)
        if self.training:
            logits = logits + torch.rand_like(logits)
        weights, ids = logits.topk(K)
        gates = torch.zeros_like(logits).scatter(1, ids, weights.softmax(-1))
        if self.kind == "a size":
            share = 0 / count if count > 0 else 0.5
        else:
            share = logits.mean() * (2.0 if 3.0 < flat[:, 0].max() < 3.1 else 1.0)
        return gates, share


class Masked(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.gate, self.experts = Masks(kind), experts()

    def forward(self, x: torch.Tensor) -> Any:
        flat = x.reshape(-1, D)
        (gates, share), out = self.gate(flat), torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token = gates[:, number].nonzero()[:, 0]
            out[token] += expert(flat[token]) * gates[token, number, None]
        return out.view_as(x), share


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("kind", ["a size", "data"])
def test_a_router_that_is_taken_apart_decides_nothing_anew(kind: str, train: bool) -> None:
    """What it decides is a condition, or a reason; it went as in the recorded run, which was noticed where verification met it."""
    model, rare = Masked(kind).train(train), inputs(3)
    rare[0, 0, 0] = 3.05
    optimized = hexa_fx.optimize(copy.deepcopy(model), inputs())
    assert bool(optimized.report.rewritten) == (kind == "a size" or not train)
    assert optimized.report.rewritten or "host decision (if, while, item()) on the data" in str(optimized.report)
    for x in (inputs(), rare, inputs(4), *([torch.zeros(0, 3, D)] if kind == "a size" else [])):
        assert compare(model, optimized, (x,), train=train).within(1e-4)


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


def doubles() -> torch.Tensor:
    return torch.randn(2, 7, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Tuned().double().eval()
    return model, hexa_fx.optimize(copy.deepcopy(model), doubles())


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
    assert operators_run(pair[1], (doubles(),))
    for model in pair:
        setattr(model.get_submodule(path), attribute, CHANGES[name])
    try:
        one_expert = name.startswith("experts")  # it is no longer like the others
        assert bool(operators_run(pair[1], (doubles(),))) is not one_expert
        for train in (False, True):
            assert compare(*pair, (doubles(),), train=train).within(1e-10)
    finally:
        for model in pair:
            setattr(model.get_submodule(path), attribute, before)
            model.eval()
    assert operators_run(pair[1], (doubles(),))
    assert compare(*pair, (doubles(),), train=True).within(1e-10)


@pytest.mark.parametrize("train", [False, True])
def test_a_condition_on_a_buffer_is_asked_before_random_numbers_are_drawn(train):
    model = Tuned().double().eval()
    optimized = hexa_fx.optimize(copy.deepcopy(model), doubles())
    assert operators_run(optimized.train(train), (doubles(),))
    for m in (model, optimized):
        m.limit.fill_(0.5)
    assert compare(model, optimized, (doubles(),), train=train).within(1e-10)
    assert operators_run(optimized.train(train), (doubles(),))  # another one was made


def test_copies_have_conditions_of_their_own(pair):
    copied = pickle.loads(pickle.dumps(copy.deepcopy(pair[1])))
    copied.temperature = 3.0
    pair[0].temperature = 3.0
    torch.testing.assert_close(copied.eval()(doubles()), pair[0].eval()(doubles()))
    pair[0].temperature = pair[1].temperature
    torch.testing.assert_close(pair[1].eval()(doubles()), pair[0](doubles()))


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


class MaskedByIds(Loop):
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
    model = MaskedByIds(gives_ids).double()
    optimized = hexa_fx.optimize(copy.deepcopy(model), doubles())
    assert operators_run(optimized, (doubles(),))
    for top_k in (1, 3):
        model.gate.top_k = optimized.gate.top_k = top_k
        assert compare(model, optimized, (doubles(),)).within(1e-10)
        if gives_ids or top_k > 1:
            assert operators_run(optimized, (doubles(),))


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


class Told(nn.Module):
    """Goes by what the block around it sets, and adds to a loss, which is a tensor in train mode alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, D))
        self.temperature, self.scale, self.loss = 1.0, None, None

    def forward(self, flat: torch.Tensor) -> Any:
        logits = F.linear(flat, self.weight) / self.temperature
        logits = logits if self.scale is None else logits * self.scale
        loss = logits.logsumexp(-1).square().mean() if self.training else 0
        self.loss = loss if self.loss is None else self.loss + loss
        return logits.softmax(-1).topk(K)


class Telling(Block):
    """Sets something for its router before it calls it; what it sets after it, no call of the router waits for."""

    def __init__(self, what: str) -> None:
        super().__init__(Told())
        self.what = what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, self.gate.loss = self.gate, None
        if "number" in self.what:
            gate.temperature = 0.5 if self.training else 2.0
        if "tensor" in self.what:
            gate.scale = x.abs().mean()
        out = super().forward(x)
        if "for the call" in self.what:
            gate.temperature, gate.scale = 1.0, None
        return out


@pytest.mark.parametrize("what", ["a loss", "a number", "a tensor", "a number for the call", "a tensor for the call"])
def test_what_is_set_for_a_router_before_its_call(what: str) -> None:
    """A rewritten block sets attributes at its end: the router went by those of the call before, and its own loss was lost."""
    model = Telling(what)
    optimized = hexa_fx.optimize(copy.deepcopy(model), inputs())
    for seed, train in enumerate((False, True, True, False)):
        assert compare(model, optimized, (inputs(seed),), train=train).within(1e-4)
        ours, theirs = (torch.as_tensor(m.gate.loss) for m in (optimized, model))
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        assert ours.requires_grad == theirs.requires_grad == train
        assert operators_run(optimized, (inputs(),))
