"""The report says neither more nor less than what is so, every refusal tells what helps, and users' modules stay as they are."""

import ast
import copy
import functools
import gc
import importlib
import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import hexa_fx
from hexa_fx.inspection.advice import DEFAULT, advice
from hexa_fx.inspection.report_page import report_page
from hexa_fx.inspection.text import small_calls
from hexa_fx.ir import Small
from hexa_fx.report import OptimizationReport
from tests.detect.mixture import D, Mixture

QUICK = hexa_fx.HexaConfig(verify=False)


class Dropping(nn.Module):
    """Stacked experts with an alpha dropout between their projections, which only eval mode can do without."""

    def __init__(self, width: int = 8, hidden: int = 12, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.w1, self.w2 = (nn.Parameter(torch.randn(experts, *s)) for s in ((hidden, width), (width, hidden)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number in range(4):
            token, slot = torch.where(chosen == number)
            hidden = nn.functional.alpha_dropout(torch.relu(x[token] @ self.w1[number].T), 0.3, self.training)
            out.index_add_(0, token, hidden @ self.w2[number].T * weights[token, slot, None])
        return out


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ((83, 83), "calls of up to 83 tokens"),
        ((0, 1), "calls of up to 1 token with gradients"),
        ((5, 9), "calls of up to 5 tokens without gradients and up to 9 tokens with gradients"),
    ],
)
def test_which_calls_run_their_own_code(limits: tuple[int, int], said: str) -> None:
    assert small_calls(Small(*limits)) == said


def html(report: OptimizationReport) -> str:
    return re.sub(r"\s+", " ", report_page(report.blocks, report.summary(), "", "test"))


def test_a_block_that_trains_with_its_own_code_saves_nothing_for_backward() -> None:
    """It is reported as left as it is until a call in eval mode; then what ran its own code, and why, is said beside."""
    x = torch.randn(40, 8)
    model = hexa_fx.optimize(Dropping(), x, replace(QUICK, own_code_when_small=False))
    for text in (str(model.report), html(model.report)):
        assert "0 of 1 MoE blocks rewritten" in text
        assert "left as it is" in text
        assert "alpha_dropout is active" in text
        assert "B kept for backward" not in text
    model(x)
    model.eval()(x)
    for text in (str(model.report), html(model.report)):
        assert "1 of 1 MoE blocks rewritten" in text
        assert re.search("is rewritten( to hexa::moe_ffn)?", text)
        assert "calls: 1 rewritten, 1 by its own code (alpha_dropout is active" in text
    assert "(the model itself): ran its own code in some calls: alpha_dropout is active" in str(model.report)


def test_what_a_later_kind_of_call_is_refused_for_leaves_the_report_of_the_first() -> None:
    x = torch.randn(40, 8)
    model = hexa_fx.optimize(Dropping().eval(), x, replace(QUICK, own_code_when_small=False))
    model.train()(x)
    assert model.report.summary().startswith("1 of 1 MoE blocks rewritten")
    assert "ran its own code in some calls: alpha_dropout is active" in str(model.report)


def test_errors_have_labels(optimized) -> None:
    line = next(line for line in str(optimized.report).splitlines() if "loop over experts" in line)
    assert re.search(r"checked in float64 \(\d+ cases.*\), largest relative error forward \S+, gradients \S+$", line)


def test_the_model_itself_has_a_name(models) -> None:
    report = hexa_fx.explain(models.make().layers[0], models.INPUT, QUICK)
    assert "  (the model itself): loop over experts" in str(report)
    assert list(report.table().columns[0].cells) == ["(the model itself)"]
    assert "<BlockReport (the model itself): rewritten, " in repr(report.blocks[0])


def test_small_inputs_are_counted_in_tokens(models, monkeypatch) -> None:
    """The limit that the forward knows is in elements of its first argument, which has 8 for a token."""
    monkeypatch.setattr(importlib.import_module("hexa_fx.passes.rewrite"), "own_code_limit", lambda *_: Small(247, 247))
    model = hexa_fx.optimize(models.make(), models.INPUT, QUICK)
    for text in (str(model.report), html(model.report)):
        assert "on a CPU, calls of up to 30 tokens run its own code" in text
        assert "(if they did not run its own code)" in text


def test_a_report_knows_that_an_expert_was_hooked(models) -> None:
    """Which is said at once, since no analysis helps there; what a call would be analysed anew for is not."""
    model = hexa_fx.optimize(models.make(), models.INPUT, QUICK)
    assert "own code now" not in str(model.report)
    model.layers[0].experts[2].register_forward_hook(lambda *_: None)
    assert "1 of them runs its own code now" in model.report.summary()
    for text in (str(model.report), html(model.report), model.report.to_json()):
        assert "an expert has hooks, which only its own code calls" in text
    assert "layers.0: runs its own code now: an expert has hooks" in str(model.report)
    assert "Remove the hooks: the next call runs rewritten." in str(model.report)
    assert "was rewritten to hexa::moe_ffn" in str(model.report)
    assert "is rewritten to hexa::moe_ffn" in str(model.report)  # layers.1, which was like it
    states = re.findall(r'<section class="(\w+)">\s*<h2><span class="state">(.*?)</span>([\w.]+)', html(model.report))
    assert states == [("own", "runs its own code now", "layers.0"), ("rewritten", "rewritten", "layers.1")]
    alone = pickle.loads(pickle.dumps(model.report))  # no model comes with it
    assert alone.blocks[0].now == ""
    assert copy.deepcopy(model).report.summary().startswith("2 of 2")


def test_a_forward_that_knows_its_arguments_by_other_names_is_measured(models) -> None:
    """As transformers' decorated experts do, those of gpt_oss among them."""

    class Renamed(models.Block):
        @functools.wraps(models.Block.forward)
        def forward(self, *tokens: torch.Tensor) -> torch.Tensor:
            return models.Block.forward(self, *tokens)

    torch.manual_seed(0)
    report = hexa_fx.explain(Renamed(), models.INPUT, QUICK)
    assert re.search(r"\d+.* -> \d+.* kept for backward on cpu", str(report))


def test_what_could_not_be_measured_is_said(models, monkeypatch) -> None:
    monkeypatch.setattr("hexa_fx.inspection.costs._kept", lambda *_: (_ for _ in ()).throw(RuntimeError("not so")))
    report = hexa_fx.explain(models.make(), models.INPUT, QUICK)
    for text in (str(report), html(report)):
        assert "what is kept for backward could not be measured (RuntimeError: not so)" in text


@pytest.fixture
def registered():
    transformers = pytest.importorskip("transformers", minversion="5")
    hexa_fx.patch_transformers()
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(config).eval()


def test_blocks_that_are_on_the_operators_already_are_not_called_refused(registered, caplog) -> None:
    registered.set_experts_implementation("hexa")
    model = hexa_fx.optimize(registered)
    assert model.report.unseen
    model(torch.randint(3, 60, (2, 9)))
    assert model.report.summary() == "1 MoE block already runs on hexa_fx's operators"
    assert "left as it is: its experts run on hexa_fx's operators already" in str(model.report)
    assert "what helps" not in str(model.report)
    assert model.report.refused == ()
    assert "already on hexa_fx's operators" in html(model.report).replace("&#39;", "'")
    assert not caplog.records


def test_an_experts_implementation_that_is_set_later_takes_effect_and_is_counted(registered, caplog) -> None:
    """The new code is analysed when it is called; what is left as it is there is counted."""
    ids = torch.randint(3, 60, (2, 9))
    model = hexa_fx.optimize(registered, ids, replace(QUICK, own_code_when_small=False))
    model.set_experts_implementation("eager")
    torch.testing.assert_close(model(ids).logits, registered(ids).logits)
    (block,) = model.report.blocks
    assert (block.calls.rewritten, block.calls.kinds) == (1, 2)
    assert not caplog.records
    model.set_experts_implementation("hexa")
    for _ in range(2):
        torch.testing.assert_close(model(ids).logits, registered(ids).logits)
    assert not caplog.records, "the operators are what is wanted"
    assert "calls: 1 rewritten, 2 by its own code (its experts run on hexa_fx's operators already)" in str(model.report)


def test_a_report_outlives_its_model(models) -> None:
    report = hexa_fx.optimize(models.make(), models.INPUT, QUICK).report
    gc.collect()
    assert report.blocks[0].forward._module() is None
    assert "2 of 2" in str(report)
    assert "2 of 2" in html(report)


def test_frozen_parameters_keep_nothing_for_their_gradients(models) -> None:
    model = models.make()
    trained = hexa_fx.explain(model, models.INPUT, QUICK).blocks[0].costs
    frozen = hexa_fx.explain(model.requires_grad_(False), models.INPUT, QUICK).blocks[0].costs
    assert frozen.before.saved < trained.before.saved
    assert frozen.after.saved <= trained.after.saved


def test_packed_weights_are_in_every_form_of_the_report() -> None:
    pytest.importorskip("transformers")
    from hexa_fx.integrations.tiny_models import tiny_model

    model = hexa_fx.optimize(*tiny_model("mixtral"), QUICK)
    hexa_fx.quantize_experts_(model, "nf4")
    for text in (str(model.report), html(model.report)):
        assert "weights packed as nf4, 81.0 KiB in place of 576.0" in text
        assert "tokens (before its weights were packed)" in text
        assert "run its own code, which is the quicker" not in text
    assert "nf4" in model.report.to_json()


@pytest.mark.parametrize(
    ("asked", "said"),
    [({"batch_invariant": True}, "same bits in any batch"), ({"compute": "fp8_block"}, "multiplies in FP8")],
)
def test_what_was_asked_of_the_arithmetic_is_reported(models, asked, said) -> None:
    """Such blocks never run their own code, however small their inputs are."""
    config = replace(QUICK, **asked)
    for report in (
        hexa_fx.explain(models.make(), models.INPUT, config),
        hexa_fx.optimize(models.make(), models.INPUT, config).report,
    ):
        for text in (str(report), html(report)):
            assert said in text
            assert "own code" not in text
            assert "(without compute or batch_invariant of HexaConfig)" in text


class Act(nn.Module):
    """Its call stays a call, and its buffer is asked before that."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if self.steps < 5 else x * 3


class Stepping(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.scale = Act()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(self.scale(x) if self.scale.steps < 7 else x)[2]


def test_a_buffer_in_a_module_that_is_called_stays_what_it_is() -> None:
    block, x = Stepping(), torch.randn(12, D)
    saved, buffer = list(block.state_dict()), block.scale.steps
    opt = hexa_fx.optimize(block, x, hexa_fx.HexaConfig(own_code_when_small=False))
    assert opt.report.blocks[0].status == "rewritten"
    rewritten = opt.graphs[""].rewritten.graph
    read, called = ({str(n.target) for n in rewritten.find_nodes(op=op)} for op in ("get_attr", "call_module"))
    assert "scale.steps" in read
    assert "scale" in called
    for model in (block, opt):
        assert model.scale.steps is buffer
        assert list(model.state_dict()) == saved
    for steps in (0, 5, 7):
        buffer.fill_(steps)
        torch.testing.assert_close(opt(x), block(x))


DETECT = Path(__file__).parents[2] / "passes" / "detect"


def sentences() -> list[str]:
    """Every sentence with which detection refuses, with ``{}`` for what it fills in."""
    found = []
    for file in sorted(DETECT.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Refuse" and node.args:
                found.append(_text(node.args[0]))
    return sorted({sentence for sentence in found if sentence})


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values)
    return ""


def test_the_sentences_are_found():
    assert len(sentences()) > 40


def test_nearly_every_refusal_has_advice_of_its_own():
    general = [sentence for sentence in sentences() if advice(sentence) == DEFAULT]
    assert len(general) <= len(sentences()) // 10, general


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        ("mean inside the experts does not keep their rows apart", "over the last dimension only"),
        ("the rewritten block differs from the original: on the way the block rounds to fewer bits", "torch.autocast"),
        ("dropout is active inside the experts, and its random numbers", "behind the weighted sum"),
        ("every token is given to every expert with a weight of its own: a dense (soft) mixture", "Only top-k"),
        (
            "no tensor holds the expert ids of every token; routing must be a fixed number of ids a token",
            "topk or argmax",
        ),
        (
            "the code keeps a result on the module (self.loss), which the rewritten block would not update",
            "Return the value",
        ),
        ("the code reads a tensor that is neither a parameter nor a buffer, and may have", "register_buffer"),
        ("the code changes self.losses in place, which the rewritten block would not; results", "Append to a list"),
        (
            "the code adds to LOSSES before gate uses it too, and the rewritten block would add to it last",
            "a list each",
        ),
        ("on the example every row that the experts are given is zero", "more varied example"),
        ("the code takes a host decision (if, while, assert, item()) on what the experts computed", "torch.where"),
        ("no known activation is what experts compute between their projections (cos)", "silu"),
        ("the expert outputs do not enter the result as a weighted sum for each token; they", "Experts that choose"),
        ("experts use their weights in different ways", "one class"),
        ("the code takes a decision that depends on the data and not on the routing", "torch.where"),
        ("hexa_fx itself failed here with KeyError: 1", "report"),
        ("the rewritten block differs from the original: the example: output", "report"),
        ("could not record 'x': RuntimeError", "outside hexa_fx first"),
        ("something entirely new", "docs/patterns.md"),
    ],
)
def test_advice(reason, says):
    assert says in advice(reason)


def test_a_sentence_that_says_it_itself_is_left_alone():
    assert (
        advice("... is not a parameter nor a buffer, and may have another value next time; register it as a buffer")
        == ""
    )


def test_it_is_part_of_every_form_of_the_report(models, tmp_path):
    report = hexa_fx.explain(*models.refused())
    assert "what helps: Normalise and reduce over the last dimension only" in str(report)
    assert "last dimension" in report.as_dict()["blocks"][0]["advice"]
    assert "what helps" in report.to_html(tmp_path / "report.html").read_text(encoding="utf-8")
