"""Experts that get no token in the example are watched like the others."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import hexa_fx
from hexa_fx.isolation.held_objects import MISSING
from hexa_fx.isolation.lookup import Place, place

D, E, IDLE = 8, 4, 2
CONFIG = hexa_fx.HexaConfig(verify=False, own_code_when_small=False)


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(D, 12), nn.LeakyReLU(0.1), nn.Linear(12, D)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Routed(nn.Module):
    """Calls only experts with tokens, of which the one at ``IDLE`` is none while its bias is low."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, E)
        self.router.bias.data[IDLE] = -100.0

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            token, slot = torch.where(chosen == number)
            out = out.index_add(0, token, self.run(number, x[token]) * weights[token, slot, None])
        return out


class Listed(Routed):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(E))

    def run(self, number, x):
        return self.experts[number](x)


class Attributes(Routed):
    def __init__(self):
        super().__init__()
        for number in range(E):
            setattr(self, f"expert_{number}", Expert())

    def run(self, number, x):
        return getattr(self, f"expert_{number}")(x)


class Named(Routed):
    names = ("code", "maths", "prose", "verse")

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleDict({name: Expert() for name in self.names})

    def run(self, number, x):
        return self.experts[self.names[number]](x)


class ByProjection(Routed):
    """Weights and activations in lists of their own."""

    def __init__(self):
        super().__init__()
        self.ups, self.downs = (nn.ModuleList(nn.Linear(*size) for _ in range(E)) for size in ((D, 12), (12, D)))
        self.acts = nn.ModuleList(nn.LeakyReLU(0.1) for _ in range(E))

    def run(self, number, x):
        return self.downs[number](self.acts[number](self.ups[number](x)))


def activation_of(block, number):
    return [module for module in block.modules() if isinstance(module, nn.LeakyReLU)][number]


def another_slope(block):
    activation_of(block, IDLE).negative_slope = 0.9


def a_forward_of_its_own(block):
    activation_of(block, IDLE).forward = lambda x: 3 * x


@pytest.fixture(scope="module", params=[Listed, Attributes, Named, ByProjection], ids=lambda kind: kind.__name__)
def pair(request):
    torch.manual_seed(0)
    model = request.param()
    x = torch.randn(20, D)
    rewritten = hexa_fx.optimize(model, x, CONFIG)
    assert rewritten.report.rewritten, str(rewritten.report)
    return model, rewritten


@pytest.mark.parametrize("edit", [another_slope, a_forward_of_its_own], ids=lambda edit: edit.__name__)
def test_an_edit_of_an_idle_expert_is_noticed(pair, caplog, edit):
    model, rewritten = map(copy.deepcopy, pair)
    x = torch.randn(30, D)
    for block in (model, rewritten):
        block.router.bias.data.zero_()
    expected = model(x)
    torch.testing.assert_close(rewritten(x), expected)
    assert not caplog.records
    edit(model)
    edit(rewritten)
    assert not torch.allclose(model(x), expected)
    torch.testing.assert_close(rewritten(x), model(x))
    assert "runs its original forward" in caplog.text


def test_a_block_whose_idle_expert_is_another_is_analysed_by_itself():
    torch.manual_seed(0)
    model, x = nn.Sequential(Listed(), Listed()), torch.randn(20, D)
    another_slope(model[1])
    opt = hexa_fx.optimize(model, x, hexa_fx.HexaConfig(own_code_when_small=False))
    assert [block.status for block in opt.report.blocks] == ["rewritten", "refused"], str(opt.report)


class WithDropout(Listed):
    def run(self, number, x):
        return nn.functional.dropout(self.experts[number](x), 0.1, self.experts[number].training)


def test_the_mode_of_an_idle_expert_is_no_reason_to_refuse():
    torch.manual_seed(0)
    report = hexa_fx.explain(WithDropout().eval(), torch.randn(20, D))
    assert report.blocks[0].state == "rewritten", str(report)


def test_what_one_expert_keeps_in_a_closure_and_another_does_not():
    """A wrapper of one expert's activation is read by place in its closure; of the others, None lies there."""
    assert place(None, 0) == Place(MISSING)
    assert place(Expert.forward, "__closure__").value is None
