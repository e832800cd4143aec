"""`hexa-fx tune`: which layers it runs, and tables that machines share."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hexa_fx.cli import app
from hexa_fx.cli.model_layers import MODELS
from hexa_fx.cli.tune_layers import Sizes, run_layer, sizes_of
from hexa_fx.codegen.tuned import Problem, TunedTable
from hexa_fx.cuda import choosing
from hexa_fx.cuda import product as cuda_product
from hexa_fx.errors import InputError
from hexa_fx.ir import FfnSpec
from hexa_fx.ops import moe_ffn_autograd

CARD = "NVIDIA A Card"
PROBLEM = Problem("gemm_sm80", "esmm", "bf16 tensor", False, 8, 1024, 1024)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEXA_FX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: CARD)
    choosing.forget_choices()


def test_as_many_experts_as_fit_with_as_many_rows_each() -> None:
    whole = sizes_of("kimi-k2", 16384)
    fitting = whole.fitting(60 << 30, torch.bfloat16)
    assert whole.bytes(torch.bfloat16) > 60 << 30 >= fitting.bytes(torch.bfloat16)
    assert fitting.experts == 192
    assert fitting.tokens * fitting.top_k / fitting.experts == whole.tokens * whole.top_k / whole.experts
    assert whole.fitting(1 << 40, torch.bfloat16) == whole
    with pytest.raises(InputError, match="fewer --tokens"):
        whole.fitting(1 << 20, torch.bfloat16)


def test_a_model_that_is_not_known() -> None:
    with pytest.raises(InputError, match=r"did you mean OLMoE or GLM-4.5\? There are Mixtral"):
        sizes_of("OLMo", 16)


@pytest.mark.parametrize("form", sorted({forms[0] for *_, forms in MODELS.values()}, key=str), ids=lambda f: f.glu)
def test_a_layer_of_every_form_runs_forward_and_backward(monkeypatch: pytest.MonkeyPatch, form: FfnSpec) -> None:
    ran, run = [], moe_ffn_autograd.run
    monkeypatch.setattr(moe_ffn_autograd, "run", lambda name, *rest: (ran.append(name), run(name, *rest))[1])
    run_layer(Sizes(5, 4, 2, 16, 8, form), torch.float32, torch.device("cpu"))
    assert ran == ["moe_ffn_forward", "moe_ffn_backward"]


@pytest.mark.usefixtures("card")
def test_a_shared_table_is_taken_over_by_the_same_kind_of_card_only(tmp_path: Path) -> None:
    file = tmp_path / "shared.json"
    file.write_text(TunedTable(CARD).with_entry(PROBLEM, {"bm": 64}, 1.0).to_json())
    said = CliRunner().invoke(app, ["tune", "--add", str(file), "--out", str(tmp_path / "copy.json")])
    assert said.exit_code == 0, said.output
    assert said.output.startswith(f"1 tiles for {CARD} in ")
    assert cuda_product.tuned_tile(PROBLEM, CARD) == {"bm": 64}
    assert (tmp_path / "copy.json").read_text() == file.read_text()
    file.write_text(TunedTable("Another").with_entry(PROBLEM, {"bm": 128}, 1.0).to_json())
    said = CliRunner().invoke(app, ["tune", "--add", str(file)])
    assert said.exit_code == 2
    assert "measured on Another" in said.output
    assert cuda_product.tuned_tile(PROBLEM, CARD) == {"bm": 64}


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["nothing"], "sizes of 'nothing' are not known"),
        (["--tokens", "4,x"], "expected numbers from 1 to"),
        (["--dtype", "f32"], "expected one of bf16, f16"),
        (["--add", "missing.json"], "give a file that `hexa-fx tune --out` wrote"),
        (["--add", __file__], "no table of tiles"),
    ],
)
def test_what_cannot_be_done_is_a_sentence(given: list[str], sentence: str) -> None:
    said = CliRunner().invoke(app, ["tune", *given])
    assert (said.exit_code, sentence in said.output) == (2, True), said.output


def test_without_a_gpu() -> None:
    assert "no GPU is here" in CliRunner().invoke(app, ["tune"]).output or torch.cuda.is_available()
