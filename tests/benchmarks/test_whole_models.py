"""The benchmark of whole models runs without a GPU, and says what it could not run."""

import argparse

import pytest

from benchmarks.bench_whole_models import rows


def test_every_implementation_has_a_row() -> None:
    pytest.importorskip("transformers")
    sizes = {"device": "cpu", "shrink": 32, "layers": 1, "tokens": 64, "batch": 2, "new": 2, "rounds": 1}
    found = list(rows("mixtral-8x7b", argparse.Namespace(**sizes, impls="hexa,grouped_mm,missing")))
    assert [row["impl"] for row in found] == ["hexa", "grouped_mm", "missing"]
    assert all(row["train_tokens_s"] > 0 and row["decode_tokens_s"] > 0 for row in found[:2])
    assert "missing" in found[2]["reason"]
