"""Experts that are lists of bitsandbytes' `Linear4bit`: their codes are stacked and read, and the modules stay what they are.

With bitsandbytes where it is installed, and with a stand-in everywhere.
"""

import copy
import importlib
import importlib.util

import pytest
import torch
from torch import nn

import hexa_fx
from hexa_fx import HexaConfig
from hexa_fx.ir import NEVER_SMALL, Small
from hexa_fx.packed import StackedCodes
from tests.integrations import linear4bit_stand_in as stand_in
from tests.ops.test_moe_ffn_sources import Launches
from tests.zoo.common import looped

E, D, H = 4, 64, 128
ALWAYS = HexaConfig(own_code_when_small=False)
INSTALLED = importlib.util.find_spec("bitsandbytes") is not None


@pytest.fixture(params=["stand-in", pytest.param("installed", marks=pytest.mark.skipif(not INSTALLED, reason="none"))])
def linear(request):
    if request.param == "stand-in":
        return stand_in.Linear4bit
    import bitsandbytes

    return bitsandbytes.nn.Linear4bit


class Expert(nn.Module):
    def __init__(self, linear, **options):
        super().__init__()
        options = {"bias": False, "compute_dtype": torch.float32, "quant_type": "nf4", **options}
        self.gate, self.up = linear(D, H, **options), linear(D, H, **options)
        self.down = linear(H, D, **options)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """The router is quantised, too, as every linear layer of a model is."""

    def __init__(self, linear, **options):
        super().__init__()
        self.router = linear(D, E, bias=False, compute_dtype=torch.float32, quant_type="nf4")
        self.experts = nn.ModuleList(Expert(linear, **options) for _ in range(E))

    def forward(self, x):
        return looped(x, *self.router(x).softmax(-1).topk(2), self.experts)


class Model(nn.Module):
    def __init__(self, linear, **options):
        super().__init__()
        self.blocks = nn.ModuleList(Block(linear, **options) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def made(linear, **options):
    torch.manual_seed(0)
    return Model(linear, **options).to("cpu"), torch.randn(20, D)


def outcome(model, x):
    rows = x.clone().requires_grad_()
    y = model(rows)
    return y, *torch.autograd.grad(y.square().sum(), rows)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("double", [False, True])
def test_results_and_gradients_are_those_of_their_own_forward(linear, double, bias, caplog):
    model, x = made(linear, compress_statistics=double, bias=bias)
    expected, keys = outcome(model, x), model.state_dict().keys()
    hexa_fx.optimize_(model, x, ALWAYS)
    assert len(model.report.rewritten) == 2
    assert model.report.blocks[1].same_as, "layers share an analysis"
    assert "packed as nf4" in str(model.report)
    assert "could not" not in str(model.report)
    for found, wanted in zip(outcome(model, x), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    rows = x.clone().requires_grad_()  # else bitsandbytes takes its own kernels for inference on a CPU, in bfloat16
    with Launches() as launches:
        torch.testing.assert_close(model.eval()(rows), expected[0])
    assert "hexa::moe_ffn_sources" in " ".join(launches.names_seen())
    assert model.state_dict().keys() == keys
    assert type(model.blocks[0].experts[0].gate) is linear
    torch.testing.assert_close(hexa_fx.undo_(model.train())(x), expected[0])
    assert not caplog.text


def test_codes_lie_in_one_place_only_and_copies_copy_each_once(linear):
    model, x = made(linear, compress_statistics=False)
    hexa_fx.optimize_(model, x, ALWAYS)
    expected = model(x)
    (first, *_) = readers = [value for value in vars(model.blocks[0]).values() if isinstance(value, StackedCodes)]
    assert len(readers) == 2
    codes = first()
    assert codes.shape == (E, 2 * H, D)
    parameters = [expert.up.weight for expert in model.blocks[0].experts]
    assert [p.data_ptr() for p in parameters] == [codes.packed[e, H:].data_ptr() for e in range(E)]
    assert all(p.untyped_storage().nbytes() == p.numel() == H * D // 2 for p in parameters)
    again = copy.deepcopy(model)
    assert again.blocks[0].experts[0].up.weight.data_ptr() != parameters[0].data_ptr()
    torch.testing.assert_close(again(x), expected)
    before = parameters[0].data.clone()
    parameters[0].data.zero_()
    assert not torch.allclose(model(x), expected)
    parameters[0].data.copy_(before)
    torch.testing.assert_close(model(x), expected)


def test_they_never_run_their_own_code_for_being_small(linear, monkeypatch):
    """It would unpack; `explain` says so as the report of an optimized model does."""
    monkeypatch.setattr(importlib.import_module("hexa_fx.passes.rewrite"), "own_code_limit", lambda *_: Small(999, 999))
    model, x = made(linear)
    for report in (hexa_fx.explain(model, x), hexa_fx.optimize_(model, x).report):
        assert [block.small_tokens for block in report.blocks] == [NEVER_SMALL] * 2
    assert not any(any(made.small) for made in model.blocks[0].forward.specialisations)


def test_weights_that_are_exchanged_are_seen(linear):
    model, x = made(linear)
    hexa_fx.optimize_(model, x, ALWAYS)
    other, _ = made(linear)
    other.blocks[0].experts[1].down = copy.deepcopy(other.blocks[1].experts[2].down)
    model.blocks[0].experts[1].down.weight = copy.deepcopy(other.blocks[1].experts[2].down.weight)
    torch.testing.assert_close(model(x), other(x))


def test_what_is_not_read_is_refused(linear):
    model, x = made(linear, quant_type="fp4")
    report = hexa_fx.optimize(model, x, ALWAYS).report
    assert not report.rewritten
    assert "fp4 in blocks of 64; read is nf4 in blocks of 64" in str(report)


def test_a_dense_weight_beside_codes_is_refused(linear):
    model, x = made(linear)
    for block in model.blocks:
        for expert in block.experts:
            expert.up = nn.Linear(D, H, bias=False)
    report = str(hexa_fx.optimize(model, x, ALWAYS).report)
    assert "experts.0.up.weight, which is read together with it, a dense one" in report


class AsksForTheDtype(Block):
    def forward(self, x):
        return super().forward(x.to(torch.promote_types(self.experts[0].gate.weight.dtype, x.dtype)))


def test_code_that_asks_for_codes_is_refused():
    block, x = AsksForTheDtype(stand_in.Linear4bit), torch.randn(20, D)
    assert "asks for experts.0.gate.weight" in str(hexa_fx.optimize(block, x, ALWAYS).report)


class Doubled(stand_in.Linear4bit):
    def forward(self, x):
        return 2 * super().forward(x)


def test_modules_that_give_other_numbers_are_refused():
    model, x = made(Doubled)
    assert "gives other numbers than" in str(hexa_fx.optimize(model, x, ALWAYS).report)


def test_two_in_one_place_and_hooks_run_their_own_code(linear, caplog):
    model, x = made(linear)
    hexa_fx.optimize_(model, x, ALWAYS)
    seen = []
    model.blocks[0].experts[1].down.register_forward_hook(lambda *_: seen.append(1))
    model(x)
    assert seen
    assert "hooks" in caplog.text


def adapted(linear, dtype, **options):
    """In ``dtype``, with adapters."""
    peft = pytest.importorskip("peft")
    torch.set_default_dtype(dtype)
    model, x = made(linear, **options)
    torch.set_default_dtype(torch.float32)
    for block in model.blocks:
        block.router = nn.Linear(D, E, bias=False).to(dtype)
    model.is_loaded_in_4bit = linear is not stand_in.Linear4bit
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["gate", "up", "down"], init_lora_weights=False)
    return peft.get_peft_model(model, lora).train(), x.to(dtype)


def adapted_outcome(model, x, autocast=None):
    """Results, and all gradients."""
    leaves = [x.clone().requires_grad_(), *(p for p in model.parameters() if p.requires_grad)]
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        y = model(leaves[0])
    gradients = torch.autograd.grad(y.float().square().sum(), leaves, allow_unused=True)
    return y, *(torch.zeros_like(p) if g is None else g for g, p in zip(gradients, leaves, strict=True))


def test_adapters_of_peft_train_on_them(linear):
    model, x = adapted(linear, torch.float32)
    expected = adapted_outcome(model, x)
    assert len(hexa_fx.optimize_(model, x, ALWAYS).report.rewritten) == 2
    with Launches() as launches:
        found = adapted_outcome(model, x)
    assert "hexa::moe_ffn_sources" in " ".join(launches.names_seen())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.detach().abs().max()))


@pytest.mark.parametrize(
    ("dtype", "compute", "autocast"),
    [
        (torch.float32, torch.float32, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.float16),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32, None),
    ],
)
def test_adapters_of_peft_under_autocast(linear, dtype, compute, autocast, caplog):
    """PEFT asks for autocast and then casts less; a `Linear4bit` gives the dtype that it is given, there too."""
    assert_near(*adapted(linear, dtype, compute_dtype=compute), autocast)
    assert "original" not in caplog.text


def assert_near(model, x, autocast):
    """Rewritten, a block gives what it gave, to 16-bit rounding."""
    del model.base_model.model.blocks[1]  # it may route otherwise after another rounding
    expected = adapted_outcome(model, x, autocast)
    assert hexa_fx.optimize_(model, x, ALWAYS).report.rewritten
    for one, other in zip(adapted_outcome(model, x, autocast), expected, strict=True):
        assert one.dtype == other.dtype
        assert (one - other).float().norm() < 0.03 * other.float().norm()


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_rows_that_are_wider_than_the_dtype_of_the_codes(linear, autocast, caplog):
    """PEFT's `prepare_model_for_kbit_training` makes all else float32 in a model in bfloat16."""
    model, x = adapted(linear, torch.bfloat16)
    assert_near(model.float(), x.float(), autocast)
    assert "original" not in caplog.text


@pytest.fixture
def in_bfloat16():
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def test_a_model_in_bfloat16(linear, in_bfloat16):
    model, x = made(linear, compute_dtype=torch.bfloat16)
    for block in model.blocks:
        block.router.compute_dtype = torch.bfloat16
    expected = outcome(model, x)
    assert len(hexa_fx.optimize_(model, x, ALWAYS).report.rewritten) == 2
    for found, wanted in zip(outcome(model, x), expected, strict=True):
        assert (found - wanted).float().norm() < 0.02 * wanted.float().norm()


def test_a_compiler_gets_codes_in_one_graph(linear):
    model, x = made(linear, compress_statistics=True)
    expected = outcome(model, x)
    hexa_fx.optimize_(model, x, ALWAYS)
    code = []
    torch.compiler.reset()
    compiled = torch.compile(model, backend=lambda graph, _: code.append(graph.code) or graph.forward, fullgraph=True)
    torch.testing.assert_close(outcome(compiled, x), expected, rtol=1e-4, atol=1e-5)
    assert [text.count("torch.ops.hexa.moe_ffn_sources") for text in code] == [2]
    assert all(text.count("stack(") <= 2 and "cat(" not in text for text in code), "only routers unpack theirs"
    weight = model.blocks[0].experts[1].up.weight
    with torch.no_grad():
        weight.data.view(torch.uint8).fill_(0x5A)
    torch.testing.assert_close(compiled(x), model(x))
    assert not torch.allclose(compiled(x), expected[0])
    model.blocks[0].experts[1].up.weight = copy.deepcopy(model.blocks[0].experts[2].up.weight)
    torch.testing.assert_close(compiled(x), model(x))
    assert all(text.count("stack(") <= 2 for text in code)
    torch.compiler.reset()
