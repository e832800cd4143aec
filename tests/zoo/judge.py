"""Judges mutants of the zoo: is what `hexa_fx.optimize` makes of them equal to them?

    python -m tests.zoo.judge --log mutants.jsonl --judged 5000      # goes on where the log ends
    python -m tests.zoo.judge --log mutants.jsonl --tally            # counts what is in it
    python -m tests.zoo.judge --family dormant --log dormant.jsonl   # the second family, see judge_dormant.py
    python -m tests.zoo.judge --log new.jsonl --judged 100 --only einsum   # of blocks whose names hold this

The log has a line a seed: outcome, detail, what was changed, seconds of processor time. It can be stopped at any time.
"""

import argparse
import collections
import json
import logging
import os
import pathlib
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from tests.zoo import dormant, judge_dormant, mutate, pattern_table, poor_examples
from tests.zoo.compare import Difference, compare, is_finite, perturb
from tests.zoo.judge_dormant import Verdict
from tests.zoo.mutate import Mutant, mutant
from tests.zoo.variant import Variant

Judge: TypeAlias = Callable[[int, str], tuple[Verdict, str]]
JUDGED = frozenset({"equal", "own code", "refused", "WRONG", "CRASH"})
SIZES = ((2, 7), (3, 5), (1, 1), (2, 16))
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}


def judge(case: Mutant, example: str = "good") -> Verdict:
    """Optimize the mutant on that example of `poor_examples`, and compare where it was rewritten."""
    v = case.variant
    dtype = torch.float64 if torch.float64 in v.dtypes else torch.float32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        excuse = excuse_of(case, dtype)
        if excuse:
            return Verdict("invalid", excuse)
        model, opt = _optimized(v, dtype, example)  # an exception here is the product's: let it fail
        if not any(block.status == "rewritten" for block in opt.report.blocks):
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
                if _equal(case, model, opt, args, kwargs, dtype, train and v.train, place):
                    continue
                try:
                    found = compare(model, model, args, kwargs, train=train and v.train, seed=place)
                except Exception:
                    continue  # the original raises: nothing to compare with
                if not found.within(0.0) or _reads_uninitialised(model, args, kwargs, train and v.train):
                    continue  # the original does not repeat itself, for one because it keeps state in Python
                gradients = is_finite(model, args, kwargs, train=train and v.train, seed=place)
                found = compare(model, opt, args, kwargs, train=train and v.train, seed=place, backward=gradients)
                if not found.within(_tolerance(case, dtype)) and not _chaotic(
                    model, args, kwargs, train and v.train, found
                ):
                    return f"batch {batch}, seq {seq}, train {train}: {found}"
    return ""


def _equal(case: Mutant, model: torch.nn.Module, opt: torch.nn.Module, args: tuple, kwargs: dict, *how: Any) -> bool:
    """Whether they agree at once, so that there is nothing to excuse."""
    dtype, train, seed = how
    try:
        return compare(model, opt, args, kwargs, train=train, seed=seed).within(_tolerance(case, dtype))
    except Exception:
        return False


def _reads_uninitialised(model: torch.nn.Module, args: tuple, kwargs: dict, train: bool) -> bool:
    """Whether memory that nobody wrote reaches a result. It can hold the same twice, so here it holds NaN."""
    finite = is_finite(model, args, kwargs, train=train)
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.utils.deterministic.fill_uninitialized_memory
    try:
        return finite != is_finite(model, args, kwargs, train=train)
    finally:
        torch.use_deterministic_algorithms(False)


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


def excuse_of(case: Mutant, dtype: torch.dtype) -> str:
    """Why the mutant is no test: its own code fails on the traced size."""
    try:
        model = case.variant.make(0).to(dtype).eval()
        args, kwargs = case.variant.inputs(2, 7, dtype, 0)
        found = compare(model, model, args, kwargs)
    except Exception as error:
        return f"{type(error).__name__}"
    return "" if found.within(0.0) else "does not repeat itself"


def judge_seed(seed: int, example: str = "good") -> tuple[Verdict, str]:
    """The verdict on the mutant of that number, and what was changed."""
    case = mutant(seed)
    if case is None:
        return Verdict("nothing to mutate"), ""
    try:
        return judge(case, example), case.what
    except Exception as error:
        return Verdict("CRASH", f"{type(error).__name__}: {error}"), case.what


JUDGES: dict[str, Judge] = {
    "changed": judge_seed,
    "dormant": lambda seed, example: judge_dormant.judge_seed(seed),
}


def _optimized(v: Variant, dtype: torch.dtype, example: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    model = v.make(0).to(dtype).eval()
    return model, pattern_table.optimized(model, *poor_examples.BY_NAME[example](v, dtype))


def tally(lines: list[dict]) -> str:
    """One sentence, and a line for each wrong one."""
    counts = collections.Counter(line["outcome"] for line in lines)
    judged = sum(counts[outcome] for outcome in JUDGED)
    own = (
        f", {counts['own code']} rewritten and run their own code once the feature is awake"
        if counts["own code"]
        else ""
    )
    wrong = [f"seed {x['seed']}: {x['what']}: {x['detail']}" for x in lines if x["outcome"] in ("WRONG", "CRASH")]
    text = (
        f"{judged} mutants judged: {counts['equal']} rewritten and equal{own}, {counts['refused']} refused, "
        f"{counts['WRONG']} wrong, "
        f"{counts['CRASH']} crashed ({counts['invalid']} more do not run or do not repeat themselves"
        + (f", of {counts['asleep']} the feature changes no result)" if counts["asleep"] else ")")
    )
    return "\n".join([text, *wrong])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=pathlib.Path, nargs="+", required=True, help="the first is written to")
    parser.add_argument("--start", type=int, default=1000, help="first seed")
    parser.add_argument("--judged", type=int, default=5000, help="stop after so many that were rewritten or refused")
    parser.add_argument("--example", choices=poor_examples.BY_NAME, default="good", help="what it is optimized on")
    parser.add_argument("--only", help="mutants of the zoo's blocks whose names hold this")
    parser.add_argument("--family", choices=JUDGES, default="changed", help="what the mutants are")
    parser.add_argument("--tally", action="store_true", help="only count")
    parser.add_argument("--record", action="store_true", help="write the tally where docs/patterns.md takes it from")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    os.environ["HEXA_FX_OWN_CODE_WHEN_SMALL"] = "0"  # mutants are small: they would be compared with themselves
    if options.only is not None:
        chosen = tuple(variant for variant in mutate.VARIANTS if options.only in variant.name)
        mutate.VARIANTS = dormant.VARIANTS = chosen
    lines = [json.loads(line) for log in options.log if log.exists() for line in log.read_text().splitlines()]
    if not options.tally:
        _go_on(options.log[0], lines, options.start, options.judged, JUDGES[options.family], options.example)
    print(tally(lines))
    if options.record:
        pattern_table.MUTANTS[options.family].write_text(tally(lines) + "\n")
    return int(any(line["outcome"] in ("WRONG", "CRASH") for line in lines))


def _go_on(log: pathlib.Path, lines: list[dict], start: int, wanted: int, judge_one: Judge, example: str) -> None:
    seen = {line["seed"] for line in lines}
    judged = sum(line["outcome"] in JUDGED for line in lines)
    seed = start
    with log.open("a") as file:
        while judged < wanted:
            if seed not in seen:
                started = time.process_time()
                verdict, what = judge_one(seed, example)
                line = {"seed": seed, "outcome": verdict.outcome, "detail": verdict.detail, "what": what}
                lines.append(line | {"seconds": round(time.process_time() - started, 2)})
                file.write(json.dumps(lines[-1]) + "\n")
                file.flush()
                judged += verdict.outcome in JUDGED
            seed += 1


if __name__ == "__main__":
    sys.exit(main())
