"""`optimize`, `optimize_`, `explain`: what a user sees, what happens to bad input, and what they neither import nor set."""

import copy
import json
import logging
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import hexa_fx
from hexa_fx.errors import InputError, NothingRewritten, VerificationError
from hexa_fx.ir import FfnSpec
from hexa_fx.passes.verify import VerificationResult
from tests.inspect.models import INPUT, Block, Model
from tests.zoo.by_sorting import GatheredEinsum
from tests.zoo.common import Mixture
from tests.zoo.variant import D


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def test_optimize_returns_a_new_model_that_shares_parameters(model):
    opt = hexa_fx.optimize(model, INPUT)
    assert opt is not model
    assert type(opt) is Model
    assert all(a is b for a, b in zip(opt.parameters(), model.parameters()))
    assert "forward" not in model.layers[0].__dict__
    torch.testing.assert_close(opt(INPUT), model(INPUT))


def test_optimize_in_place(model):
    expected = model(INPUT)
    assert hexa_fx.optimize_(model, INPUT) is model
    torch.testing.assert_close(model(INPUT), expected)
    assert len(model.report.rewritten) == 2


def test_explain_changes_nothing(model):
    report = hexa_fx.explain(model, INPUT)
    assert [block.path for block in report.rewritten] == ["layers.0", "layers.1"]
    assert "forward" not in model.layers[0].__dict__


@pytest.mark.parametrize("inputs", [INPUT, (INPUT,), [INPUT], {"x": INPUT}], ids=["tensor", "tuple", "list", "mapping"])
def test_forms_of_example_inputs(model, inputs):
    assert len(hexa_fx.explain(model, inputs).rewritten) == 2


def test_report_says_what_was_found(model):
    report = hexa_fx.optimize(model, INPUT).report
    block = report.blocks[0]
    assert (block.num_experts, block.top_k, block.hidden_size, block.intermediate_size) == (4, 2, 8, 12)
    assert block.weights == "listed"
    assert "relu" in block.expert
    assert block.check.gradient_error < 1e-9
    assert json.loads(report.to_json())["blocks"][0]["path"] == "layers.0"
    assert "2 of 2 MoE blocks rewritten" in str(report)


def test_graphs_show_the_canonical_node_and_the_operators(model):
    graphs = hexa_fx.optimize(model, INPUT).graphs["layers.0"]
    nodes = list(graphs.rewritten.graph.nodes)
    assert sum(isinstance(node.meta.get("hexa"), FfnSpec) for node in nodes) == 1
    forward = [str(node.target) for node in graphs.lowered.forward.graph.nodes]
    assert sum("esmm" in name for name in forward) == 2
    assert any("esfk" in str(node.target) for node in graphs.lowered.backward.graph.nodes)
    assert "moe_ffn" in str(graphs)


def test_rewritten_graph_does_not_grow_with_experts():
    sizes = [len(hexa_fx.optimize(Block(experts=n), INPUT).graphs[""].rewritten.graph.nodes) for n in (4, 16)]
    assert sizes[0] == sizes[1]


def test_model_without_moe_works_and_says_so(caplog):
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    with caplog.at_level(logging.WARNING, logger="hexa_fx"):
        opt = hexa_fx.optimize(plain, INPUT)
    assert "no MoE block was found" in caplog.text
    torch.testing.assert_close(opt(INPUT), plain(INPUT))


def test_strict_raises_when_nothing_is_rewritten():
    with pytest.raises(NothingRewritten, match="no MoE block was found"):
        hexa_fx.optimize(nn.Linear(8, 8), INPUT, hexa_fx.HexaConfig(strict=True))


def test_strict_raises_when_a_block_differs_and_changes_nothing(model, monkeypatch):
    def differs(block, *args):
        return VerificationResult(False, reason="the example: output differs by 0.5")

    monkeypatch.setattr(hexa_fx.passes, "verify_block", differs)
    with pytest.raises(VerificationError, match=r"'layers\.0' .*: the example: output differs by 0\.5"):
        hexa_fx.optimize_(model, INPUT, hexa_fx.HexaConfig(strict=True))
    assert "forward" not in model.layers[0].__dict__
    assert not hexa_fx.explain(model, INPUT).rewritten


def test_already_optimized_is_a_clear_sentence(model):
    opt = hexa_fx.optimize(model, INPUT)
    with pytest.raises(InputError, match="already optimized"):
        hexa_fx.optimize(opt, INPUT)


def test_meta_device_is_a_clear_sentence():
    with torch.device("meta"):
        model = Model()
    with pytest.raises(InputError, match="meta"):
        hexa_fx.optimize(model, INPUT)


def test_verification_can_be_switched_off(model):
    report = hexa_fx.explain(model, INPUT, hexa_fx.HexaConfig(verify=False))
    assert len(report.rewritten) == 2
    assert report.blocks[0].check is None


def test_configuration_from_the_environment():
    config = hexa_fx.HexaConfig.from_environment({"HEXA_FX_VERIFY": "off", "HEXA_FX_PROBE_TOKENS": "64"})
    assert config == hexa_fx.HexaConfig(verify=False, probe_tokens=64)
    with pytest.raises(InputError, match="HEXA_FX_STRICT='perhaps': expected 1/true"):
        hexa_fx.HexaConfig.from_environment({"HEXA_FX_STRICT": "perhaps"})


def test_import_is_light():
    code = "import sys, hexa_fx; assert not {'transformers', 'jinja2', 'hexa_fx.api'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_cannot_be_copied_is_shared():
    class Locked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lock, self.layer = threading.Lock(), nn.Linear(2, 2)

        def forward(self, x):
            return self.layer(x)

    model = Locked()
    opt = hexa_fx.optimize(model, torch.randn(2, 2))
    assert opt is not model
    assert opt.layer is not model.layer
    assert opt.layer.weight is model.layer.weight
    assert opt.lock is model.lock


def test_a_model_that_cannot_be_copied_is_told_to_be_rewritten_in_place():
    model = nn.Linear(2, 2)
    model.state = [threading.Lock()]
    with pytest.raises(InputError, match="optimize_"):
        hexa_fx.optimize(model, torch.randn(2, 2))


def test_an_example_of_equal_tokens_will_do(model):
    equal, x = torch.randn(1, 1, 8).expand(2, 16, 8).clone(), torch.randn(2, 16, 8)
    opt = hexa_fx.optimize(model, equal)
    assert [b.path for b in opt.report.rewritten] == [b.path for b in hexa_fx.explain(model, x).rewritten] != []
    torch.testing.assert_close(opt(x), model(x), rtol=1e-4, atol=1e-5)


def test_the_demonstration_is_large_enough_for_the_operators():
    from hexa_fx import demo

    example, inputs = demo.example()
    for block in hexa_fx.explain(example, inputs).rewritten:
        assert inputs["input_ids"].numel() > max(block.small_tokens)


def test_dynamo_and_dtensor_are_imported_neither_with_the_package_nor_by_optimize() -> None:
    """They take a second each, of every process."""
    assert subprocess.run([sys.executable, "-c", _IMPORTS], check=False).returncode == 0


_IMPORTS = """
import sys, torch, hexa_fx
from hexa_fx.isolation.trial_modes import RaisesOnHost
from benchmarks.real_blocks import ListMixture
hexa_fx.optimize(ListMixture(16, 8, 4, 2), torch.randn(1, 8, 16))
assert sys.modules.keys().isdisjoint({"torch.distributed.tensor", "torch.distributed.fsdp", "networkx"})
from hexa_fx.isolation import size
from hexa_fx.large_blocks import lazy_gradient
for module in (size, lazy_gradient):
    module.LEAST_BYTES = 1
config = hexa_fx.HexaConfig(strict=True, analysis_bytes=1 << 15)
hexa_fx.optimize(ListMixture(16, 8, 4, 2), torch.randn(1, 8, 16), config)
with RaisesOnHost():
    torch.ones(2) + 1
sys.exit("torch._dynamo" in sys.modules)
"""


BLOCKS = [Mixture, GatheredEinsum]


@contextmanager
def put_back(change: Callable[[Any], Any], now: Any, then: Any) -> Iterator[None]:
    change(now)
    try:
        yield
    finally:
        change(then)


@contextmanager
def warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "another default device": lambda: put_back(torch.set_default_device, "meta", None),
    "a device as context": lambda: torch.device("meta"),
    "float64 by default": lambda: put_back(torch.set_default_dtype, torch.float64, torch.float32),
    "bfloat16 by default": lambda: put_back(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "deterministic algorithms": lambda: put_back(torch.use_deterministic_algorithms, True, False),
    "no gradients": torch.no_grad,
    "inference mode": torch.inference_mode,
    "anomalies": torch.autograd.detect_anomaly,
    "lower precision": lambda: put_back(torch.set_float32_matmul_precision, "medium", "highest"),
    "warnings are errors": warnings_are_errors,
}


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", SETTINGS)
def test_rewritten_and_equal(name: str, block: Callable[[], torch.nn.Module]) -> None:
    original = block()
    optimized, x = copy.deepcopy(original), torch.randn(2, 7, D)
    dtype = torch.get_default_dtype()
    with SETTINGS[name]():
        hexa_fx.optimize_(optimized, x, hexa_fx.HexaConfig(own_code_when_small=False))
        assert optimized.report.rewritten, optimized.report
        found = []
        for model in (original, optimized):
            leaf = x.detach().clone().requires_grad_(name != "inference mode")
            y = model(leaf)
            if y.requires_grad:
                y.float().square().sum().backward()
            found.append([y.detach(), leaf.grad, *(p.grad for p in model.parameters())])
    for want, got in zip(*found, strict=True):
        assert (want is None) == (got is None)
        if want is not None:
            assert got.dtype == want.dtype
            if name == "lower precision":  # some CPUs multiply in bfloat16 then, each product in its own order
                assert (got - want).norm() <= 0.02 * want.norm()
            else:
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert torch.get_default_dtype() == dtype
    assert torch.empty(0).device.type == "cpu"
