"""`torch.export` of optimized models: exported, saved, loaded, and right at other sizes."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

import hexa_fx
from tests.zoo.common import MLP, Looped


class Block(Looped):
    """The loop that does not export: what runs depends on the routing."""

    def __init__(self) -> None:
        super().__init__(lambda: MLP(8, 12), 8)

    def mix(self, flat: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(indices == number)
            if token.numel():
                out.index_add_(0, token, expert(flat[token]) * weights[token, slot, None])
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def make() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Model().eval(), torch.randn(2, 5, 8)


def test_the_original_does_not_export() -> None:
    model, x = make()
    with pytest.raises(Exception, match="data-dependent"):
        torch.export.export(model, (x,), strict=False)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_round_trip_with_dynamic_sizes(strict: bool, tmp_path: Path) -> None:
    model, x = make()
    optimized = hexa_fx.optimize(model, x)
    sizes = {0: Dim("batch", min=1, max=64), 1: Dim("sequence", min=1, max=64)}
    exported = torch.export.export(optimized, (x,), dynamic_shapes=(sizes,), strict=strict)
    targets = [str(node.target) for node in exported.graph.nodes]
    assert targets.count("hexa.moe_ffn.default") == 2
    assert sorted(exported.state_dict) == sorted(model.state_dict())
    torch.export.save(exported, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for batch, sequence in ((2, 5), (1, 1), (7, 3)):
        other = torch.randn(batch, sequence, 8)
        torch.testing.assert_close(loaded(other), model(other), rtol=1e-5, atol=1e-6)


def test_exported_graph_trains() -> None:
    """Gradients go through the exported module as through the original."""
    model, x = make()
    exported = torch.export.export(hexa_fx.optimize(model, x).train(), (x,), strict=False).module()
    model.train()
    gradients = []
    for call in (model, exported):
        call.zero_grad(set_to_none=True)
        call(x).square().sum().backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in call.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_an_export_to_onnx_gets_its_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = make()
    optimized = hexa_fx.optimize(model, x, hexa_fx.HexaConfig(own_code_when_small=False))
    optimized(x)
    with monkeypatch.context() as patched:
        patched.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
        traced = torch.jit.trace(optimized, x, check_trace=False)
        with pytest.raises(Exception, match="data-dependent"):
            torch.export.export(optimized, (x,), strict=False)
    assert "hexa::" not in str(traced.inlined_graph)
    optimized(x)
    (block, _) = optimized.report.blocks
    assert block.calls.rewritten == 2
    assert all("ONNX" in reason for reason in block.calls.own)
