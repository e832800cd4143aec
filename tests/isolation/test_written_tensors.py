"""What is copied of tensors before a run that may write to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hexa_fx.isolation.written_tensors import tensors_restored


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
        module.weight.set_(module.weight)  # type: ignore[call-overload]
        module.weight.set_(torch.zeros(8, 8))  # type: ignore[call-overload]
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
