"""Whatever a block does, hexa_fx rewrites it or says why not; see `tests.zoo.fuzz` for more seeds."""

import pytest

from tests.zoo import fuzz
from tests.zoo.mutate import Mutant
from tests.zoo.registry import by_name


@pytest.mark.parametrize("seed", range(6))
def test_never_fails_itself(seed: int) -> None:
    case, example = fuzz.case_of(seed)
    assert case is None or not fuzz.failure(case, example, verify=False)


def test_a_failure_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise KeyError("broken")

    monkeypatch.setattr("hexa_fx.passes.detect_all", fails)
    assert "broken" in fuzz.failure(Mutant(by_name("truncated_lists"), "nothing"), "good", verify=False)
