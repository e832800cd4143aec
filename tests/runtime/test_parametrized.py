"""What a run reads from a module is found again once its weights are parametrized, as PEFT's adapters on parameters do."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import hexa_fx
from hexa_fx.capture import capture
from hexa_fx.ir import PythonRead
from hexa_fx.runtime.guards import GuardMiss
from hexa_fx.runtime.resolution import Resolution, holds
from tests.detect.mixture import Mixture

D, E, T = 8, 4, 10


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.scale


class Experts(nn.Module):
    """Every expert one matrix; a switch beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.doubled = nn.Parameter(torch.randn(E, D, D)), False

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        rows = torch.bmm(x[:, None], self.weight[index])[:, 0]
        return rows * 2 if self.doubled else rows


def parametrized(experts: Experts) -> Experts:
    parametrize.register_parametrization(experts, "weight", Scaled())
    return experts


Noted = tuple[Experts, tuple[PythonRead, ...]]


@pytest.fixture(params=["before", "after"])
def noted(request: pytest.FixtureRequest) -> Noted:
    """Parametrized experts, and what a run of them read before or after they were parametrized."""
    experts = Experts() if request.param == "before" else parametrized(Experts())
    reads = capture(experts, (torch.randn(T, D), torch.arange(T) % E), {}, "").reads
    assert any(read.steps[-1] == "doubled" for read in reads)
    return (parametrized(experts) if request.param == "before" else experts), reads


def test_holds_while_weights_change(noted: Noted) -> None:
    experts, reads = noted
    assert holds(experts, reads)
    assert holds(copy.deepcopy(experts), reads)
    experts.parametrizations.weight[0].scale.data.fill_(-3.0)
    experts.parametrizations.weight.original.data.zero_()
    assert holds(experts, reads)


def test_another_value_beside_the_weight_is_noticed(noted: Noted) -> None:
    experts, reads = noted
    experts.doubled = True
    assert not holds(experts, reads)
    with pytest.raises(GuardMiss, match="doubled"):
        Resolution(experts, reads)


class SpectralNorm(Mixture):
    """Weights that are computed anew whenever they are asked for, and count that."""

    def __init__(self) -> None:
        super().__init__()
        for expert in self.experts:
            parametrizations.spectral_norm(expert[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)[2]


@pytest.mark.parametrize("given", [True, False])
def test_weights_are_computed_for_the_code_alone(given: bool) -> None:
    torch.manual_seed(0)
    model, x = SpectralNorm(), torch.randn(20, 6)
    opt = hexa_fx.optimize(copy.deepcopy(model), *([x] if given else []))
    for _ in range(3):
        torch.testing.assert_close(opt(x), model(x))
    for (name, buffer), (_, wanted) in zip(opt.named_buffers(), model.named_buffers()):
        assert torch.equal(buffer, wanted), name
    assert len(opt.report.blocks[0].calls.own) == 1, "it is analysed once"
