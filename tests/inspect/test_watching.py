"""Dumps, `hexa_fx.debug`, logs, traces and progress bars."""

import io
import json
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hexa_fx
from hexa_fx import observers, tracing
from hexa_fx import progress as progress_bars
from hexa_fx.errors import InputError
from hexa_fx.ir import FfnSpec
from hexa_fx.ops.program import FfnRequest
from hexa_fx.passes import PASSES
from hexa_fx.passes.lowering.pipelines import CompiledFfn
from hexa_fx.progress import may_draw, progress

ROOT = Path(__file__).parents[2]


def test_dump_directory(models, monkeypatch, tmp_path):
    monkeypatch.setenv("HEXA_FX_DUMP_DIR", str(tmp_path))
    hexa_fx.optimize(*models.factory())
    folder = tmp_path / "000"
    names = sorted(path.name for path in folder.glob("*.txt"))
    assert names[:4] == [
        f"00{i}-layers.0-train-{p}.txt" for i, p in enumerate(("capture", "canonicalize", "detect", "rewrite"))
    ]
    assert [name for name in names if "verify" in name]
    assert [name for name in names if "fuse_activation" in name]
    text = (folder / names[3]).read_text(encoding="utf-8")
    assert text.startswith("# after rewrite, layers.0 (train): 16 operators\n# changed: ")
    assert "torch.ops.hexa.moe_ffn" in text
    assert "# operators: {" in text
    assert "# nodes" in text
    assert json.loads((folder / "report.json").read_text())["blocks"]
    assert (folder / "graphs.html").stat().st_size > 50_000
    assert (folder / "report.html").is_file()
    assert len(list((folder / "kernels").glob("*.cu"))) >= 8
    hexa_fx.explain(*models.factory())
    assert (tmp_path / "001" / "report.txt").is_file()
    assert not (tmp_path / "001" / "graphs.html").exists()


def test_a_refused_model_is_dumped_too(models, monkeypatch, tmp_path):
    monkeypatch.setenv("HEXA_FX_DUMP_DIR", str(tmp_path))
    hexa_fx.optimize(*models.refused())
    detect = next((tmp_path / "000").glob("*train-detect.txt"))
    assert "# says: refused: mean inside the experts" in detect.read_text(encoding="utf-8")


def test_nobody_listens_unless_asked():
    assert tracing.PassTrace({}).listeners == ()


def test_debug_prints_and_keeps(models, capsys):
    with hexa_fx.debug(before=["rewrite"], after=["rewrite", "fuse_activation"]) as seen:
        hexa_fx.optimize(*models.factory())
    out = capsys.readouterr().out
    assert "# before rewrite, layers.0 (train)" in out
    assert "# after rewrite, layers.0 (train)" in out
    names = [(s.when, s.name, s.mode) for s in seen]
    assert names[:2] == [(w, "rewrite", "train") for w in ("before", "after")]  # the mode that the model is in
    assert {s.name for s in seen[2:]} == {"fuse_activation"}
    after = seen[1]
    assert after.graph.counts["hexa.moe_ffn"] == 1
    assert "hexa.moe_ffn +1" in after.difference


def test_debug_of_one_block_quietly(models, capsys):
    model = models.make(models.Block(), models.Block(experts=5))
    with hexa_fx.debug(after="*", block="layers.1", quiet=True) as seen:
        hexa_fx.explain(model, models.INPUT)
    assert capsys.readouterr().out == ""
    assert {s.path for s in seen} == {"layers.1"}
    assert {"capture", "detect", "rewrite", "verify"} <= {s.name for s in seen}


def test_debug_of_no_such_pass():
    with (
        pytest.raises(InputError, match="no pass is called 'fuse'; there are capture, canonicalize"),
        hexa_fx.debug(["fuse"]),
    ):
        pass


def test_debug_ends_with_its_block(models):
    with hexa_fx.debug(after=["rewrite"], quiet=True) as seen:
        pass
    hexa_fx.explain(*models.factory())
    assert seen == []
    assert observers._listeners.get() == ()


def test_graphs_in_the_log(models, caplog):
    with caplog.at_level(logging.DEBUG, logger="hexa_fx"):
        hexa_fx.optimize(*models.factory())
    text = "\n".join(record.getMessage() for record in caplog.records if record.name == "hexa_fx.passes.graphs")
    assert "# after rewrite, layers.0 (train)" in text


def test_a_level_that_is_none_is_named():
    with pytest.raises(InputError, match="HEXA_FX_LOGS='loud': expected one of debug, info, warning"):
        tracing.PassTrace({"HEXA_FX_LOGS": "loud"})


def test_torch_logs_and_traces(tmp_path):
    code = (
        "import importlib.util, hexa_fx\n"
        f"spec = importlib.util.spec_from_file_location('models', {str(Path(__file__).with_name('models.py'))!r})\n"
        "models = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(models)\n"
        "hexa_fx.explain(*models.factory(), hexa_fx.HexaConfig(verify=False))\n"
    )
    environment = {**os.environ, "TORCH_LOGS": "+hexa_fx", "TORCH_TRACE": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "# after rewrite, layers.0 (train)" in done.stderr
    (trace,) = tmp_path.glob("*.log")
    text = trace.read_text()
    assert '"name": "hexa_fx_layers_0_train_rewrite"' in text
    assert "torch.ops.hexa.moe_ffn" in text


def test_the_table_of_passes_is_the_passes_there_are(models):
    """Every pass that reports is in the table, and every pass of the table reports, apart from those of several devices."""
    seen: list[str] = []
    with observers.listening(lambda event: seen.append(event.name)):
        hexa_fx.optimize(*models.factory())
        for device in ("cpu", "cuda"):
            _ = CompiledFfn(FfnRequest(FfnSpec("silu"), frozenset({"x", "w1", "w2"})), device).forward
    assert set(seen) == set(PASSES) - {"partition", "overlap"}


def test_variables_are_documented():
    rows = set(
        re.findall(r"(?m)^\| `(HEXA_FX_\w+)` \|", (ROOT / "docs" / "environment.md").read_text(encoding="utf-8"))
    )
    assert {"HEXA_FX_DUMP_DIR", "HEXA_FX_LOGS", "HEXA_FX_PROGRESS"} <= rows


# -- progress ----------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(stream: io.StringIO, total: int = 3) -> str:
    with progress("building kernels", total, stream) as bar:
        for number in range(total):
            bar.say(f"kernel {number}")
            seen = len(stream.getvalue())
            while bar.shown and not progress_bars._PATIENCE and f"kernel {number}" not in stream.getvalue()[seen:]:
                time.sleep(0.01)
            bar.advance()
    return stream.getvalue()


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(progress_bars, "_PATIENCE", 0.0)
    monkeypatch.setattr(progress_bars, "_INTERVAL", 0.02)


@pytest.fixture(autouse=True)
def rank_0(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "HEXA_FX_PROGRESS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("at_once")
def test_a_bar_on_a_terminal():
    text = run(Terminal(), 1)
    assert "building kernels" in text
    assert "kernel 0" in text


Notebook = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("total", [1, 3])
def test_a_bar_in_a_notebook_has_no_codes_of_terminals(total):
    text = run(Notebook(), total)
    assert f"building kernels .............................. 0/{total} 0 s kernel 0" in text
    assert total == 1 or "building kernels ##########.................... 1/3" in text
    assert "\033" not in text
    assert text.endswith(f"\r{' ' * 160}\r")


@pytest.mark.usefixtures("at_once")
def test_what_is_no_terminal_gets_lines_in_its_log(caplog):
    stream = io.StringIO()
    with caplog.at_level(logging.INFO, "hexa_fx"), progress("building kernels", 1, stream) as bar:
        bar.say("kernel 0")
        while not caplog.messages:
            time.sleep(0.01)
    assert caplog.messages[0].startswith("building kernels .............................. 0/1 0 s")
    assert stream.getvalue() == ""
    with progress("building kernels", 1, stream) as quiet:
        assert not quiet.shown


@pytest.mark.usefixtures("at_once")
def test_a_bar_names_the_block_the_pass_and_the_kernels_left(models, monkeypatch):
    said: list[str] = []
    say = progress_bars.Bar.say
    monkeypatch.setattr(progress_bars.Bar, "say", lambda bar, doing: (say(bar, doing), said.append(bar.doing)))
    monkeypatch.setattr(progress_bars, "_remarks", [lambda: "2 kernels left"])
    monkeypatch.setattr(sys, "stderr", Terminal())
    report = hexa_fx.explain(*models.factory())
    assert len(report.rewritten) == 2, [block.reason for block in report.blocks]
    assert said[0] == "the model runs on the example inputs; 2 kernels left"
    for name in ("capture", "canonicalize", "detect", "rewrite", "verify"):
        assert f"layers.0: {name} (train); 2 kernels left" in said
    hexa_fx.explain(models.make().layers[0], models.INPUT)
    assert "the model: verify (train); 2 kernels left" in said


def test_kernels_that_build_are_remarked(monkeypatch):
    from hexa_fx.jit import background

    builders = [background.Builder(background.JitSettings.from_env()) for _ in range(2)]
    monkeypatch.setattr(background, "_builders", dict(enumerate(builders)))
    counts = [0, 0]
    for index, builder in enumerate(builders):
        monkeypatch.setattr(builder, "left", lambda index=index: counts[index])
    assert background._kernels_left() == ""
    counts[0] = 1
    assert background._kernels_left() == "1 kernel left"
    counts[1] = 2
    assert background._kernels_left() == "3 kernels left"
    assert background._kernels_left in progress_bars._remarks


NO_BAR = {
    "what is over before a bar is drawn": (Terminal, 3, "", ""),
    "no terminal": (io.StringIO, 3, "", ""),
    "nothing": (Terminal, 0, "", ""),
    **{name: (Terminal, 3, name, "3") for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID")},
    "HEXA_FX_PROGRESS": (Terminal, 3, "HEXA_FX_PROGRESS", "0"),
}


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("case", NO_BAR)
def test_no_bar_for(case, monkeypatch):
    stream, total, name, value = NO_BAR[case]
    assert may_draw()
    if name:
        monkeypatch.setenv(name, value)
    assert may_draw() != bool(name)
    if "over" in case:
        monkeypatch.setattr(progress_bars, "_PATIENCE", 1e9)
    assert run(stream(), total) == ""


@pytest.mark.usefixtures("at_once")
def test_a_bar_is_taken_away_when_something_fails():
    stream = Notebook()

    def fail() -> None:
        while not stream.getvalue():
            time.sleep(0.01)
        raise ValueError

    with pytest.raises(ValueError), progress("x", 2, stream):
        fail()
    assert stream.getvalue().endswith(f"\r{' ' * 160}\r")
