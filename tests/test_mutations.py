"""Rewritten implies equal, on thousands of mutated zoo blocks."""

from __future__ import annotations

import collections
import logging
import os
import warnings
from dataclasses import dataclass

import pytest
import torch

import hexa_fx
from tests.test_zoo import optimized, rewritten
from tests.zoo.compare import Difference, compare, perturb
from tests.zoo.mutate import Mutant, mutant

torch.set_num_threads(1)

SIZES = ((2, 7), (3, 5), (1, 1), (2, 16))
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: ``invalid`` (its own code does not run or does not repeat itself), ``refused``, ``equal``, or
    ``WRONG`` with the difference.
    """

    outcome: str
    detail: str = ""


def judge(case: Mutant) -> Verdict:
    """Optimize the mutant and compare where it was rewritten."""
    v = case.variant
    dtype = torch.float64 if torch.float64 in v.dtypes else torch.float32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        excuse = _excuse(case, dtype)
        if excuse:
            return Verdict("invalid", excuse)
        model, opt = optimized(v, dtype)  # an exception here is the product's: let it fail
        if not rewritten(opt):
            return Verdict("refused", "; ".join(b.reason for b in opt.report.blocks) or "no candidate")
        for changed in (False, True):
            if changed:
                perturb(model, opt)
            wrong = _first_difference(case, model, opt, dtype)
            if wrong:
                return Verdict("WRONG", f"{'after parameters and buffers changed, ' if changed else ''}{wrong}")
    return Verdict("equal")


def _first_difference(case: Mutant, model: torch.nn.Module, opt: torch.nn.Module, dtype: torch.dtype) -> str:
    """Where the two differ, over sizes, modes and inputs; empty if nowhere."""
    v = case.variant
    for place, (batch, seq) in enumerate(SIZES):
        for train in (False, True):
            for args, kwargs in _inputs(case, batch, seq, dtype, place):
                try:
                    found = compare(model, model, args, kwargs, train=train and v.train, seed=place)
                except Exception:
                    continue  # the original raises: nothing to compare with
                if not found.within(0.0):
                    continue  # uninitialised memory, or state kept in Python
                found = compare(model, opt, args, kwargs, train=train and v.train, seed=place)
                if not found.within(_tolerance(case, dtype)) and not _chaotic(
                    model, args, kwargs, train and v.train, found
                ):
                    return f"batch {batch}, seq {seq}, train {train}: {found}"
    return ""


def _chaotic(model: torch.nn.Module, args: tuple, kwargs: dict, train: bool, found: Difference) -> bool:
    """Whether rounding alone moves the original about as far: it divides by what is zero but for rounding."""
    moved = tuple(a * (1 + 4 * torch.finfo(a.dtype).eps) if _is_float(a) else a for a in args)
    first = compare(model, _OnOthers(model, moved), args, kwargs, train=train)
    return max(first.forward, first.gradient) >= max(found.forward, found.gradient) / 100


class _OnOthers(torch.nn.Module):
    """The model, called with other positional arguments; the gradients of the inputs given are not compared."""

    def __init__(self, model: torch.nn.Module, args: tuple) -> None:
        super().__init__()
        self.__dict__["model"], self.__dict__["args"] = model, args

    def named_parameters(self, *args: object, **kwargs: object):
        return self.model.named_parameters()

    def forward(self, *args: object, **kwargs: object) -> object:
        self.model.train(self.training)
        return self.model(*(m + 0 * a if _is_float(a) else a for m, a in zip(self.args, args)), **kwargs)


def _tolerance(case: Mutant, dtype: torch.dtype) -> float:
    """A cast to float32 inside a float64 block rounds; the operators keep float64 there, which is as good."""
    return TOLERANCE[torch.float32] if "float32" in case.what else TOLERANCE[dtype]


def _inputs(case: Mutant, batch: int, seq: int, dtype: torch.dtype, seed: int):
    """Random tokens, and equal tokens: all to the same experts."""
    args, kwargs = case.variant.inputs(batch, seq, dtype, 20 + seed)
    yield args, kwargs
    yield tuple(torch.ones_like(a) * 0.3 if _is_float(a) else a for a in args), kwargs


def _is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _excuse(case: Mutant, dtype: torch.dtype) -> str:
    """Why the mutant is no test: its own code fails on the traced size."""
    try:
        model = case.variant.make(0).to(dtype).eval()
        args, kwargs = case.variant.inputs(2, 7, dtype, 0)
        found = compare(model, model, args, kwargs)
    except Exception as error:
        return f"{type(error).__name__}"
    return "" if found.within(0.0) else "does not repeat itself"


def run(seeds: range) -> tuple[collections.Counter[str], list[str]]:
    """Judge the mutants of `seeds`; returns the counts and the wrong ones."""
    counts: collections.Counter[str] = collections.Counter()
    wrong = []
    for seed in seeds:
        case = mutant(seed)
        if case is None:
            counts["nothing to mutate"] += 1
            continue
        try:
            verdict = judge(case)
        except Exception as error:
            verdict = Verdict("CRASH", f"{type(error).__name__}: {error}")
        counts[verdict.outcome] += 1
        if verdict.outcome in ("WRONG", "CRASH"):
            wrong.append(f"seed {seed}: {case.what}: {verdict.outcome} {verdict.detail}")
    return counts, wrong


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("hexa_fx").setLevel(logging.ERROR)


@pytest.mark.parametrize("start", range(0, 120, 20))
def test_mutants(start: int) -> None:
    counts, wrong = run(range(start, start + 20))
    assert not wrong, "\n".join(wrong)
    assert counts["equal"] + counts["refused"] >= 4, counts


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_five_thousand_judged_mutants(capsys: pytest.CaptureFixture[str]) -> None:
    """HEXA_FX_MUTANTS judged mutants (5000 by default): invalid ones do not count. Prints a summary."""
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
    for seed in range(200):
        case = mutant(seed)
        if case is None or _excuse(case, torch.float32):
            continue
        valid += 1
        args, kwargs = case.variant.inputs(2, 7, torch.float32, 0)
        original = by_name(case.variant.name).make(0)
        changed += not compare(original, case.variant.make(0), args, kwargs).within(1e-6)
    assert valid >= 60
    assert changed >= valid // 2, (changed, valid)
