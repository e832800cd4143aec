"""Blocks whose weights cannot be read where they are keep their code, with a sentence; the others of the model are rewritten."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hexa_fx
from hexa_fx.integrations.tiny_models import tiny_model
from hexa_fx.passes.preconditions import why_not_finite, why_unreadable
from tests.runtime.handmade import D, ListMoE

hooks = pytest.importorskip("accelerate.hooks")


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = ListMoE(), ListMoE()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_an_offloaded_block_is_analysed_when_it_is_called():
    model, x = Two().eval(), torch.randn(12, D, generator=torch.Generator().manual_seed(0))
    expected = model(x)
    hook = hooks.AlignDevicesHook(execution_device="cpu", offload=True, place_submodules=True, offload_buffers=True)
    hooks.add_hook_to_module(model.second, hook)
    assert all(parameter.is_meta for parameter in model.second.parameters())
    found = hexa_fx.optimize(model, x)
    assert [block.status for block in found.report.blocks] == ["rewritten", "waiting"]
    for _ in range(2):
        torch.testing.assert_close(found(x), expected)
    assert [block.status for block in found.report.blocks] == ["rewritten", "rewritten"]
    assert found.report.blocks[1].calls == (2, 0, {}, 1)
    assert all(parameter.is_meta for parameter in found.second.parameters())


def test_hooks_that_only_place_inputs_are_fine():
    model, x = Two().eval(), torch.randn(12, D, generator=torch.Generator().manual_seed(0))
    expected = model(x)
    for block in (model.first, model.second):
        hooks.add_hook_to_module(block, hooks.AlignDevicesHook(execution_device="cpu", io_same_device=True))
    found = hexa_fx.optimize(model, x)
    torch.testing.assert_close(found(x), expected)
    assert [block.status for block in found.report.blocks] == ["rewritten", "rewritten"], str(found.report)
    assert found.report.blocks[1].same_as == "first"  # hooks of one kind do not cost an analysis of each block


def test_a_block_on_two_devices():
    block = ListMoE()
    block.router = nn.Linear(D, 4, bias=False, device="meta")
    assert "offloaded" in why_unreadable(block)
    assert why_unreadable(ListMoE()) == ""


# -- quantised ---------------------------------------------------------------------------------------------------------
# Stand-ins of the structure that bitsandbytes 0.50 and torchao 0.18 give a model that transformers loads in 4 or 8 bits: the linear
# layers of attention are theirs, the experts are plain parameters.


class Params4bit(nn.Parameter):
    """Packed pairs of 4-bit numbers, (elements / 2, 1) uint8, with the state to unpack them."""

    def __new__(cls, weight: torch.Tensor) -> Params4bit:
        scale = weight.abs().max() / 7
        codes = (weight / scale).round().add(8).to(torch.uint8).view(-1, 2)
        self = torch.Tensor._make_subclass(cls, codes[:, :1] * 16 + codes[:, 1:], False)
        self.quant_state = (scale, weight.shape)
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Params4bit:
        return self


class Linear4bit(nn.Linear):
    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=False)
        self.weight = Params4bit(plain.weight.detach())
        self.compute_dtype, self.quant_state = torch.float32, self.weight.quant_state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed, (scale, shape) = self.weight.data, self.quant_state
        codes = torch.cat((packed // 16, packed % 16), 1).float() - 8
        return x @ (codes * scale).view(shape).t()


class Int8Tensor(torch.Tensor):
    """An int8 weight that looks like a float32 one, as torchao's: dequantised where a function meets it."""

    @staticmethod
    def __new__(cls, weight: torch.Tensor) -> Int8Tensor:
        return torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)

    def __init__(self, weight: torch.Tensor) -> None:
        self.scale = weight.abs().amax(1, keepdim=True) / 127
        self.qdata = (weight / self.scale).round().to(torch.int8)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]
        plain = torch.utils._pytree.tree_map(
            lambda v: v.qdata * v.scale if isinstance(v, cls) else v, (args, kwargs or {})
        )
        return func(*plain[0], **plain[1])


Linear4bit.__module__ = Params4bit.__module__ = "bitsandbytes.nn.modules"
Int8Tensor.__module__ = "torchao.quantization"


def quantised(kind: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A Mixtral as transformers loads it: `is_quantized`, and the layers of attention exchanged."""
    model, inputs = tiny_model("mixtral")
    for layer in model.model.layers:
        attention = layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            plain = getattr(attention, name)
            if kind == "int8":
                plain.weight = nn.Parameter(Int8Tensor(plain.weight.detach()), requires_grad=False)
            else:
                setattr(attention, name, Linear4bit(plain))
    model.is_quantized, model.config.quantization_config = True, {"quant_method": "bitsandbytes"}
    return model, inputs


@pytest.mark.parametrize("kind", ["4bit", "int8"])
def test_plain_experts_beside_quantised_attention_are_rewritten(kind):
    model, inputs = quantised(kind)
    found = hexa_fx.optimize_(model, inputs)
    assert [block.status for block in found.report.blocks] == ["rewritten", "rewritten"], str(found.report)
    reference, _ = quantised(kind)
    torch.testing.assert_close(found(**inputs).logits, reference(**inputs).logits, rtol=1e-4, atol=1e-5)


def test_quantised_experts_are_left_and_the_others_are_rewritten():
    model, x = Two().eval(), torch.randn(12, D, generator=torch.Generator().manual_seed(0))
    for expert in model.second.experts:
        for name, child in list(expert.named_children()):
            if isinstance(child, nn.Linear):
                setattr(expert, name, Linear4bit(child))
    report = hexa_fx.explain(model, x)
    assert [block.status for block in report.blocks] == ["rewritten", "refused"]
    said = report.blocks[1].reason
    assert "experts.0." in said
    assert "is a bitsandbytes.nn.modules.Linear4bit" in said
    assert "hexa_fx.quantize_experts_ packs dense experts after hexa_fx.optimize_" in said


def test_what_quantised_weights_are_called():
    bad = nn.Sequential(nn.Linear(8, 4))
    bad[0].weight = nn.Parameter(torch.zeros(4, 8, dtype=torch.uint8), requires_grad=False)
    assert "(0.weight is a parameter of dtype uint8)" in why_unreadable(bad)
    bad[0].weight = nn.Parameter(Int8Tensor(torch.randn(4, 8)), requires_grad=False)
    assert "(0.weight is a Int8Tensor)" in why_unreadable(bad)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_router_without_numbers_is_named(number: float) -> None:
    block = ListMoE()
    router = next(name for name, p in block.named_parameters() if "experts" not in name and p.dim() == 2)
    block.get_parameter(router).data.fill_(number)
    (found,) = hexa_fx.explain(block, torch.randn(12, D)).refused
    assert f"{router} holds NaN or infinity" in found.reason
    assert why_not_finite(ListMoE()) == ""
