"""What the blocks of `tests.zoo.met` do in 16 bits, and what is said of their like that stay as they are."""

import copy

import pytest
import torch
import torch.nn.functional as F

import hexa_fx
from tests.zoo.agree import rewritten, tokens
from tests.zoo.common import MLP, experts
from tests.zoo.met import KeptLogits, Looped, ScaledBefore
from tests.zoo.variant import D, E, K, weight


class ScaledAlone(ScaledBefore):
    """As tokens are scaled in float32 whatever their dtype; biases looked up."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        weights, ids = self.gate(flat).float().softmax(-1).topk(K, -1)
        order, counts = ids.view(-1).argsort(stable=True), torch.bincount(ids.view(-1), minlength=E)
        rows = (flat[order // K].float() * weights.view(-1)[order][:, None]).to(x.dtype)
        chosen = ids.view(-1)[order]
        rows = self.products(rows, self.up, counts) + F.embedding(chosen, self.up_bias)
        rows = self.products(F.silu(rows), self.down, counts) + F.embedding(chosen, self.down_bias)
        return torch.zeros_like(flat).index_add(0, order // K, rows).view(x.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_that_are_scaled_in_a_wider_dtype(dtype: torch.dtype) -> None:
    x, tolerance = tokens(2, 7).to(dtype), 1e-2 if dtype == torch.bfloat16 else 1e-5
    rewritten(ScaledAlone().to(dtype), x, x, train=False, tolerance=tolerance)


def test_what_a_router_keeps_has_its_gradient() -> None:
    block, x = KeptLogits().double(), torch.randn(2, 7, D, dtype=torch.float64)
    opt = hexa_fx.optimize(copy.deepcopy(block), x)
    found = []
    for model in (block.train(), opt.train()):
        torch.manual_seed(1)
        loss = model(x).square().sum() + model.router.loss + model.router.logits.sin().sum()
        found.append((loss.detach(), *torch.autograd.grad(loss, [*model.router.parameters()])))
    for one, other in zip(*found):
        torch.testing.assert_close(other, one)


class ByBmm(Looped):
    """A router's matrix that is expanded for each sequence, beside a loop over experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = weight(D, E), experts(MLP)

    def route(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = torch.bmm(flat[None].expand(2, -1, -1), self.gate.unsqueeze(0).expand(2, -1, -1))[1]
        return logits.softmax(-1).topk(K, -1)


def test_a_routers_matrix_for_each_sequence_is_no_stack_of_experts() -> None:
    rewritten(ByBmm().double(), *[tokens(2, 7)] * 2)
