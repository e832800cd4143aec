"""Trial runs with numbers that a block is not made for leave the device usable: a failed assertion in a kernel would end it."""

import copy

import pytest
import torch
from torch import Tensor, nn

import hexa_fx
from hexa_fx.cuda import fallback as cuda_fallback
from tests.runtime.handmade import D, E, ListMoE, NumberedPlaces

pytestmark = pytest.mark.gpu


class GivenIds(nn.Module):
    """Experts that are given ids, in the idiom of transformers' eager experts."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(8, 64, 32) / 8)
        self.w2 = nn.Parameter(torch.randn(8, 32, 64) / 8)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        mask = nn.functional.one_hot(ids, 8).permute(2, 1, 0)
        for expert in mask.sum((-1, -2)).gt(0).nonzero().flatten():
            slot, token = torch.where(mask[expert])
            rows = torch.relu(x[token] @ self.w1[expert]) @ self.w2[expert]
            out.index_add_(0, token, rows * weights[token, slot, None])
        return out


class Sampled(ListMoE):
    """A layer that draws noise which NaN in a token turns into no probability."""

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            torch.multinomial(hidden.reshape(-1, D).float().softmax(-1), 1)
        return super().forward(hidden)


def test_ids_of_no_expert() -> None:
    block = GivenIds().cuda()
    x, (weights, ids) = torch.randn(40, 64, device="cuda"), torch.rand(40, 8, device="cuda").topk(2)
    optimized = hexa_fx.optimize(copy.deepcopy(block), (x, ids, weights), hexa_fx.HexaConfig(own_code_when_small=False))
    assert optimized.report.rewritten, str(optimized.report)
    torch.testing.assert_close(optimized(x, ids, weights), block(x, ids, weights), rtol=1e-4, atol=1e-4)
    torch.cuda.synchronize()


def test_places_past_a_table() -> None:
    block, x = NumberedPlaces(9).cuda(), torch.randn(2, 9, D, device="cuda")
    optimized = hexa_fx.optimize(copy.deepcopy(block), x, hexa_fx.HexaConfig(own_code_when_small=False))
    assert optimized.report.rewritten, str(optimized.report)
    torch.testing.assert_close(optimized(x), block(x), rtol=1e-4, atol=1e-4)


def test_a_gpu_as_the_default_device() -> None:
    with torch.device("cuda"):
        block, x = ListMoE(), torch.randn(2, 9, D)
        optimized = hexa_fx.optimize(copy.deepcopy(block), x, hexa_fx.HexaConfig(own_code_when_small=False))
        assert optimized.report.rewritten, str(optimized.report)
        torch.testing.assert_close(optimized(x), block(x), rtol=1e-4, atol=1e-4)


def test_probabilities_of_nan() -> None:
    block = Sampled().cuda().train()
    x = torch.randn(2, 9, D, device="cuda")
    hexa_fx.optimize(block, (x,), hexa_fx.HexaConfig(own_code_when_small=False))
    torch.cuda.synchronize()
    assert torch.arange(E, device="cuda").sum().item() == E * (E - 1) // 2


class NormedRows(nn.Module):
    """Experts with a norm behind each, which run as operators one by one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 5)
        self.up = nn.ModuleList(nn.Linear(width, 16) for _ in range(5))
        self.down = nn.ModuleList(nn.Linear(16, width) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            token, slot = torch.where(ids == number)
            y = down(nn.functional.silu(up(x[token])))
            y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
            out.index_add_(0, token, y * weights[token, slot, None])
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("training", [True, False])
def test_asking_which_kernels_operators_launch_reads_no_rows_by_chance(dtype: torch.dtype, training: bool) -> None:
    """There are no products in float64: torch's operators read the rows, in a run that launches nothing."""
    block, x = NormedRows(12).to("cuda", dtype).train(training), torch.randn(9, 12, device="cuda", dtype=dtype)
    optimized = hexa_fx.optimize(copy.deepcopy(block), x, hexa_fx.HexaConfig(own_code_when_small=False))
    torch.cuda.synchronize()
    assert optimized.report.rewritten, str(optimized.report)
    cuda_fallback.fallbacks.clear()  # of float64
    torch.testing.assert_close(optimized(x), block(x), rtol=1e-4, atol=1e-4)
    cuda_fallback.fallbacks.clear()
