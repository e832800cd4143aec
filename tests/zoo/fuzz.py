"""Looks for blocks on which hexa_fx itself fails: mutants of the zoo, on good and on poor examples.

    python -m tests.zoo.fuzz --start 0 --count 1000 [--verify]

A refusal that says "hexa_fx itself failed here" is printed with its seed, what was changed and the traceback. There should be none.
"""

import argparse
import copy
import logging
import random
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import hexa_fx
from tests.zoo import pattern_table, poor_examples
from tests.zoo.mutate import Mutant, mutant_of

FAILED = "hexa_fx itself failed here"


class _Tracebacks(logging.Handler):
    """Keeps the traceback of the last failure that was logged."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.last = "".join(traceback.format_exception(*record.exc_info))


@contextmanager
def _listening() -> Iterator[_Tracebacks]:
    seen, logger = _Tracebacks(), logging.getLogger("hexa_fx")
    logger.addHandler(seen)
    try:
        yield seen
    finally:
        logger.removeHandler(seen)


def failure(case: Mutant, example: str, verify: bool) -> str:
    """The traceback of what fails when the mutant is optimized on that example of `poor_examples`; empty if nothing does."""
    dtype = torch.float64 if torch.float64 in case.variant.dtypes else torch.float32
    model = case.variant.make(0).to(dtype).eval()
    args, kwargs = poor_examples.BY_NAME[example](case.variant, dtype)
    try:
        copy.deepcopy(model)(*args, **kwargs)
    except Exception:
        return ""  # the mutant cannot run
    config = hexa_fx.HexaConfig(verify=verify)
    with _listening() as seen, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            opt = pattern_table.optimized(model, args, kwargs, config)
        except Exception:
            return traceback.format_exc()
        return seen.last if any(FAILED in (block.reason or "") for block in opt.report.blocks) else ""


def case_of(seed: int) -> tuple[Mutant | None, str]:
    """The mutant and the example of that number."""
    dice = random.Random(1_000_000 + seed)
    example = dice.choice(["good", "good", *poor_examples.BY_NAME])
    return mutant_of(dice), example


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--verify", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("hexa_fx").setLevel(logging.ERROR)
    logging.getLogger("hexa_fx").propagate = False
    failed = 0
    for seed in range(options.start, options.start + options.count):
        case, example = case_of(seed)
        found = failure(case, example, options.verify) if case is not None else ""
        if found:
            failed += 1
            print(f"seed {seed}, example {example}: {case.what if case else ''}\n{found}", flush=True)
    print(f"{failed} of {options.count} failed")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
