"""Rewritten implies equal, on thousands of mutated zoo blocks."""

import collections
import logging
import os
import random

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import hexa_fx
from tests.zoo import judge_dormant
from tests.zoo.compare import compare
from tests.zoo.judge import JUDGED, excuse_of, judge, judge_seed
from tests.zoo.mutate import mutant, mutant_of


def run(seeds: range) -> tuple[collections.Counter[str], list[str]]:
    """Judge the mutants of `seeds`; returns the counts and the wrong ones."""
    counts: collections.Counter[str] = collections.Counter()
    wrong = []
    for seed in seeds:
        verdict, what = judge_seed(seed)
        counts[verdict.outcome] += 1
        if verdict.outcome in ("WRONG", "CRASH"):
            wrong.append(f"seed {seed}: {what}: {verdict.outcome} {verdict.detail}")
    return counts, wrong


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="hexa_fx")  # for these tests alone: others read what is logged


@pytest.mark.parametrize("start", [0])
def test_mutants(start: int) -> None:
    counts, wrong = run(range(start, start + 12))
    assert not wrong, "\n".join(wrong)
    assert counts["equal"] + counts["refused"] >= 3, counts


@pytest.mark.parametrize("start", [0])
def test_dormant_features(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features that do nothing on the example, judged awake: equal, refused or the block's own code."""
    monkeypatch.setenv("HEXA_FX_OWN_CODE_WHEN_SMALL", "0")
    judged = [(seed, *judge_dormant.judge_seed(seed)) for seed in range(start, start + 8)]
    bad = [(seed, v, what) for seed, v, what in judged if v.outcome in ("WRONG", "CRASH")]
    wrong = [f"seed {s}: {what}: {v.outcome} {v.detail}" for s, v, what in bad]
    assert not wrong, "\n".join(wrong)
    assert sum(v.outcome in JUDGED for _, v, _ in judged) >= 4


@settings(max_examples=5, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_rewritten_implies_equal(dice: random.Random) -> None:
    """Hypothesis throws the dice, and finds the smallest throws that give a wrong rewrite."""
    case = mutant_of(dice)
    assume(case is not None)
    verdict = judge(case)
    assert verdict.outcome != "WRONG", f"{case.what}: {verdict.detail}"


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_five_thousand_judged_mutants(capsys: pytest.CaptureFixture[str]) -> None:
    """HEXA_FX_MUTANTS judged mutants of the first family (5000 by default): invalid ones do not count. Prints a summary."""
    wanted = int(os.environ.get("HEXA_FX_MUTANTS", "5000"))
    total: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    start = 1_000
    while total["equal"] + total["refused"] + len(wrong) < wanted:
        counts, found = run(range(start, start + 100))
        total, wrong, start = total + counts, wrong + found, start + 100
    with capsys.disabled():
        print(f"\n{start - 1000} mutants of torch {torch.__version__}, hexa_fx {hexa_fx.__version__}: {dict(total)}")
    assert not wrong, "\n".join(wrong)


def test_mutants_differ_from_their_variants() -> None:
    """The machinery does something: most valid mutants give another output than what they were made of."""
    from tests.zoo.registry import by_name

    changed = valid = 0
    for seed in range(60):
        case = mutant(seed)
        if case is None or excuse_of(case, torch.float32):
            continue
        valid += 1
        args, kwargs = case.variant.inputs(2, 7, torch.float32, 0)
        original = by_name(case.variant.name).make(0)
        changed += not compare(original, case.variant.make(0), args, kwargs).within(1e-6)
    assert valid >= 18
    assert changed >= valid // 2, (changed, valid)
