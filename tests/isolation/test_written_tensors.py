"""What is copied of tensors before a run that may write to them."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hexa_fx
from hexa_fx.isolation.written_tensors import tensors_restored
from tests.detect.mixture import D, Mixture


class Copies(TorchDispatchMode):
    """Counts numbers that are copied."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.clone.default:
            self.count += result.numel()
        return result


def test_a_parameter_is_not_copied_where_its_numbers_stay() -> None:
    """As where PEFT parametrizes the experts of every layer in a forward: copies of all would be a second model."""
    module = nn.Linear(8, 8)
    at, before = module.weight.data_ptr(), module.weight.detach().clone()
    with Copies() as copies, tensors_restored(module):
        module.weight.requires_grad_(False)
        module.weight.data = torch.ones(4, 8)
    assert copies.count == 0
    assert (module.weight.data_ptr(), module.weight.requires_grad) == (at, True)
    assert torch.equal(module.weight, before)


def test_what_is_written_in_place_is_copied_once() -> None:
    module, kept = nn.Linear(8, 8), torch.ones(3)
    before = module.weight.detach().clone()

    def write(tensor: Tensor) -> None:
        tensor.mul_(2).add_(1)

    with torch.no_grad(), Copies() as copies, tensors_restored(module):
        write(module.weight)
        write(kept)
    assert copies.count == 64 + 3
    assert torch.equal(module.weight, before)
    assert torch.equal(kept, torch.ones(3))


class Normalised(Mixture):
    """Running statistics, of what experts get and give, to which no function writes by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.BatchNorm1d(D), nn.InstanceNorm1d(D, track_running_stats=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.mix(self.before(x))[2].T[None])[0].T


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_are_left_as_they_were(dtype: torch.dtype, training: bool) -> None:
    block = Normalised().to(dtype).train(training)
    before = copy.deepcopy(block.state_dict())
    optimized = hexa_fx.optimize(block, torch.randn(9, D, dtype=dtype))
    assert bool(optimized.report.rewritten) is not training  # batches decide on results in train mode
    assert all(torch.equal(optimized.state_dict()[name], value) for name, value in before.items())
