"""The scripts behind docs/swin_moe.md: each experiment, tiny, over Gloo, and what is made of records."""

import argparse
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.swin_moe import __main__ as main
from benchmarks.swin_moe import brief, claims, docs, plot
from benchmarks.swin_moe.__main__ import RESULTS, launch
from benchmarks.swin_moe.bench import Bench
from benchmarks.swin_moe.collect import collect, merged
from benchmarks.swin_moe.contestants import Contestant, Setting
from benchmarks.swin_moe.journal import Journal
from benchmarks.swin_moe.model import swin_config

CPU = torch.device("cpu")


def options(folder, **given):
    usual = {"device": "cpu", "timeout": 60.0, "tiny": True, "end": float("inf"), "tag": "", "world": 2, "top_k": []}
    return argparse.Namespace(**usual | {"out": folder, "variant": None, "case_seconds": 300.0} | given)


def write(folder, name, *records, command=""):
    """The records of an experiment."""
    document = {"environment": {"command": command}, "records": list(records)}
    (folder / f"swin_{name}.json").write_text(json.dumps(document))


def failing(*_):
    raise RuntimeError("CUDA error")


def test_every_experiment_runs_tiny(tmp_path):
    launch(("smoke",), options(tmp_path))
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    names = ("ablation_latency", "ablation_memory", "convergence", "crossover", "heterogeneity", "latency", "memory")
    assert sorted(found) == [f"swin_{name}" for name in names]
    exact = [r for name in ("memory", "ablation_memory", "ablation_latency") for r in found[f"swin_{name}"]["records"]]
    losses = {f"{r['name']} {r.get('variant')}": r["loss"] for r in exact if "loss" in r and r["name"] != "padded"}
    assert len(losses) == 7
    # data- and model-centric, expert-parallel, anything switched off: one model, bfloat16
    for name, loss in losses.items():
        assert loss == pytest.approx(losses["grouped None"], rel=2e-3), name
    for name, document in found.items():
        assert {"command", "torch", "device", "ranks"} <= set(document["environment"])
        for record in document["records"]:
            assert "error" not in record, (name, record)
            if record["name"] == "tutel" and "skipped" in record:
                assert record["skipped"].startswith("not installed")
                continue
            if name == "swin_convergence":
                assert len(record["losses"]) == 6
                continue
            runs = record.get("runs", [record])
            assert all(run["step_s"] > 0 for run in runs if record["name"] != "capacity"), (name, record)


def test_pictures_and_tables_come_out_of_any_results(tmp_path):
    """Records of a run that was cut short: an error, a library that is not there, no heterogeneity at all."""
    pytest.importorskip("matplotlib")
    row = {"scale": "base", "experts": 8, "top_k": 1, "batch": 40}
    records = [
        {"name": "data", **row, "step_s": 0.1, "peak_gib": 8.0},
        {"name": "padded", **row, "step_s": 0.2, "peak_gib": 10.0},
        {"name": "grouped", **row, "error": "RuntimeError: boom"},
        {"name": "tutel", **row, "skipped": "not installed (tutel: ...)"},
        {"name": "none", **row, "step_s": 0.1, "peak_gib": 3.0, "left_gib": 0.001},
        {"name": "loop", **row, "skipped": "out of time"},
    ]
    for experiment in ("memory", "latency"):
        write(tmp_path, experiment, *records)
    text = docs.memory(tmp_path)
    assert "| Tutel |" not in text
    assert "| failed |" in text
    assert "| data below padded | 20 % (29 %) |" in docs.savings(tmp_path)
    assert "| 200.0 (2.00) |" in docs.latency(tmp_path)
    page = "".join(f"<!-- {name} -->\n<!-- /{name} -->\n" for name in docs.SECTIONS)
    filled = docs.fill(page, tmp_path)
    assert docs.fill(filled, tmp_path) == filled
    plot.main(tmp_path, tmp_path / "figures")
    drawn = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert drawn == ["swin_latency.png", "swin_latency.svg", "swin_memory.png", "swin_memory.svg"]


def test_what_was_not_run_is_said(tmp_path):
    """What the records give is in the page, which `test_the_page_holds_the_tables_of_the_recorded_results` compares."""
    assert all(say(tmp_path) == ("not run", "") for say in claims.CLAIMS.values())
    assert brief.brief(tmp_path) == brief.floor(tmp_path) == "not run"
    peak = {"data": (7.0, 8.0), "padded": (9.0, 10.0), "grouped": (8.0, 8.5)}
    cases = [
        {"name": name, "scale": "base", "top_k": k, "peak_gib": gib, "before_gib": 0.25}
        for name, values in peak.items()
        for k, gib in zip((1, 8), values)
    ]
    write(tmp_path, "memory", *cases)
    reached, said = claims.memory(tmp_path)
    assert (reached, said.endswith("by 6 % at k = 8, 6 % at k = 8, not everywhere by 10 %")) == ("in part", True)
    assert claims.growth(tmp_path) == ("**yes**", "Base data-centric +1.00 GiB (paper +1.5 GB)")
    variants = {"data": 10.0, "data, no shared cache": 9.0, "data, no overlap": 10.1, "data, no fused kernel": 10.2}
    write(tmp_path, "ablation_memory", *({"variant": name, "peak_gib": gib} for name, gib in variants.items()))
    assert claims.ablation(tmp_path)[1].startswith(
        "1 of 3 as in the paper; the other way: data, no shared cache (memory -"
    )
    row = {"scale": "base", "top_k": 4}
    write(tmp_path, "latency", {"name": "data", **row, "step_s": 0.1}, {"name": "padded", **row, "step_s": 0.16})
    assert claims.latency(tmp_path) == ("**yes**", "padded capacity 1.25 (Tutel's formulation) 1.60 times ours")
    curve = [{"share": share, "step_s": step} for share, step in ((0.3, 3.0), (0.5, 2.0), (0.6, 1.0))]
    unequal = {"name": "model", "case": 0, "multiprocessors": [72, 132], "predicted_share": 0.44, "runs": curve}
    write(tmp_path, "heterogeneity", unequal)
    lost = "model-centric at 72 : 132, where the predicted share costs 100.0 % more than the fastest"
    assert claims.heterogeneity(tmp_path) == ("**no**", f"0 of 1 curves; not {lost}")
    losses = {"eager": 1.0, "hexa_fx": 1.01, "grouped_mm": 1.02, "eager, float32": 1.0, "hexa_fx, float32": 1.5}
    write(tmp_path, "convergence", *({"name": name, "losses": [loss] * 5} for name, loss in losses.items()))
    assert claims.convergence(tmp_path)[0] == "in part"
    assert claims.claims(tmp_path).count("\n") == 7


def test_a_run_goes_on_after_ranks_that_died(tmp_path, monkeypatch):
    """Sets of ranks that die in a case, die between cases, hang, and end well."""
    given = options(tmp_path, tag="_t")
    (tmp_path / "swin_memory_t.json").write_text("{}")  # of an earlier run
    ran = []

    def dies(world, names, options, journal):
        bench = Bench(0, 1, CPU, tmp_path, tag="_t", journal=journal)
        for k in range(4):

            def run(k=k):
                ran.append(k)
                return {"step_s": 1.0} if k in (0, 3) else failing()

            try:
                bench.case("memory", {"name": "data", "top_k": k}, run)
            except RuntimeError as error:
                return str(error)
        return None

    monkeypatch.setattr(main, "one_set", dies)
    main.launch(("memory",), given)
    records = json.loads((tmp_path / "swin_memory_t.json").read_text())["records"]
    assert ran == [0, 1, 2]  # nothing runs twice, and a contestant that failed twice is left out
    assert [r.get("error") for r in records] == [None, "CUDA error", "CUDA error", None]
    assert "failed 2 times" in records[3]["skipped"]
    started = []
    monkeypatch.setattr(main, "one_set", lambda *_: started.append(1) or "no GPU")
    main.launch(("memory",), given)
    assert len(started) == 2  # dying before the first case will not change by trying again and again


def test_a_run_of_some_routings_only(tmp_path):
    bench = Bench(0, 1, CPU, tmp_path, only_top_k=frozenset({5, 7}))
    for k in range(4, 8):
        bench.case("memory", {"name": "data", "top_k": k}, lambda: {"peak_gib": 1.0})
    assert [record["top_k"] for record in bench.records["memory"]] == [5, 7]


def test_of_a_trace_the_error_is_told():
    trace = "-- Process 1 terminated\nTraceback\n  File x\ntorch.AcceleratorError: CUDA error: boom\nCompile with DSA\n"
    assert main.said(trace) == "torch.AcceleratorError: CUDA error: boom"
    assert main.said("nothing\nknown\n") == "known"


def test_ranks_are_watched(tmp_path):
    """Real ranks: there is no variant 99, so they end well; variant 0 trains while an old case is said to be under way."""
    given = options(tmp_path, end=0.0, world=1, variant=99, case_seconds=60.0)
    journal = Journal(tmp_path, "", ("convergence",))
    journal.clear()
    assert main.one_set(1, ("convergence",), given, journal) is None  # no variants: nothing to do
    journal.begin("convergence", {"name": "eager"})
    stale = {**json.loads(journal.running.read_text()), "since": 0}
    journal.running.write_text(json.dumps(stale))
    given.variant = 0
    assert main.one_set(1, ("convergence",), given, journal) == "no end after 60 s"
    assert journal.record_failure("hung")
    assert not journal.record_failure("nothing is under way")
    assert journal.records()["convergence"] == [{"name": "eager", "error": "hung", "fatal": True}]


def test_results_are_taken_over_case_by_case(tmp_path):
    """What was measured again replaces its row, what was not, or failed this time, stays with the command of its own run."""
    work, results = tmp_path / "work", tmp_path / "results"
    work.mkdir(), results.mkdir()

    rows = [{"name": "data", "scale": "base", "top_k": k, "step_s": 1.0} for k in (1, 2, 4)]
    absent = {"name": "tutel", "scale": "base", "top_k": 1, "skipped": "x"}
    write(results, "memory_base", *rows, absent, command="first")
    again, fails = {**rows[0], "step_s": 2.0}, {"name": "data", "scale": "base", "top_k": 4, "error": "boom"}
    late, more = {**fails, "top_k": 2, "skipped": "out of time"}, {**rows[0], "top_k": 5}
    del late["error"]
    installed = {"name": "tutel", "scale": "base", "top_k": 1, "step_s": 3.0}
    write(work, "memory_base", again, fails, late, more, installed, command="second")
    write(work, "convergence_v0", {"name": "eager", "top_k": 2, "losses": [1.0]}, command="v0")
    write(work, "convergence_v1", {"name": "hexa_fx", "error": "boom"}, command="v1")
    with tarfile.open(tmp_path / "swin.tar", "w") as archive:
        for path in work.iterdir():
            archive.add(path, path.name)
    collect(tmp_path / "swin.tar", results)
    found = {p.name: json.loads(p.read_text()) for p in results.iterdir()}
    first = {"environment": {"command": "first"}}
    memory = found["swin_memory_base.json"]
    assert memory["environment"] == {"command": "second"}
    assert memory["records"] == [again, rows[1] | first, rows[2] | first, installed, more]
    records = found["swin_convergence.json"]["records"]
    assert [r["name"] for r in records] == ["eager", "hexa_fx"]
    assert records[0]["environment"] == {"command": "v0"}
    write(work, "convergence_v1", {"name": "hexa_fx", "top_k": 2, "losses": [1.0]}, command="v1 again")
    (work / "swin_memory_base.json").unlink(), (work / "swin_convergence_v0.json").unlink()
    collect(work, results)
    trained = json.loads((results / "swin_convergence.json").read_text())
    assert [(r["name"], r.get("environment", trained["environment"])["command"]) for r in trained["records"]] == [
        ("eager", "v0"),
        ("hexa_fx", "v1 again"),
    ]
    assert json.loads((results / "swin_memory_base.json").read_text()) == memory


def test_taking_over_the_same_run_twice_changes_nothing():
    made = {"environment": {"command": "a"}, "records": [{"name": "data", "case": case} for case in (0, 1)]}
    once = merged({"environment": {}, "records": []}, made)
    assert merged(once, made | {"records": once["records"]}) == once
    assert len(once["records"]) == 2


def test_the_page_holds_the_tables_of_the_recorded_results():
    page = docs.PAGE.read_text()
    assert page == docs.fill(page, RESULTS), "run python -m benchmarks.swin_moe docs"


def test_curves_meet_between_measured_batches():
    assert docs.meeting({1: 2.0, 3: 2.0}, {1: 1.0, 3: 4.0}) == pytest.approx(1 + 2 / 3)
    assert docs.meeting({1: 2.0, 3: 2.0}, {1: 1.0, 3: 1.5}) is None


def test_hexa_follows_the_eager_loss_curve():
    pytest.importorskip("sklearn")
    from benchmarks.swin_moe.convergence import digits

    model = swin_config("tiny", experts=4, top_k=2, router="linear")
    images, labels = digits(model.image, CPU)
    curves = {}
    for name in ("eager", "data", "padded-cf1"):
        entrant = Contestant(Setting(name, model, 16, amp=None, lr=1e-3), CPU)
        curves[name] = [float(entrant.step(images[i : i + 16], labels[i : i + 16])) for i in range(0, 64, 16)]
    assert curves["data"] == pytest.approx(curves["eager"], rel=1e-4)
    assert curves["padded-cf1"] != pytest.approx(curves["eager"], rel=1e-4)


def test_records_say_what_failed(tmp_path):
    bench = Bench(0, 1, CPU, tmp_path)
    assert "CUDA error" in bench.case("x", {"name": "a"}, failing)["error"]
    late = replace(bench, deadline=0.0)
    assert late.case("x", {"name": "b"}, dict)["skipped"] == "out of time"
    assert len(json.loads((Path(tmp_path) / "swin_x.json").read_text())["records"]) == 2
