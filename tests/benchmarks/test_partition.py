"""benchmarks/bench_partition.py stays runnable where there is no GPU: tiny sizes, Gloo, a launch that fails, shares of traces."""

import json
import os
import re
import signal
import subprocess
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from benchmarks import partition_trace as trace

ROOT = Path(__file__).parents[2]


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | more


def recorded(folder: Path, sections: str, port: int, done: str) -> dict:
    """What two processes record of tiny sections."""
    command = [sys.executable, "benchmarks/partition_run.py", "--smoke", "--processes", "2", "--port", str(port)]
    command += ["--out", str(folder / "a"), "--sections", sections, "--deadline", "120"]
    ran = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    assert done in ran.stdout
    merged = folder / "all.json"
    parts = sorted(map(str, folder.glob("a.*.json")))
    subprocess.run([sys.executable, "benchmarks/merge_records.py", str(merged), *parts], cwd=ROOT, check=True)
    return json.loads(merged.read_text())


@pytest.mark.slow
def test_what_was_recorded_before_a_section_failed_stays(tmp_path: Path) -> None:
    result = recorded(tmp_path, "overlap,broken", 29811, "1 of 2 sections")
    finished = {r["section"] for r in result["records"] if r["question"] == "seconds"}
    assert finished == {"overlap:tiny"}
    assert any(r["question"] == "broken" for r in result["records"])
    assert {"device", "python", "torch", "ranks", "command"} <= set(result)


def test_the_next_launch_begins_after_the_section_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import partition_run

    launched: list[str] = []

    def launch(command: list[str], *_: Any) -> None:
        sections = command[command.index("--sections") + 1]
        launched.append(sections)
        done = list(takewhile(lambda unit: unit != "broken", sections.split(",")))
        records = [{"question": "seconds", "section": unit} for unit in done]
        Path(command[command.index("--out") + 1]).write_text(json.dumps({"records": records}))

    monkeypatch.setattr(partition_run, "_launch", launch)
    lost = partition_run.run(["a", "broken", "b", "c"], 2, 1, str(tmp_path / "x"), 100.0, "", True)
    assert (lost, launched) == (["broken"], ["a,broken,b,c", "b,c"])


def test_a_launch_does_not_outlive_who_launched_it() -> None:
    from benchmarks import partition_run

    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    before = signal.signal(signal.SIGALRM, lambda *_: sys.exit(143))
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(SystemExit):
            partition_run._wait(process, 50.0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert process.poll() == -signal.SIGTERM


@pytest.mark.slow
def test_ranks_of_unequal_speed(tmp_path: Path) -> None:
    result = recorded(tmp_path, "unequal", 29812, "1 of 1 sections")
    splits = {(r["kind"], r["split"]) for r in result["records"] if "experts_ms" in r}
    assert {kind for kind, _ in splits} == {"data", "model"}
    assert len(splits) == 9  # model-centric also without counting steps
    steps = [r for r in result["records"] if "step" in r.get("kind", "")]
    assert len(steps) == 4
    assert all(sum(r["h"]) == 128 and r["step_ms"] > 0 for r in steps)


def test_nothing_recorded_leaves_the_file(tmp_path: Path) -> None:
    kept = tmp_path / "old.json"
    kept.write_text("{}")
    command = [sys.executable, "benchmarks/merge_records.py", str(kept), str(tmp_path / "missing.json")]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode != 0
    assert kept.read_text() == "{}"


@pytest.mark.parametrize("script", ["gpu_partition.sh", "gpu_several.sh"])
def test_tiny_numbers_do_not_go_to_the_records(script: str, tmp_path: Path) -> None:
    """Where nobody said where to, and with programs that only note that they ran."""
    (tmp_path / "bin").mkdir()
    for name in ("python3", "timeout"):
        (tmp_path / "bin" / name).write_text('#!/bin/sh\necho "$@" >> "$TMPDIR/ran"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    made = environment(SMOKE="1", PATH=path, TMPDIR=str(tmp_path))
    said = subprocess.run(
        ["sh", f"benchmarks/{script}"], cwd=ROOT, env=made, capture_output=True, text=True, check=False
    ).stdout
    assert f"numbers of tiny sizes go to {tmp_path}" in said
    assert "--smoke" in (ran := (tmp_path / "ran").read_text())
    assert "benchmarks/results" not in ran


@pytest.mark.slow
def test_the_whole_script(tmp_path: Path) -> None:
    command = ["sh", "benchmarks/gpu_partition.sh"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(SMOKE="1", OUT=str(tmp_path)), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for ranks in (2, 4):
        result = json.loads((tmp_path / f"partition_h200x{ranks}.json").read_text())
        found = {r["section"].partition(":")[0] for r in result["records"] if r["question"] == "seconds"}
        assert found == {"correctness", "sweep", "overlap", "memory", "unequal"}
        assert result["ranks"] == ranks


def test_records_that_the_page_names_are_there() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    for names, remark in re.findall(r"`([\w*{},]+\.json)`( \(not recorded yet\))?", page):
        name = re.sub(r"\{.*\}", "*", names)
        assert bool(list((ROOT / "benchmarks" / "results").glob(name))) != bool(remark), names


def test_tables_of_the_page_are_those_of_the_records() -> None:
    from benchmarks import partition_docs as docs

    page = docs.PAGE.read_text()
    assert page == docs.fill(page, docs.RESULTS), "run python -m benchmarks.partition_docs"
    assert all(f"<!-- {name} -->" in page for name in docs.SECTIONS)


def test_steps_of_whole_models_beside_each_other(tmp_path: Path) -> None:
    from benchmarks import partition_docs as docs

    head = {"gpus": 4, "model": "olmoe", "tokens": 8192, "layers": 6}
    times = {"fsdp2_hexa": 12.0, "data": 11.0, "model": 10.0, "auto": 10.5}
    rows = [head | {"row": row, "ms": ms, "peak_gib": 3.0} for row, ms in times.items()]
    graphed = head | {"row": "data_graphed", "ms": 6.0}
    skewed = head | {"row": "auto", "ms": 9.0, "peak_gib": 2.0, "modes": ["fsdp"], "zipf": 1.2, "fullest": 1.5}
    failed = head | {"row": "ep_hexa", "reason": "out of memory"}
    (tmp_path / "mesh_h200x4.json").write_text(json.dumps({"rows": [*rows, graphed, skewed, failed]}))
    learned = head | {"gpus": 2, "ms": 8.0, "trainer": 2}
    losses = {"fsdp2_hexa": [5.0, 4.0], "fsdp2_grouped_mm": [5.0, 4.02]}
    found = [learned | {"row": row, "losses": each} for row, each in losses.items()]
    (tmp_path / "mesh_h200x2.json").write_text(json.dumps({"rows": found}))
    said = docs.mesh(tmp_path).splitlines()
    assert said[2] == "| 4 | olmoe | 8192 | 12.0, 3.0 | 11.0, 3.0 | 10.0, 3.0 | 10.5, 3.0 | 6.0 | - | 1.05 | 2.00 |"
    assert "| 4 | olmoe | 8192 | Zipf 1.2, fullest rank 1.50 | - | - | 9.0, 2.0 (fsdp) | 1.00 | - |" in said
    assert "| 2 | olmoe | 8192 | Trainer, 2 steps | 8.0 | 8.0 | - | - | 1.00 |" in said
    apart = "losses of all steps within 0.50 % of each other, 5.000 at first, 4.000 and 4.020 at the end."
    assert f"olmoe, 2 GPUs, Trainer, 2 steps: {apart}" in said
    assert said[-1] == "* olmoe, 8192, bf16, ep_hexa: out of memory"


def test_a_step_as_a_graph_is_another_record_than_the_same_launched_by_the_host() -> None:
    from benchmarks.merge_records import merged

    head = {"question": "overlap", "shape": "swin", "tokens": 8, "layers": 6}
    records = [head | {"captured": captured, "step_ms": 1.0} for captured in (False, True)]
    assert merged([{"command": "c", "records": records}])["records"] == records


def test_what_was_not_measured_is_said(tmp_path: Path) -> None:
    """What the records give is in the page, which the test above compares."""
    from benchmarks import partition_docs as docs

    step = {"question": "step time", "shape": "mixtral", "tokens": 8}
    devices = {"question": "unequal devices", "shape": "mixtral", "tokens": 96, "sms": [132, 64], "kind": "model"}
    records = [
        step | {"mode": "data", "step_ms": 2.0, "peak_mib": 2048},
        step | {"mode": "ep", "error": "out of memory"},
        step | {"mode": "auto", "picked": "data_centric", "over_best": 1.2},
        {"question": "overlap", "shape": "swin", "tokens": 16, "layers": 6, "skipped": "out of time"},
        devices | {"split": "weighted", "sizes": [64, 32], "over_ideal": 1.5, "gain_over_uniform": 0.25},
        {"question": "memory", "layers": 2, "weights_of_a_layer_mib": 2, "gathered_mib": 4, "peak_above_held_mib": 5},
        {"question": "memory", "layers": 12, "weights_of_a_layer_mib": 2, "gathered_mib": 24, "peak_above_held_mib": 5},
        {"question": "failed", "section": "sweep:mixtral", "error": "ValueError: broken"},
    ]
    head = {"ranks": 2, "device": "GPU", "torch": "2", "cuda": "13", "python": "3", "nccl": "2.28"}
    (tmp_path / "partition_h200x2.json").write_text(json.dumps(head | {"records": records}))
    runs = docs.load(tmp_path)
    assert "| 2 | mixtral | 8 | - | 2.0 | - | - | - | - | data, 20.0 % | 2.0 / - / - / - |" in docs.steps(runs)
    goals = docs.goals(runs)
    assert "| **no** | 4, 24 MiB on 2 GPUs |" in goals
    assert "2 devices (1.50) |" in goals
    assert "bf16" not in goals  # nothing was recorded
    setup = docs.setup(runs)
    assert "NCCL 2.28" in setup
    assert "failed in sweep:mixtral: ValueError: broken" in setup
    assert "out of time: swin, 16, overlap" in setup
    assert "mixtral, 8, ep: out of memory" in setup
    page = "".join(f"<!-- {name} -->\n<!-- /{name} -->\n" for name in docs.SECTIONS)
    assert docs.fill(docs.fill(page, tmp_path), tmp_path) == docs.fill(page, tmp_path)


def kernel(name: str, start: float, end: float) -> dict[str, object]:
    return {"cat": "kernel", "name": name, "ts": start, "dur": end - start}


def test_shares_of_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    events = [
        kernel(gather, 0, 1000),  # before anything runs
        kernel("gemm", 1000, 3000),
        kernel("gemm", 2500, 4000),  # beside the one before: counted once
        kernel(gather, 2000, 3000),
        kernel(gather, 3000, 6000),
        kernel("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", 4000, 4500),
    ]
    ran = []
    monkeypatch.setattr(trace, "_traced", lambda run, align, kinds: run() and events)
    found = trace.hidden_shares(lambda: ran.append(1), lambda: None, 2, layer_ms=1.5)
    assert len(ran) == 2
    assert found["compute_ms"] == 1.5
    assert found["span_ms"] == 3.0
    assert found["AllGather"] == {
        "kernels": 3,
        "ms": 5.0,
        "hidden": 0.4,
        "shorter": 2,
        "hidden_of_shorter": 0.5,
        "each": [[1.0, 0.0], [1.0, 1.0], [3.0, 1.0]],
    }
    assert found["ReduceScatter"]["hidden"] == 0.0
    assert trace.compute_ms(lambda: [1]) == 3.0
