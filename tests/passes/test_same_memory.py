"""Parameters in the same memory, by an object that two modules share or by their data alone: what was one stays one."""

import pytest
import torch
from torch import nn

import hexa_fx
from tests.runtime.handmade import D, ListMoE

X = torch.randn(2, 9, D, generator=torch.Generator().manual_seed(0))


def listed(tie: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(ListMoE(), ListMoE()).eval()
    first, second = (layer.experts for layer in model)
    if tie == "objects":
        second[2].w1.weight = first[1].w1.weight
    elif tie == "data of two layers":
        second[2].w1.weight.data = first[1].w1.weight.data
    elif tie == "data of two experts":
        second[2].w1.weight.data = second[0].w1.weight.data
    elif tie == "a part of a larger one":
        first[0].w2.weight.data = first[1].w1.weight.data.view(-1)[: first[0].w2.weight.numel()].view(D, -1)
    elif tie == "one buffer":
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        for parameter, view in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()])):
            parameter.data = view.view_as(parameter)
    return model


def trained(model: nn.Module) -> torch.Tensor:
    """What it gives after a step of gradient descent."""
    model(X).square().sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.01 * parameter.grad)
    return model(X).detach()


TIES = ("none", "objects", "one buffer", "data of two layers", "data of two experts", "a part of a larger one")


@pytest.mark.parametrize("tie", TIES)
def test_listed_experts(tie: str) -> None:
    """They are read where they lie, so that what is written to one reaches the other."""
    expected = trained(listed(tie))
    optimized = hexa_fx.optimize_(listed(tie), X)
    assert len(optimized.report.rewritten) == 2
    torch.testing.assert_close(trained(optimized), expected, rtol=1e-4, atol=1e-5)
