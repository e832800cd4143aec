"""A block that is edited after it was rewritten gives what its own code gives, and it says so once, as does what is around it."""

import copy
import functools
import logging
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import hexa_fx
from hexa_fx.errors import InputError
from tests.zoo.common import looped
from tests.zoo.compare import operators_run

D, E = 8, 4


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down, self.scale = nn.Linear(D, 12), nn.ReLU(), nn.Linear(12, D), 1.0

    def forward(self, x):
        return self.down(self.act(self.up(x))) * self.scale


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts, self.top_k = nn.Linear(D, E), nn.ModuleList(Expert() for _ in range(E)), 2
        self.calls = 0

    def route(self, x):
        return self.router(x).softmax(-1).topk(self.top_k)

    def forward(self, x):
        weights, chosen = self.route(x)
        return looped(x, weights, chosen, self.experts)


@pytest.fixture
def pair():
    torch.manual_seed(0)
    model = nn.Sequential(Block())
    rewritten = copy.deepcopy(model)
    hexa_fx.optimize_(rewritten, torch.randn(20, D), hexa_fx.HexaConfig(verify=False))
    assert rewritten.report.rewritten
    return model, rewritten


def fewer(block):
    block.top_k = 1


def an_expert_more(block):
    block.experts.append(copy.deepcopy(block.experts[1]))
    router = nn.Linear(D, E + 1)
    router.weight.data[:E], router.weight.data[E] = block.router.weight.data, 3.0
    router.bias.data.zero_()
    block.router = router


def an_expert_less(block):
    del block.experts[E - 1]
    block.router = nn.Linear(D, E - 1)
    block.router.weight.data.fill_(0.1)
    block.router.bias.data[:] = torch.tensor([0.1, 0.3, 0.2])


def another_activation(block):
    for expert in block.experts:
        expert.act = nn.Tanh()


def another_scale(block):
    block.experts[2].scale = 3.0


def a_scale_that_is_a_tensor(block):
    block.experts[2].scale = torch.arange(D).float()


class Doubled(Block):
    def forward(self, x):
        return 2 * super().forward(x)


class Shifted(nn.Linear):
    """As quantisers have them that give modules their own classes where they are."""

    def forward(self, x):
        return super().forward(x) + 1


def another_class(block):
    block.__class__ = Doubled


def another_class_of_layers(block):
    for expert in block.experts:
        expert.up.__class__ = Shifted


def a_forward_of_its_own(block):
    block.experts[0].forward = lambda x: 2 * x


def a_hook(block):
    block.experts[3].register_forward_hook(lambda module, args, out: 2 * out)


EDITS = (
    fewer,
    an_expert_more,
    an_expert_less,
    another_activation,
    another_scale,
    a_scale_that_is_a_tensor,
    another_class,
    another_class_of_layers,
    a_forward_of_its_own,
    a_hook,
)


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("used", [True, False], ids=["used before", "not used before"])
def test_an_edit_is_noticed(pair, caplog, edit, used):
    model, rewritten = pair
    x = torch.randn(30, D)
    if used:
        before = rewritten(x)
        torch.testing.assert_close(before, model(x))
        assert not caplog.records
    for candidate in pair:
        edit(candidate[0])
    torch.testing.assert_close(rewritten(x), model(x))
    assert not torch.allclose(model(x), before) if used else True
    for _ in range(2):
        torch.testing.assert_close(rewritten(x), model(x))
    # The module around a block that is refused in a kind of call is analysed in the next one: it says why, too, once.
    said = [
        r.getMessage().partition(" runs its original forward: ") for r in caplog.records if r.levelno >= logging.WARNING
    ]
    assert [name for name, _, _ in said] in ([], ["0"], ["0", "Sequential"])
    assert all(reason for _, _, reason in said)


@pytest.fixture
def compiler():
    """Compiled code of its own: torch compiles code that models share a few times only, in a whole process."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("edit", EDITS[:-3], ids=lambda edit: edit.__name__)
def test_a_compiler_looks_again(pair, edit):
    """But for hooks and forwards of an instance's own, which guards of torch.compile skip."""
    model, rewritten = pair
    x = torch.randn(30, D)
    compiled = torch.compile(rewritten, backend="eager")
    torch.testing.assert_close(compiled(x), model(x))
    for candidate in pair:
        edit(candidate[0])
    torch.testing.assert_close(compiled(x), model(x))


SETTINGS = SimpleNamespace(temperature=1.0, names={"scale": 2.0})


def test_functional_derivatives_are_the_originals(pair):
    model, rewritten = pair
    x, direction = torch.randn(30, D), torch.randn(30, D)
    for derivative in (
        lambda m: torch.func.jvp(m, (x,), (direction,))[1],
        lambda m: torch.func.grad(lambda x: m(x).square().sum())(x),
    ):
        torch.testing.assert_close(derivative(rewritten), derivative(model))
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(rewritten(forward_ad.make_dual(x, direction))).tangent
    torch.testing.assert_close(tangent, torch.func.jvp(model, (x,), (direction,))[1])


def test_the_operator_has_no_forward_mode_derivative():
    import hexa_fx.ops  # noqa: F401

    w1, w2, index = torch.randn(E, 12, D), torch.randn(E, D, 12), torch.zeros(3, 1, dtype=torch.long)

    def run(x):
        return torch.ops.hexa.moe_ffn(
            x, index, None, w1, None, None, None, w2, None, "relu", "none", [], "nk", "nk", False
        )

    with pytest.raises(InputError, match="no forward-mode derivative"):
        torch.func.jvp(run, (torch.randn(3, D),), (torch.randn(3, D),))


# -- a forward of the instance's own -----------------------------------------------------------------------------------


def scaled(block, factor):
    """Wraps the block's forward, as accelerate's hooks and many a patch do."""
    own = block.forward
    block.forward = lambda x: own(x) * factor[0]


def decorated(module, factor):
    """Twice, by a function that takes the name of what it wraps, which of a layer of torch's is torch's."""
    for _ in range(2):
        module.forward = _times(module.forward, factor)


def _times(own, factor):
    @functools.wraps(own)
    def forward(*args, **kwargs):
        return own(*args, **kwargs) * factor[0]

    return forward


@pytest.mark.parametrize("part", ["block", "experts", "layers of experts", "router"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_decorated_forwards(part, dtype):
    """What they close over is another block in copies: in the one that is compared, and in that of another thread."""
    model, x, factor = Block().to(dtype), torch.randn(20, D, dtype=dtype), [0.5]
    layers = [layer for layer in model.experts.modules() if isinstance(layer, nn.Linear)]
    parts = {"block": [model], "experts": model.experts, "layers of experts": layers, "router": [model.router]}
    for each in parts[part]:
        decorated(each, factor)
    expected = []
    for factor[0] in (3.0, 0.5):
        expected.append(model(x))
    found = hexa_fx.optimize_(model, x, hexa_fx.HexaConfig(own_code_when_small=False))
    assert "checked in float64" in str(found.report)
    for factor[0] in (0.5, 3.0):
        torch.testing.assert_close(found(x), expected.pop())
    (block,) = found.report.rewritten
    assert not block.calls.own, str(found.report)


@pytest.mark.parametrize("given", [True, False])
def test_a_copy_s_wrappers_are_its_own(given):
    model = nn.Sequential(Block()).double()
    own = model[0].forward
    model[0].forward = lambda x: torch.cat([own(piece) for piece in x.split(16)]) if len(x) > 16 else own(x)
    x = torch.randn(40, D, dtype=torch.float64)
    expected = [model(x), model(x[:9])]
    found = hexa_fx.optimize(model, x if given else None, hexa_fx.HexaConfig(own_code_when_small=False))
    torch.testing.assert_close([found(x), found(x), found(x[:9])], [expected[0], *expected])
    assert operators_run(found, (x,))
    found[0].top_k = 1
    torch.testing.assert_close(model(x), expected[0])
    model[0].top_k = 1
    torch.testing.assert_close(found(x), model(x))


@pytest.mark.parametrize("wrapped", [(0,), (1,), (0, 1)])
def test_wrappers_of_single_blocks(wrapped, caplog):
    model, x, factors = nn.Sequential(Block(), Block()), torch.randn(20, D), [[2.0], [3.0]]
    for number in wrapped:
        scaled(model[number], factors[number])
    expected = model(x)
    found = hexa_fx.optimize_(model, x, hexa_fx.HexaConfig(own_code_when_small=False))
    assert len(found.report.rewritten) == 2
    torch.testing.assert_close(found(x), expected)
    factors[wrapped[0]][0] = 5.0  # what the wrapper encloses is a setting like any other
    changed = found(x)
    torch.testing.assert_close(changed, hexa_fx.undo_(found)(x))


class InSequence(Block):
    """Its experts, and what they consist of, are in `nn.Sequential`."""

    def __init__(self):
        super().__init__()
        self.experts = nn.Sequential(*(nn.Sequential(nn.Linear(D, 12), nn.ReLU(), nn.Linear(12, D)) for _ in range(4)))


def made_of(kind):
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
    both = made_of(kind)
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
    both = made_of(InSequence)
    for block in both:
        take_out(block.experts[1], nn.Tanh())
    assert_same(both, caplog)
    for block in both:
        block.experts[1][1] = nn.Tanh()
    assert_same(both, caplog, own_code=True)


def test_an_expert_that_torch_script_compiled(caplog):
    both = made_of(InSequence)
    for block in both:
        block.experts[1] = torch.jit.script(block.experts[1])
    assert_same(both, caplog, own_code=True)


@pytest.mark.parametrize("place", ["experts.1", "experts.1.0"])
def test_hooks_in_new_dicts(place, caplog):
    both = made_of(InSequence)
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
