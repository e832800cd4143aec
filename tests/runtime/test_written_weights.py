"""Weights that are written between forward and backward: torch's error where the original raises it, else the right gradients."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hexa_fx

D, WIDTH, E = 8, 12, 4


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, WIDTH), nn.Linear(WIDTH, D)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(E))

    def expert(self, number, x):
        return self.experts[number](x)

    def forward(self, x):
        weights, index = torch.softmax(self.gate(x), -1).topk(2)
        out = torch.zeros_like(x)
        for number in range(E):
            token, slot = torch.where(index == number)
            out = out.index_add(0, token, self.expert(number, x[token]) * weights[token, slot, None])
        return out


class Stacked(Listed):
    def __init__(self) -> None:
        super().__init__()
        del self.experts
        self.up, self.down = nn.Parameter(torch.randn(E, WIDTH, D) * 0.3), nn.Parameter(torch.randn(E, D, WIDTH) * 0.3)
        self.up_bias, self.down_bias = nn.Parameter(torch.randn(E, WIDTH)), nn.Parameter(torch.randn(E, D))

    def expert(self, number, x):
        h = F.silu(F.linear(x, self.up[number], self.up_bias[number]))
        return F.linear(h, self.down[number], self.down_bias[number])


@pytest.fixture(scope="module", params=[Listed, Stacked])
def models(request):
    torch.manual_seed(0)
    model = request.param()
    config = hexa_fx.HexaConfig(own_code_when_small=False)
    return model, hexa_fx.optimize(model, torch.randn(40, D), config=config)


def gradients(model, frozen, written, factor=2.0, call=lambda model, x: model(x)):
    """Of x and of what is trained, with parameters multiplied between forward and backward; None if torch raises its error."""
    model = copy.deepcopy(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    x = torch.randn(40, D, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = call(model, x)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(written):
                parameter.mul_(factor)
    wanted = [x, *(parameter for parameter in model.parameters() if parameter.requires_grad)]
    try:
        return torch.autograd.grad(y.square().sum(), wanted)
    except RuntimeError as error:
        return None if "modified" in str(error) else error


@pytest.mark.parametrize("frozen", [(), ("up", "down"), ("up", "down", "gate"), ("up",), ("down",)])
@pytest.mark.parametrize(
    "written", [("up", "up.weight"), ("down", "down.weight"), ("up.bias", "up_bias"), ("gate.weight",)]
)
def test_the_error_is_raised_where_the_original_raises_it(models, frozen, written):
    expected, found = (gradients(model, frozen, written) for model in models)
    assert (found is None) == (expected is None)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_no_gradient_is_computed_with_a_bias_that_was_written(models):
    """The routing weights' gradient takes the second bias, where the original keeps outputs of experts."""
    assert gradients(models[1], ("up", "down"), ("down.bias", "down_bias")) is None


def test_only_the_gradient_of_x(models):
    """Then nothing runs backward through the parameters themselves."""
    model, x = copy.deepcopy(models[1]), torch.randn(40, D, requires_grad=True)
    y = model(x).sum()
    torch.optim.SGD(model.parameters(), 0.1).step()  # no gradients yet: writes nothing
    (dx,) = torch.autograd.grad(y, x, retain_graph=True)
    assert dx.abs().sum() > 0
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if "down" in name).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, x)


def test_a_checkpoint_computes_with_what_is_there(models):
    """As torch does for the original: nothing that was saved is used."""

    def call(model, x):
        return checkpoint(model, x, use_reentrant=False)

    expected, found = (gradients(model, ("up", "down", "gate"), ("up", "up.weight"), call=call) for model in models)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_forward_in_between_is_no_write(models):
    """Copies of a model find their weights side by side, and several readers look at the same parameters."""
    model, x = copy.deepcopy(models[1]), torch.randn(40, D, requires_grad=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    y = model(x).sum()
    model.eval()(x)
    copy.deepcopy(model)(x)
    y.backward()
