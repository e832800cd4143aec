"""No call waits for a compiler: torch's operators run until kernels are there, then kernels do; in a CUDA graph too."""

from pathlib import Path

import pytest
import torch

from hexa_fx.cli.model_layers import layer_of
from hexa_fx.cuda import choosing
from hexa_fx.cuda import layer as cuda_layer
from hexa_fx.cuda.kernel_set import kernel_set
from hexa_fx.ir import FfnSpec
from hexa_fx.jit import builder, kernel
from hexa_fx.ops.moe_ffn import moe_ffn
from tests.gpu.cases import graph_of

SPEC = FfnSpec("silu", "concat")


def assert_alike(a: torch.Tensor, b: torch.Tensor) -> None:
    """Equal but for the roundings of 16 bits, which torch's operators do in other places."""
    assert (a - b).float().norm() < 0.02 * b.float().norm()


def test_torch_first_and_kernels_when_they_are_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HEXA_FX_WAIT_FOR_KERNELS")
    monkeypatch.setenv("HEXA_FX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernel, "get_kernel", kernel.get_kernel.__wrapped__)
    choosing.forget_choices()
    shapes = ((40, 32), (4, 64, 32), (4, 32, 32))
    x, w1, w2 = (torch.randn(*s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes)
    index, gates = torch.randint(0, 4, (40, 2), device="cuda"), torch.rand(40, 2, device="cuda")

    def step() -> list[torch.Tensor]:
        y = moe_ffn(x, index, gates, w1, None, None, None, w2, None, SPEC)
        return [y, *torch.autograd.grad(y.float().square().sum(), (x, w1, w2))]

    expected = step()
    assert builder().left()
    with torch.no_grad():
        graph, captured = graph_of(lambda: moe_ffn(x, index, gates, w1, None, None, None, w2, None, SPEC))
    graph.replay()
    assert_alike(captured, expected[0])
    experts = layer_of(SPEC, experts=4, top_k=2, hidden=32, inner=32)
    specs = kernel_set(experts, choosing.device_card(0), most=40)
    builder().request(specs)
    assert builder().wait(specs, timeout=200)
    for _ in range(4):
        got = step()
        for a, b in zip(got, expected, strict=True):
            assert_alike(a, b)
    assert any(cuda_layer._known.values())  # only what is all built is planned as a whole
    choosing.forget_choices()
