"""`optimize`, `optimize_`, `explain`: what a user sees, and what happens to bad input."""

import json
import logging
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

import hexa_fx
from hexa_fx.errors import InputError, NothingRewritten, VerificationError
from hexa_fx.ir import FfnSpec
from hexa_fx.passes.verify import VerificationResult
from tests.inspect.models import INPUT, Block, Model


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
