"""benchmarks/bench_partition.py stays runnable where there is no GPU: tiny sizes, Gloo, and a launch that fails on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | more


def test_a_section_that_fails_costs_only_itself(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/partition_run.py", "--smoke", "--processes", "2", "--port", "29811"]
    command += ["--out", str(tmp_path / "a"), "--sections", "unequal,broken,overlap", "--deadline", "120"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "2 of 3 sections" in done.stdout
    assert "broken on purpose" in done.stdout
    merged = tmp_path / "all.json"
    parts = sorted(map(str, tmp_path.glob("a.*.json")))
    subprocess.run([sys.executable, "benchmarks/merge_records.py", str(merged), *parts], cwd=ROOT, check=True)
    result = json.loads(merged.read_text())
    finished = {r["section"] for r in result["records"] if r["question"] == "seconds"}
    assert finished == {"unequal:tiny", "overlap:tiny"}
    assert any(r["question"] == "broken" for r in result["records"])
    assert {"device", "python", "torch", "ranks", "command"} <= set(result)
    splits = {(r["kind"], r["split"]) for r in result["records"] if "experts_ms" in r}
    assert {kind for kind, _ in splits} == {"data", "model"}
    assert len(splits) == 8
    steps = [r for r in result["records"] if "step" in r.get("kind", "")]
    assert len(steps) == 4
    assert all(sum(r["h"]) == 128 and r["step_ms"] > 0 for r in steps)


def test_nothing_recorded_leaves_the_file(tmp_path: Path) -> None:
    kept = tmp_path / "old.json"
    kept.write_text("{}")
    command = [sys.executable, "benchmarks/merge_records.py", str(kept), str(tmp_path / "missing.json")]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode != 0
    assert kept.read_text() == "{}"


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
