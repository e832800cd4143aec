"""Lists of modules that torch builds anew, and dicts of hooks that code exchanges: what comes into the new ones counts."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn

import hexa_fx
from tests.runtime.test_attribute_guards import Block, D


class InSequence(Block):
    """Its experts, and what they consist of, are in `nn.Sequential`."""

    def __init__(self):
        super().__init__()
        self.experts = nn.Sequential(*(nn.Sequential(nn.Linear(D, 12), nn.ReLU(), nn.Linear(12, D)) for _ in range(4)))


def pair(kind):
    torch.manual_seed(0)
    model = kind()
    return model, hexa_fx.optimize(copy.deepcopy(model), torch.randn(20, D))


def assert_same(pair, caplog, own_code=False):
    """Equal results, twice; ``own_code``: whether the second runs its own code for them."""
    for _ in range(2):
        caplog.clear()
        pair[1].forward.own.clear()
        x = torch.randn(9, D)
        torch.testing.assert_close(pair[1](x), pair[0](x))
        assert ("runs its original forward" in caplog.text) == own_code


def take_out(experts, expert):
    """An expert comes and goes again: `pop` makes a new dict of the others."""
    experts.append(expert)
    experts.pop(-1)


@pytest.mark.parametrize("kind", [Block, InSequence])
def test_experts_are_exchanged_after_one_was_taken_out(kind, caplog):
    both = pair(kind)
    for block in both:
        take_out(block.experts, copy.deepcopy(block.experts[0]))
    assert_same(both, caplog)
    for block in both:
        block.experts.insert(0, block.experts.pop(-1))
    assert_same(both, caplog)
    for block in both:
        block.experts.append(block.experts.pop(0))
    assert_same(both, caplog)


def test_a_part_of_an_expert_is_exchanged_after_one_was_taken_out(caplog):
    both = pair(InSequence)
    for block in both:
        take_out(block.experts[1], nn.Tanh())
    assert_same(both, caplog)
    for block in both:
        block.experts[1][1] = nn.Tanh()
    assert_same(both, caplog, own_code=True)


def test_an_expert_that_torch_script_compiled(caplog):
    both = pair(InSequence)
    for block in both:
        block.experts[1] = torch.jit.script(block.experts[1])
    assert_same(both, caplog, own_code=True)


@pytest.mark.parametrize("place", ["experts.1", "experts.1.0"])
def test_hooks_in_new_dicts(place, caplog):
    both = pair(InSequence)
    assert_same(both, caplog)
    for block in both:
        for module in block.modules():
            module._forward_hooks, module._forward_pre_hooks = OrderedDict(), OrderedDict()
        block.experts[1][2].register_forward_pre_hook(lambda _, args: (2 * args[0],))
    assert_same(both, caplog, own_code=True)
    for block in both:
        for module in block.modules():
            module._forward_hooks, module._forward_pre_hooks = OrderedDict(), OrderedDict()
    assert_same(both, caplog)
    for block in both:
        block.get_submodule(place).register_forward_hook(lambda _, args, out: 3 * out)
    assert_same(both, caplog, own_code=True)
