"""Blocks of which parts, or which themselves, are under torch.compile already."""

import copy

import pytest
import torch
from torch import nn

import hexa_fx
from hexa_fx.capture.copies import deepcopied
from tests.runtime.test_attribute_guards import Block, D
from tests.zoo.compare import compare, operators_run


def compiled(part):
    return torch.compile(part, backend="aot_eager")


class Activation(Block):
    """All experts share a compiled function."""

    def __init__(self):
        super().__init__()
        for expert in self.experts:
            del expert.act
            expert.act = _compiled_activation


@compiled
def _compiled_activation(x):
    return torch.nn.functional.silu(x)


class Experts(Block):
    """Each expert is wrapped."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(map(compiled, self.experts))


class Router(Block):
    def __init__(self):
        super().__init__()
        self.router = compiled(self.router)


class Forward(Block):
    forward = compiled(Block.forward)


class InPlace(Block):
    """Compiled without a wrapper, as torch recommends."""

    def __init__(self):
        super().__init__()
        self.compile(backend="aot_eager")
        for expert in self.experts:
            expert.compile(backend="aot_eager")


class Layers(nn.Sequential):
    """A wrapped layer, and one that is compiled in place."""

    def __init__(self):
        super().__init__(compiled(Block()), InPlace())


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", [Activation, Experts, Router, Forward, InPlace, Layers])
@pytest.mark.parametrize("optimize", [hexa_fx.optimize_, pytest.param(hexa_fx.optimize, marks=pytest.mark.slow)])
def test_it_is_rewritten(kind, optimize):
    model = kind().double()
    original = copy.deepcopy(model)
    rewritten = optimize(model, torch.randn(20, D, dtype=torch.float64))
    assert len(rewritten.report.rewritten) == len(rewritten.report.blocks) > 0
    for tokens in (20, 7):
        x = torch.randn(tokens, D, dtype=torch.float64)
        assert compare(original, rewritten, (x,), train=True).within(1e-9)
    assert operators_run(rewritten, (x,)) > 0


def test_a_copy_does_not_call_the_original():
    model = Layers()
    rewritten = hexa_fx.optimize(model, torch.randn(20, D))
    with torch.no_grad():
        for block in model[1].modules():
            block.register_forward_hook(lambda *_: pytest.fail("the original ran"))
    rewritten(torch.randn(9, D))


def test_what_is_inside_of_a_wrapper_may_change():
    model = Experts()
    rewritten = hexa_fx.optimize(copy.deepcopy(model), torch.randn(20, D))
    x = torch.randn(9, D)
    before = model(x)
    torch.testing.assert_close(rewritten(x), before)
    for block in (model, rewritten):
        block.experts[1]._orig_mod.act = nn.Tanh()
    torch.testing.assert_close(rewritten(x), model(x))
    assert not torch.allclose(model(x), before)
    (block,) = rewritten.report.blocks
    assert block.calls.kinds == 2 or block.calls.own


def test_a_model_with_a_scripted_function_is_copied():
    model = Block()
    model.function = [torch.jit.script(_scripted)]
    assert deepcopied(model, {}).function[0] is model.function[0]
    assert hexa_fx.optimize(model, torch.randn(20, D)).report.rewritten


def _scripted(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)
