"""The command line: what it prints, what it writes, and what it says when something is wrong."""

import importlib
import json
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import hexa_fx
from hexa_fx.cli import app
from hexa_fx.cli.prediction import Machine, predict
from hexa_fx.ir import Small

FACTORY = f"{Path(__file__).with_name('models.py')}:factory"
REFUSED, FAILING = (FACTORY.replace(":factory", f":{name}") for name in ("refused", "failing"))


def call(*words: str, code: int = 0) -> str:
    """A command's output, errors included."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == code, done.output
    return done.output


def test_explain():
    text = call("explain", FACTORY, "--arch", "80")
    assert "2 of 2 MoE blocks rewritten" in text
    assert "Block at" in text
    assert "kernels on sm_80" in text
    assert "gemm_sm80" in text


def test_explain_as_json_and_html(tmp_path):
    found = json.loads(CliRunner().invoke(app, ["explain", FACTORY, "--json"]).stdout)
    assert [block["status"] for block in found["blocks"]] == ["rewritten", "rewritten"]
    call("explain", REFUSED, "--html", tmp_path / "report.html")
    assert "left" in call("explain", REFUSED)
    assert "refused" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_graph_writes_page_picture_and_dot(tmp_path):
    html, svg, dot = (tmp_path / f"graph.{kind}" for kind in ("html", "svg", "dot"))
    text = call("graph", FACTORY, "--html", html, "--svg", svg, "--dot", dot, "--stage", "lower", "--arch", "90")
    assert all(str(path) in text for path in (html, svg, dot))
    assert html.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "hexa.reindex" in svg.read_text(encoding="utf-8")
    assert "digraph" in dot.read_text(encoding="utf-8")


def test_graph_prints_a_stage():
    assert "torch.ops.hexa.moe_ffn" in call("graph", FACTORY)
    found = json.loads(call("graph", FACTORY, "--block", "layers.1", "--json"))
    assert found["block"] == "layers.1"
    assert found["stages"][1]["operators"]["hexa.moe_ffn"] == 1


def test_kernels(monkeypatch, tmp_path):
    monkeypatch.setenv("HEXA_FX_CACHE_DIR", str(tmp_path))
    lines = call("kernels", "list", FACTORY, "--arch", "80", "--dtype", "bf16").splitlines()
    assert any("esmm [gemm_sm80 sm_80 bf16" in line for line in lines)
    key = next(line.split()[-1] for line in lines if "h_a" in line)
    assert "__global__" in call("kernels", "show", key[:8], FACTORY, "--arch", "80", "--dtype", "bf16")
    wrong = call("kernels", "show", "nothing", FACTORY, "--arch", "80", "--dtype", "bf16", code=2)
    assert key in wrong
    found = json.loads(call("kernels", "list", FACTORY, "--arch", "90", "--json"))
    assert {kernel["direction"] for kernel in found} == {"forward", "backward"}


def test_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HEXA_FX_CACHE_DIR", str(tmp_path))
    assert "0 kernels, 0.0 MB" in call("cache", "info")
    for name, meta in (("aaaa", json.dumps({"spec": json.dumps({"op": "esmm"}), "target": "sm_80"})), ("bbbb", "{")):
        (tmp_path / "kernels" / name).mkdir(parents=True)
        (tmp_path / "kernels" / name / "meta.json").write_text(meta)
    found = json.loads(call("cache", "info", "--json"))
    assert [(entry["key"], entry["op"].split(";")[0]) for entry in found["kernels"]] == [
        ("aaaa", "esmm"),
        ("bbbb", "damaged"),
    ]
    assert "removed 2 kernels" in call("cache", "clear")
    assert json.loads(call("cache", "clear", "--json"))["removed"] == 0


def test_env(monkeypatch):
    monkeypatch.setenv("HEXA_FX_BUILD_JOBS", "2")
    text = call("env")
    assert "torch " in text
    assert "compiler: " in text
    assert "HEXA_FX_BUILD_JOBS=2" in text
    assert json.loads(call("env", "--json"))["packages"]["torch"]


def test_bench():
    found = json.loads(call("bench", FACTORY, "--repeat", "1", "--json"))
    both = ["forward", "forward and backward"]
    assert [row["what"] for row in found["rows"]] == [*both, *(f"layers.0: {what}" for what in both)]
    assert all(row["original_ms"] > 0 and row["rewritten_ms"] > 0 for row in found["rows"])


def test_bench_says_when_the_same_code_is_timed_twice(monkeypatch):
    rewrite = importlib.import_module("hexa_fx.passes.rewrite")
    monkeypatch.setattr(rewrite, "own_code_limit", lambda *_: Small(8000, 8000))
    text = call("bench", FACTORY, "--repeat", "1")
    assert "blocks run their own code on this example, as a CPU is faster so in calls of up to 1000 tokens" in text
    assert text.count("ms, the same code") == 4
    assert "times as fast" not in text


def test_bench_of_published_widths(monkeypatch):
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_local_experts": 4, "vocab_size": 99}
    small = ("granitemoe", {**sizes, "num_attention_heads": 2, "num_key_value_heads": 2})
    monkeypatch.setitem(importlib.import_module("hexa_fx.integrations.published").PUBLISHED, "Small-1B", small)
    text = call("bench", "--like", "small-1b", "--layers", "1", "--tokens", "48", "--repeat", "1")
    assert "1 of 1 MoE blocks rewritten" in text
    assert "model.layers.0.block_sparse_moe.experts: forward and backward" in text


def test_known_models_have_the_layers_that_are_asked_for():
    pytest.importorskip("transformers")
    from hexa_fx.integrations.published import PUBLISHED, bytes_of

    for name in PUBLISHED:
        one, two = (bytes_of(name, layers, torch.bfloat16) for layers in (1, 2))
        assert one < two < 2 * one + 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--like", "Qwen3-235B-A22B", "--layers", "90"),
            r"takes about \S+ GiB on cpu .* are free; give fewer --layers",
        ),
        (("--like", "qwen3-30b"), "Did you mean Qwen3-30B-A3B"),
        ((), "give either a TARGET or --like NAME"),
        (("--like", "OLMoE-1B-7B", "--dtype", "f8"), "--dtype f8: expected bf16 or f32"),
        (("--like", "OLMoE-1B-7B", "--layers", "0"), "--layers 0: expected 1 to 1000"),
        (("--like", "OLMoE-1B-7B", "--tokens", "9000000"), r"--tokens 9000000 takes about \d+\.\d GiB on cpu"),
        ((FACTORY, "--tokens", "7"), "--tokens goes with --like NAME; a TARGET brings its own"),
        ((FACTORY, "--device", "tpu"), "--device tpu: expected cpu, cuda or cuda:N"),
        ((FACTORY, "--device", "cuda:99"), "--device cuda:99: torch sees no such GPU here"),
    ],
)
def test_bench_refuses_politely(options, said):
    assert re.search(said, call("bench", *options, code=2))


def test_a_folder_is_no_page(tmp_path):
    assert "cannot be written; give a file" in call("explain", FACTORY, "--html", tmp_path, code=2)


# -- plan --------------------------------------------------------------------------------------------------------------


def test_plan_of_a_factory():
    text = call("plan", FACTORY, "--seconds", "1,2", "--strategy", "model")
    assert "layers.0 and 1 more: E=4 k=2 D=8 I=12" in text
    assert "h_i  [6, 6]" in text or "h_i  [12, 0]" in text or "h_i  [8, 4]" in text


def test_plan_of_a_model_type_says_whose_sizes_these_are_and_what_every_device_keeps():
    text = call("plan", "qwen3_moe", "--capacities", "1,3", "--strategy", "data")
    assert "transformers' default configuration of qwen3_moe: layers 24" in text
    weights, gathered = (line.split()[-3:-1] for line in text.splitlines() if "weights" in line)
    assert sum(map(float, weights)) == pytest.approx(24 * 128 * 3 * 2048 * 768 * 2 / 2**30, abs=0.01)
    assert gathered == ["2.25", "2.25"]  # two slots of a layer of 1.125 GiB


def test_plan_of_a_configuration_has_its_full_widths(tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.AutoConfig.for_model("mixtral", num_hidden_layers=3).save_pretrained(tmp_path)
    found = json.loads(call("plan", tmp_path, "--capacities", "1,1,2,4", "--json"))
    layers = found["plan"]["layers"]
    assert len(layers) == len(found["predicted"]) == 3
    shape = layers[0]["shape"]
    assert [shape[n] for n in ("num_experts", "top_k", "hidden_size", "intermediate_size")] == [8, 2, 4096, 14336]
    assert sum(found["plan"]["batch"]) == 64


def test_a_plan_says_what_does_not_fit_and_who_has_nothing():
    text = call("plan", "mixtral", "--seconds", "1,1,100", "--memory", "60")
    assert "seconds of the same task t_i  [1.0, 1.0, 100.0] (more is slower)" in text
    assert (
        "[32, 32, 0] (none for device 2, too slow for one of these samples: leave it out, or give a larger --batch)"
        in text
    )
    assert "does not fit on device 0, 1, 2: more than --memory 60 GiB; spread it over more devices" in text
    assert "does not fit" not in call("plan", "mixtral", "--seconds", "1,1,100")


def test_predicted_times_follow_capacities_tokens_and_links():
    slow, fast = Machine(1e9, 1e12), Machine(1e11, 1e12)
    options = {"batch": 6, "slots": 2}
    _, few = predict(FACTORY, (1.0, 1.0), "auto", tokens=16, machine=slow, **options)
    _, many = predict(FACTORY, (1.0, 1.0), "auto", tokens=1600, machine=slow, **options)
    assert (few[0].mode, many[0].mode) == ("model_centric", "data_centric")
    assert many[0].costs["model_centric"].bytes == pytest.approx(100 * few[0].costs["model_centric"].bytes)
    assert many[0].costs["data_centric"].bytes == few[0].costs["data_centric"].bytes
    _, quick = predict(FACTORY, (1.0, 1.0), "auto", tokens=1600, machine=fast, **options)
    assert quick[0].costs["model_centric"].exchange < many[0].costs["model_centric"].exchange / 50
    plan, uneven = predict(FACTORY, (1.0, 2.0), "data", tokens=1600, machine=slow, **options)
    assert plan.batch == (4, 2)
    forward = 2 * 1600 * 2 * 8 * 12 * 2 / 1e12
    assert uneven[0].costs["data_centric"].experts == pytest.approx(3 * forward * 4 / 6)


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("explain", "nosuch.module:thing"), "No module named 'nosuch'; expected MODULE:FACTORY"),
        (("explain", "nosuch.py:thing"), "there is no file nosuch.py; expected MODULE:FACTORY or FILE.py:FACTORY"),
        (("explain", FACTORY.replace(":factory", ":nothing")), "has no attribute 'nothing'"),
        (("explain", FACTORY.replace(":factory", ":not_a_pair")), "returned a Model; expected (model, example_inputs)"),
        (("explain", FAILING), "mat1 and mat2 shapes cannot be multiplied"),
        (("explain", "/no/such/folder"), "downloads nothing: give a folder that holds the model's config.json"),
        (("explain", "here/good.py"), "is a file: name a function of it that returns (model, example_inputs), here/"),
        (("explain", "never.made:thing", "--arch", "75"), "compute capability 75; give one of 80, 86, 89, 90"),
        (("explain", "never.made:thing", "--html", "/nowhere/a.html"), "--html /nowhere/a.html: cannot be written"),
        (("graph", "never.made:thing", "--svg", "/nowhere/a.svg"), "--svg /nowhere/a.svg: cannot be written"),
        (("graph", REFUSED), "was rewritten, so there is nothing to draw; `hexa-fx explain"),
        (("graph", FACTORY, "--block", "layer.0"), "no rewritten block at 'layer.0'; there are 'layers.0', 'layers.1'"),
        (("graph", FACTORY, "--stage", "lowered", "--svg", "/dev/null"), "has no stage 'lowered'; it has capture, re"),
        (("kernels", "list", FACTORY, "--arch", "75"), "compute capability 75; give one of 80, 86, 89, 90"),
        (("kernels", "list", FACTORY, "--dtype", "int8"), "--dtype 'int8': expected one of bf16, f16, f32, f64"),
        (("kernels", "list", FACTORY, "--tokens", "0"), "--tokens 0: expected 1 to 16777216"),
        (("kernels", "list", REFUSED), "runs as hexa::moe_ffn; `hexa-fx explain"),
        (("plan", FACTORY, "--seconds", "1;2"), "expected numbers separated by commas, e.g. 1,1,2"),
        (("plan", FACTORY, "--seconds", "1"), "at least two, e.g. 1,2"),
        (("plan", FACTORY, "--seconds", "1,0"), "--seconds '1,0': expected seconds above 0"),
        (("plan", FACTORY, "--batch", "0"), "--batch 0: expected 1 to 16384 samples"),
        (("plan", FACTORY, "--tokens", "0"), "--tokens 0: expected 1 to 2147483647"),
        (("plan", FACTORY, "--tokens", "3", "--batch", "64"), "--batch 64: expected 1 to 3 samples"),
        (("plan", FACTORY, "--bandwidth", "300e9"), "--bandwidth 3e+11: expected 0.001 to 100000 GB/s"),
        (("plan", FACTORY, "--seconds", "1,1e30"), "1e+30 is over 1000 times 1; give all in one unit"),
        (("plan", FACTORY, "--seconds", "nan,1"), "--seconds 'nan,1': expected seconds above 0"),
        (("plan", FACTORY, "--gpus", "4"), "--gpus goes with --hosts N; give both"),
        (("plan", FACTORY, "--hosts", "2", "--strategy", "data"), "--strategy is for a plan without --hosts"),
        (("plan", FACTORY, "--hosts", "9" * 20), "expected 1 to 65536"),
        (("plan", FACTORY, "--hosts", "2", "--gpus", "9" * 20), "expected 1 to 1024"),
        (("plan", "qwen3-30b-a3b"), "is a model of the type qwen3_moe: name that, or a folder"),
        (("explain", ":thing"), "':thing' names no function of a file or module; expected MODULE:FACTORY"),
        (("explain", FACTORY, "--html", f"{__file__}/a"), "cannot be written; give a file in a folder that exists"),
        (("kernels", "list", FACTORY, "--tokens", "9" * 20), "expected 1 to 16777216"),
        (("kernels", "pack", "--arch", "90", "--out", "/proc/here"), "--out /proc/here: cannot be written"),
        (("plan", FACTORY, "--slots", "0"), "--slots 0: expected 1 or 2"),
        (("plan", FACTORY, "--hosts", "0"), "--hosts 0: expected 1 to 65536"),
        (("plan", FACTORY, "--hosts", "2", "--memory", "-1"), "--memory -1: expected 0.001 to 100000 GiB"),
        (("gallery", "--out", "/proc/here"), "--out /proc/here: cannot be written"),
        (("plan", FACTORY, "--bandwidth", "-1"), "--bandwidth -1: expected 0.001 to 100000 GB/s"),
        (("plan", FACTORY, "--tflops", "nan"), "--tflops nan: expected 0.001 to 1e+06 TFLOP/s"),
        (("plan", FACTORY, "--strategy", "fast"), "--strategy 'fast': expected auto, data or model"),
        (("plan", REFUSED), "can be partitioned; `hexa-fx explain"),
        (("bench", FACTORY, "--repeat", "0"), "--repeat 0: expected 1 to 10000"),
    ],
)
def test_errors_say_what_to_do(words, said):
    text = call(*words, code=2)
    assert said in text
    assert text.startswith("hexa-fx: ")
    assert text.count("hexa-fx: ") == 1
    assert "Traceback" not in text


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_is_no_error():
    words = f"{sys.executable} -m hexa_fx env"
    done = subprocess.run(f"{words} | true", shell=True, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""


def test_version():
    assert call("--version") == f"hexa-fx {hexa_fx.__version__}\n"


def test_errors_as_json():
    assert "no rewritten block" in json.loads(call("graph", FACTORY, "--block", "layer.0", "--json", code=2))["error"]
    assert "expected MODULE:FACTORY" in json.loads(call("explain", "nosuch:thing", "--json", code=2))["error"]


def test_the_models_own_error_names_the_users_line():
    text = call("explain", FAILING, code=2)
    assert "models.py:" in text


FACTORY_FILE = """
import parts_of_a_model
from tests.inspect import models

def whole():
    return models.make(), models.INPUT

def with_width(width):
    return models.make(), models.INPUT

made = models.INPUT
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("with_width", ":with_width' is called without arguments; give them defaults"),
        ("made", ":made' is of type Tensor; expected a function that returns (model, example_inputs)"),
    ],
)
def test_what_is_no_factory_is_named(name, said, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "parts_of_a_model.py").touch()
    (tmp_path / "mine.py").write_text(FACTORY_FILE)
    assert said in call("explain", f"{tmp_path}/mine.py:{name}", code=2)


def test_a_file_that_is_called_as_a_module_that_others_use(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "types.py").write_text("from tests.inspect.models import factory")
    assert "rewritten" in call("explain", f"{tmp_path}/types.py:factory")
    assert sys.modules["types"] is types


BROKEN = {
    "parses": (
        "import argparse; argparse.ArgumentParser().parse_args(['--nothing'])",
        "ended the program (exit status 2)",
    ),
    "leaves": ("def f():\n    raise SystemExit(3)", "ended the program (exit status 3)"),
    "imports": ("\nimport not_there_at_all", "No module named 'not_there_at_all', raised at"),
    "lacks": ("import os\n\nos.not_there", "has no attribute 'not_there', raised at"),
    "writes": ("def f(:\n    pass", "SyntaxError: invalid syntax"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_script_is_named_with_its_line(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / f"that_{kind}.py").write_text(BROKEN[kind][0])
    text = call("explain", f"{tmp_path}/that_{kind}.py:f", code=2)
    assert BROKEN[kind][1] in text
    assert "expected MODULE:FACTORY" not in text
    if "raised" in BROKEN[kind][1] or kind == "writes":
        line = BROKEN[kind][0].count("\n") + (kind != "writes")
        assert f"raised at {tmp_path}/that_{kind}.py:{line};" in text


CONFIGURATIONS = {
    "[1]": "has no 'model_type'",
    '{"model_type": 3}': "has no 'model_type'",
    "{bad": "expected JSON",
    '{"model_type": "mixtral", "hidden_size": "big"}': "Field 'hidden_size' expected int, got str",
    '{"model_type": "mixtral", "num_hidden_layers": 1000000}': "num_hidden_layers 1000000; at most 1000 are built here",
    '{"model_type": "mixtral", "num_local_experts": 1000000}': "num_local_experts 1000000; at most 10000 are built here",
}


@pytest.mark.parametrize("text", CONFIGURATIONS)
def test_a_configuration_that_is_none_or_too_large(text, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(text)
    assert CONFIGURATIONS[text] in call("explain", tmp_path, code=2)


def test_bench_times_nothing_that_was_not_rewritten():
    assert "was rewritten: nothing to compare; `hexa-fx explain" in call("bench", REFUSED, code=2)


def test_a_misspelt_model_type_gets_a_hint():
    pytest.importorskip("transformers")
    assert "Did you mean mixtral" in call("explain", "mixtrall", code=2)


def test_a_folder_keeps_layers_and_experts(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model("qwen3_moe", num_hidden_layers=3, num_experts=6, num_experts_per_tok=3)
    config.save_pretrained(tmp_path)
    found = json.loads(call("explain", tmp_path, "--json"))
    assert [(b["num_experts"], b["top_k"], b["hidden_size"]) for b in found["blocks"]] == [(6, 3, 64)] * 3
    (tmp_path / "config.json").write_text('{"model_type": "resnet5000"}')
    assert "resnet5000" in call("explain", tmp_path, code=2)
    (tmp_path / "config.json").write_text("{}")
    assert "has no 'model_type'" in call("explain", tmp_path, code=2)


def test_plan_for_several_hosts() -> None:
    text = call("plan", FACTORY, "--hosts", "2", "--gpus", "2", "--tokens", "4096")
    assert "tokens a step; ms of all layers (2)\n   split over  replicas" in text
    assert 'mesh_dim_names=("data", "hexa")' in text
    found = json.loads(call("plan", FACTORY, "--hosts", "2", "--gpus", "2", "--tokens", "4096", "--json"))
    assert [r["devices"] for r in found["reaches"]] == [1, 2, 4]
    assert found["best"] in (1, 2, 4)
