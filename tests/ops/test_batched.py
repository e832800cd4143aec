"""Many gradients in one backward, as jacobians take them: of every kind of rewritten block, as of the original."""

import copy

import pytest
import torch

import hexa_fx
from tests.zoo.registry import by_name

BLOCKS = (
    "loop_where_plus_assign",
    "loop_stacked_gate_up",
    "body_lora",
    "body_post_rmsnorm",
    "weight_between",
    "sorted_split_counts",
)


@pytest.mark.parametrize("name", BLOCKS)
def test_many_gradients_at_once(name: str) -> None:
    """`torch.autograd.grad(is_grads_batched=True)`, `jacobian(vectorize=True)`, and `torch.vmap` around a backward."""
    variant, found = by_name(name), []
    original = variant.make(0).double().eval()
    (x,), _ = variant.inputs(2, 5, torch.float64, 0)
    rewritten = hexa_fx.optimize(copy.deepcopy(original), x, hexa_fx.HexaConfig(own_code_when_small=False))
    assert rewritten.report.rewritten
    x.requires_grad_()
    for block in (original, rewritten):
        y = block(x * 1)
        wanted = [x, *(p for p in block.parameters() if p.requires_grad)]
        many = torch.randn(3, *y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(0))
        batched = torch.autograd.grad(y, wanted, many, True, is_grads_batched=True, allow_unused=True)
        mapped = torch.vmap(lambda v, y=y: torch.autograd.grad(y, x, v, retain_graph=True)[0])(many)
        jacobian = torch.autograd.functional.jacobian(lambda x, b=block: b(x).sum(0), x.detach() * 1, vectorize=True)
        found.append([*(torch.zeros(()) if g is None else g for g in batched), mapped, jacobian])
    for theirs, ours in zip(*found):
        torch.testing.assert_close(ours, theirs if theirs.numel() > 1 else torch.zeros_like(ours))
