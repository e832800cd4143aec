"""Models with packed experts on a device: as bitsandbytes loads them (a stand-in), and that all of their kernels were requested."""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hexa_fx
from hexa_fx.codegen import KernelSpec
from hexa_fx.cuda import choosing
from hexa_fx.cuda import kernel as cuda_kernel
from hexa_fx.jit import builder
from hexa_fx.packed import packed_weights
from tests.api import test_quantize
from tests.integrations import linear4bit_stand_in as stand_in
from tests.integrations.test_linear4bit import ALWAYS
from tests.integrations.test_linear4bit import D as LISTED
from tests.integrations.test_linear4bit import Model as Lists

TOKENS = (1, 20, 700)


@pytest.fixture(autouse=True)
def in_bfloat16() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def outcome(model: nn.Module, x: Tensor) -> list[Tensor]:
    rows = x.clone().requires_grad_()
    y = model(rows)
    return [y, *torch.autograd.grad(y.float().square().sum(), rows)]


def assert_alike(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one - other).float().norm() < 0.03 * other.float().norm()


@pytest.mark.parametrize("double", [False, True])
def test_lists_of_four_bit_experts(double: bool) -> None:
    with torch.device("cuda"):
        model, x = Lists(stand_in.Linear4bit, compress_statistics=double, compute_dtype=None), torch.randn(300, LISTED)
    expected = outcome(model, x)
    hexa_fx.optimize_(model, x, ALWAYS)
    assert len(model.report.rewritten) == 2
    assert_alike(outcome(model, x), expected)
    codes = packed_weights(model.blocks[0])[0]
    weight = model.blocks[0].experts[1].gate.weight
    assert weight.data_ptr() == codes.packed[1].data_ptr(), "no second copy"
    with torch.no_grad():
        assert_alike([model.eval()(x[:3])], [expected[0][:3]])
    assert_alike([hexa_fx.undo_(model.train())(x)], expected[:1])


@pytest.mark.parametrize("adapted", [False, True])
def test_every_kernel_of_a_packed_model_was_requested(adapted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    requested: set[KernelSpec] = set()
    launched: set[KernelSpec] = set()
    request, load = builder().request, cuda_kernel._load

    def noted_request(specs: Iterable[KernelSpec], *args: Any, **kwargs: Any) -> Any:
        found = list(specs)
        requested.update(found)
        return request(found, *args, **kwargs)

    def noted_load(spec: KernelSpec) -> Any:
        launched.add(spec)
        return load(spec)

    monkeypatch.setattr(builder(), "request", noted_request)
    monkeypatch.setattr(cuda_kernel, "_load", noted_load)
    choosing.forget_choices()
    model: nn.Module = test_quantize.Model().to("cuda", torch.bfloat16)
    x = torch.randn(20, test_quantize.D, device="cuda")
    if adapted:
        peft = pytest.importorskip("peft")
        names = ["blocks.0.first", "blocks.0.second", "blocks.1.first", "blocks.1.second"]
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_parameters=names, init_lora_weights=False))
    hexa_fx.quantize_experts_(hexa_fx.optimize_(model, x, ALWAYS), "nf4")
    launched.clear()  # those of the analysis
    for tokens in TOKENS:
        outcome(model.train(), torch.randn(tokens, test_quantize.D, device="cuda"))
        with torch.no_grad():
            model.eval()(torch.randn(tokens, test_quantize.D, device="cuda"))
    assert {"unpack"} <= {spec.family for spec in launched}
    assert launched <= requested
    choosing.forget_choices()
