"""What became of a mutant."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: ``invalid`` (its own code does not run or does not repeat itself), ``refused``, ``equal``, or
    ``WRONG`` with the difference. `tests.zoo.judge_dormant` knows two more.
    """

    outcome: str
    detail: str = ""
