"""One call in N runs the original beside the rewritten block: what differs is said, and the original runs from then on."""

import logging

import pytest
import torch

import hexa_fx
from hexa_fx.errors import DiffersInUse, InputError
from tests.runtime.handmade import D, ListMoE


def made(**options: object) -> tuple[ListMoE, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, 9, D)
    return hexa_fx.optimize_(ListMoE(), x, hexa_fx.HexaConfig(own_code_when_small=False, **options)), x


def break_it(model: ListMoE) -> None:
    """As if a condition were missing."""
    (made,) = model.forward.specialisations
    plain = made.program.function
    made.program.function = lambda *given: plain(*given) * 1.01


@pytest.mark.parametrize("training", [False, True])
def test_a_block_that_is_as_its_original_goes_on(training: bool) -> None:
    model, x = made(check_every=2)
    model.train(training)(x)  # the analysis of this mode
    seen = model.seen.clone()
    for _ in range(4):
        model(x).sum().backward()
    assert bool((model.seen != seen).any()) is training
    assert (model.seen - seen).sum() == training * 4 * 18 * 2, "the original counts nothing besides"
    assert model.forward.specialisations


def test_a_difference_is_said_and_the_original_runs(caplog: pytest.LogCaptureFixture) -> None:
    model, x = made(check_every=3)
    model(x)
    break_it(model)
    own = hexa_fx.undo_(made()[0])
    with caplog.at_level(logging.WARNING):
        off = [bool((model(x) - own(x)).abs().max() > 1e-6) for _ in range(6)]
    assert off[0]
    assert not any(off[2:])
    assert "one call in 3 found that the rewritten block differs from the original: off by" in caplog.text
    assert "differs" in str(model.report)


def test_strict_raises() -> None:
    model, x = made(check_every=1, strict=True)
    break_it(model)
    with pytest.raises(DiffersInUse, match=r"a check of one call in 1 found .* off by"):
        model(x)


def test_random_numbers_are_those_of_one_run() -> None:
    model, x = made(check_every=1)
    torch.manual_seed(3)
    model(x)
    after = torch.rand(1)
    torch.manual_seed(3)
    hexa_fx.undo_(model)(x)
    assert torch.equal(after, torch.rand(1))


def test_the_compiler_sees_no_check() -> None:
    model, x = made(check_every=1)
    break_it(model)
    compiled = torch.compile(model, backend="eager")
    assert (compiled(x) - hexa_fx.undo_(made()[0])(x)).abs().max() > 1e-6


def test_less_than_never() -> None:
    with pytest.raises(InputError, match="check_every"):
        hexa_fx.HexaConfig(check_every=-1)
