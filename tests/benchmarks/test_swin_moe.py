"""The model behind docs/swin_moe.md, every baseline against it, and each experiment, tiny, over Gloo."""

import argparse
import copy
import json
import sys
import tarfile
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import hexa_fx
from benchmarks.swin_moe import __main__ as main
from benchmarks.swin_moe import brief, claims, docs, plot
from benchmarks.swin_moe.__main__ import RESULTS, launch
from benchmarks.swin_moe.baselines import DroplessExperts, PaddedExperts, places
from benchmarks.swin_moe.bench import Bench
from benchmarks.swin_moe.collect import collect, merged
from benchmarks.swin_moe.contestants import BASELINES, Contestant, Setting
from benchmarks.swin_moe.journal import Journal
from benchmarks.swin_moe.libraries import NotInstalled
from benchmarks.swin_moe.model import Experts, SwinMoe, from_windows, shift_mask, swin_config, to_windows

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def experts():
    torch.manual_seed(0)
    return Experts(4, 16, 24).double()


def routed(tokens, top_k, experts=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 16, generator=generator, dtype=torch.float64)
    ids = (
        torch.rand(tokens, experts, generator=generator).topk(top_k).indices if tokens else torch.zeros(0, top_k).long()
    )
    return x, ids, torch.rand(tokens, top_k, generator=generator, dtype=torch.float64)


def gradients(module, x, ids, weights):
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    y = module(x, ids, weights)
    (y * torch.arange(y.numel()).view_as(y).cos()).sum().backward()
    found = [y.detach(), x.grad, weights.grad, *(p.grad for p in module.parameters())]
    module.zero_grad()
    return found


@pytest.mark.parametrize("tokens", [1, 9, 40])
@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("make", [lambda e: DroplessExperts(e, compute="loop"), lambda e: PaddedExperts(e, factor=0)])
def test_baselines_that_drop_nothing_equal_the_model(experts, make, top_k, tokens):
    case = routed(tokens, top_k)
    for ours, theirs in zip(gradients(make(experts), *case), gradients(experts, *case), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_grouped_matmul_equals_the_model(experts):
    single, case = copy.deepcopy(experts).float(), [t.float() if t.is_floating_point() else t for t in routed(40, 2)]
    for ours, theirs in zip(gradients(DroplessExperts(single), *case), gradients(single, *case), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_padded_drops_what_exceeds_the_capacity(experts):
    x, _, weights = routed(8, 1)
    ids = torch.zeros(8, 1, dtype=torch.long)  # all to one expert: room for ceil(1.25 * 8 / 4) = 3
    ours, theirs = PaddedExperts(experts, factor=1.25)(x, ids, weights), experts(x, ids, weights)
    torch.testing.assert_close(ours[:3], theirs[:3])
    assert not ours[3:].any()
    dx = gradients(PaddedExperts(experts, factor=1.25), x, ids, weights)[1]
    assert dx[:3].any()
    assert not dx[3:].any()


def test_first_choices_queue_first():
    assert places(torch.tensor([[0, 1], [1, 0], [0, 1]]), 2, 2).tolist() == [[0, 3], [2, 4], [1, 4]]


@pytest.mark.parametrize("name", ["tutel", "megablocks-moe", "megablocks-dmoe"])
def test_libraries_follow_the_model_where_they_are_installed(name):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    experts = Experts(4, 128, 128).to(device)
    with torch.no_grad():
        experts.b1.zero_(), experts.b2.zero_()  # MegaBlocks' experts have none
    try:
        other = BASELINES[name](experts, None)
    except NotInstalled as error:
        pytest.skip(str(error))
    x, ids = torch.randn(64, 128, device=device), torch.arange(128, device=device).view(64, 2) % 4
    weights = torch.full((64, 2), 0.5, device=device)
    torch.testing.assert_close(other(x, ids, weights), experts(x, ids, weights), rtol=3e-2, atol=3e-2)


def test_a_library_that_breaks_on_import_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "tutel", None)
    with pytest.raises(NotInstalled, match="tutel"):
        BASELINES["tutel"](Experts(4, 8, 8), None)


def test_tutel_adapter_hands_over_routing_and_weights(monkeypatch, experts):
    """Against a stand-in with Tutel's interface: scores in, dispatched rows out, weights applied in decode."""

    def top_k_routing(scores, top_k, capacity_factor):
        weights, ids = scores.topk(top_k)
        return (ids, weights / weights.sum(-1, keepdim=True) if top_k > 1 else weights, scores.shape), 0.0

    def fast_encode(x, routed):
        ids, _, (tokens, count) = routed
        rows = x.new_zeros(count, tokens, x.shape[1])
        rows[ids.flatten(), torch.arange(tokens).repeat_interleave(ids.shape[1])] = x.repeat_interleave(ids.shape[1], 0)
        return rows

    def fast_decode(rows, routed):
        ids, weights, (tokens, _) = routed
        return (rows[ids, torch.arange(tokens)[:, None]] * weights[..., None].to(rows.dtype)).sum(1)

    moe = types.ModuleType("tutel.moe")
    moe.top_k_routing, moe.fast_encode, moe.fast_decode = top_k_routing, fast_encode, fast_decode
    for name, module in {
        "tutel": types.ModuleType("tutel"),
        "tutel.moe": moe,
        "tutel.net": types.ModuleType("net"),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    for top_k in (1, 2):
        x, ids, weights = routed(12, top_k)
        torch.testing.assert_close(
            BASELINES["tutel"](experts, None)(x, ids, weights), experts(x, ids, weights), rtol=1e-5, atol=1e-6
        )


# --- the model -----------------------------------------------------------------------------------------------------------


def test_sizes_are_those_of_swin_moe():
    with torch.device("meta"):
        counts = {
            scale: sum(p.numel() for p in SwinMoe(swin_config(scale)).parameters()) for scale in ("small", "base")
        }
    assert counts["base"] / 1e6 == pytest.approx(280, abs=2)
    assert counts["small"] / 1e6 == pytest.approx(158, abs=2)
    mixtures = [n for n, m in SwinMoe(swin_config("tiny")).named_modules() if type(m).__name__ == "MoeMlp"]
    assert mixtures == ["stages.1.1.mlp", "stages.2.1.mlp"]


def test_windows_and_their_mask():
    x = torch.randn(2, 8, 8, 3)
    torch.testing.assert_close(from_windows(to_windows(x, 4), 4, 8), x)
    mask = shift_mask(8, 4, 2)
    assert mask.shape == (4, 16, 16)
    assert not mask[0].any()  # the first window was not wrapped around
    assert (mask[3] < 0).sum() == 16 * 12  # the last one holds four pieces of four tokens


@pytest.mark.parametrize("router", ["cosine", "linear"])
def test_optimize_keeps_the_model(router):
    model, images = SwinMoe(swin_config("tiny", top_k=2, experts=3, router=router)), torch.randn(2, 3, 32, 32)
    optimized = hexa_fx.optimize(model, images, hexa_fx.HexaConfig(strict=True))
    assert len(optimized.report.rewritten) == 2
    for ours, theirs in zip(optimized(images), model(images), strict=True):
        torch.testing.assert_close(ours, theirs)


# --- switches ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("off", ["expert_operators", "fused_kernel", "topk_memory"])
def test_a_switched_off_technique_changes_no_value(off):
    model, images = SwinMoe(swin_config("tiny", top_k=2, experts=3)).double(), torch.randn(2, 3, 32, 32).double()
    other = hexa_fx.optimize(model, images, hexa_fx.HexaConfig(strict=True, verify=False, **{off: False}))
    plain = dict(model.named_parameters())
    grads = {}
    for net in (model, other):
        net(images)[0].square().sum().backward()
        grads[net] = {name: p.grad.clone() for name, p in plain.items()}
        model.zero_grad()
    for name, grad in grads[model].items():
        torch.testing.assert_close(grads[other][name], grad, msg=lambda m, name=name: f"{name}: {m}")


def test_without_experts_nothing_is_computed_and_every_parameter_trains(experts):
    x, ids, weights = routed(12, 2)
    y, dx, dweights, *parameters = gradients(BASELINES["none"](experts, None), x, ids, weights)
    torch.testing.assert_close(y, x)
    assert dx is not None
    assert not dweights.any()
    assert all(not p.any() for p in parameters)


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
