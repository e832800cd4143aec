"""Which kernels are requested while a block is verified, and that verification itself asks for none."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import hexa_fx
from hexa_fx.cli.model_layers import layer_of
from hexa_fx.codegen import KernelSpec
from hexa_fx.cuda import choosing, modes
from hexa_fx.cuda.kernel_set import FfnLayer, fp8_kernel_set, kernel_set
from hexa_fx.ir import FfnSpec
from hexa_fx.passes import kernel_requests, verify_block

E, D, H, K = 4, 16, 24, 2


class Stacked(nn.Module):
    """Expert weights as one tensor each; gate above up."""

    def __init__(self, listed: bool = False) -> None:
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.gate_up, self.down = (nn.Parameter(torch.randn(E, *shape)) for shape in ((2 * H, D), (D, H)))

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for expert in range(E):
            token, slot = torch.where(index == expert)
            gate, up = (x[token] @ self.gate_up[expert].T).chunk(2, -1)
            h = nn.functional.silu(gate) * up
            out.index_add_(0, token, (h @ self.down[expert].T) * weights[token, slot, None])
        return out


def summing(layer: FfnLayer) -> FfnLayer:
    """The same with gradients that are added to those of an earlier micro-batch."""
    return replace(layer, added=dict.fromkeys(("w1", "w2"), torch.float32))


def test_a_blocks_whole_set_is_requested_before_it_is_verified(
    requested: list[KernelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    before: list[int] = []
    plain = verify_block

    def counted(*args: object, **kwargs: object) -> object:
        before.append(len(requested))
        assert modes.runs_torch_only()
        return plain(*args, **kwargs)

    monkeypatch.setattr(hexa_fx.passes, "verify_block", counted)
    block, x = Stacked(), torch.randn(10, D)
    hexa_fx.optimize(block, x)
    layer = layer_of(FfnSpec("silu", "concat"), experts=E, top_k=K, hidden=D, inner=H, dtype=torch.float32)
    wanted = kernel_set(layer, choosing.typical_card(90))
    assert set(requested) == {*wanted, *kernel_set(summing(layer), choosing.typical_card(90))}
    assert list(dict.fromkeys(requested))[: len(wanted)] == list(wanted)  # others come last
    assert before == [len(requested)]  # both modes run the same, compared once
    assert not modes.runs_torch_only()


def test_blocks_that_multiply_in_fp8_request_both_sets(requested: list[KernelSpec]) -> None:
    """That of their exact form for calls that FP8 cannot take."""
    hexa_fx.optimize(Stacked(), torch.randn(10, D), hexa_fx.HexaConfig(compute="fp8_block"))
    layer = layer_of(FfnSpec("silu", "concat"), experts=E, top_k=K, hidden=D, inner=H, dtype=torch.float32)
    card = choosing.typical_card(90)
    assert set(requested) == {
        *kernel_set(layer, card),
        *fp8_kernel_set(layer, card),
        *fp8_kernel_set(summing(layer), card),
    }


def test_frozen_experts_need_no_kernels_of_weight_gradients(requested: list[KernelSpec]) -> None:
    block = Stacked()
    block.gate_up.requires_grad_(False)
    block.down.requires_grad_(False)
    hexa_fx.optimize(block, torch.randn(10, D))
    assert requested
    assert not {"estmm", "esfk"} & {spec.op for spec in requested}


def test_a_report_requests_nothing(requested: list[KernelSpec]) -> None:
    hexa_fx.explain(Stacked(), torch.randn(10, D))
    assert requested == []


def test_under_autocast_the_kernels_of_its_dtype_are_requested(requested: list[KernelSpec]) -> None:
    torch.set_autocast_enabled("cuda", True)
    try:
        with kernel_requests.kernels_requested("native"):
            torch.set_autocast_enabled("cuda", False)  # as the analysis has it
            hexa_fx.optimize(Stacked(), torch.randn(10, D))
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert "f16" in {spec.dtype.name for spec in requested}
    assert {spec.out.name for spec in requested if spec.accumulate} == {"f32"}  # as parameters are


def test_under_autocast_weights_are_quantised_as_they_are(requested: list[KernelSpec]) -> None:
    torch.set_autocast_enabled("cuda", True)
    try:
        with kernel_requests.kernels_requested("fp8_block"):
            torch.set_autocast_enabled("cuda", False)
            hexa_fx.optimize(Stacked(), torch.randn(10, D), hexa_fx.HexaConfig(compute="fp8_block"))
    finally:
        torch.set_autocast_enabled("cuda", False)
    gradients = [spec for spec in requested if spec.family == "block_gemm_sm90" and spec.op == "estmm"]
    assert {spec.out.name for spec in gradients} == {"f32"}
    assert {spec.accumulate for spec in gradients} == {False, True}
