"""Every block of the zoo is rewritten or refused as intended, and a rewritten one equals its original."""

import copy
import pathlib
from collections.abc import Iterable
from functools import cache

import pytest
import torch

from tests.zoo import pattern_table
from tests.zoo.compare import Counted, compare, perturb, state_dict_problems
from tests.zoo.registry import VARIANTS, by_name
from tests.zoo.variant import Variant

TRACED = (2, 7)
OTHERS = ((3, 5), (1, 1), (2, 16))
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}


def optimized(v: Variant, dtype: torch.dtype, seed: int = 0) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The block in eval mode, and its optimized form."""
    model = v.make(seed).to(dtype).eval()
    args, kwargs = v.inputs(*TRACED, dtype, seed)
    return model, pattern_table.optimized(model, args, kwargs)


def rewritten(model: torch.nn.Module) -> bool:
    return any(block.status == "rewritten" for block in model.report.blocks)


def reasons(model: torch.nn.Module) -> str:
    return "; ".join(f"{b.path!r}: {b.reason} ({b.location})" for b in model.report.blocks) or "no candidate block"


@pytest.mark.parametrize("v", VARIANTS, ids=lambda v: v.name)
def test_as_intended_and_equal(v: Variant) -> None:
    """In its smallest type, as a user would."""
    model, opt = optimized(v, v.dtypes[0])
    _as_intended(v, opt)
    assert state_dict_problems(model, opt) == []
    _equal_in(v, model, opt, v.dtypes[0], OTHERS if rewritten(opt) else OTHERS[:1])


EXACT = [v for v in VARIANTS if v.expect != "refused" and not v.gap and torch.float64 in v.dtypes]
PLAINEST = {v.name.partition("_")[0]: v.name for v in reversed(EXACT)}


def _exact(v: Variant) -> object:
    return pytest.param(v, id=v.name, marks=() if v.name in PLAINEST.values() else pytest.mark.more)


@pytest.mark.parametrize("v", [*map(_exact, EXACT)])
def test_exact(v: Variant) -> None:
    """In float64, where nothing hides in rounding; `optimize` has compared in it too, so most are in README's second command."""
    model, opt = optimized(v, torch.float64)
    _as_intended(v, opt)
    _equal_in(v, model, opt, torch.float64, (TRACED, *OTHERS[1:]))


def _as_intended(v: Variant, opt: torch.nn.Module) -> None:
    if v.gap:
        assert not rewritten(opt), f"the gap is closed: take the note away ({v.gap})"
    elif v.expect == "rewritten":
        assert rewritten(opt), reasons(opt)
    if v.expect == "refused":
        assert not rewritten(opt), "rewritten, though " + v.why
        located = any(b.location is not None and "zoo" in b.location.file for b in opt.report.blocks)
        assert located or not opt.report.blocks, "no line is named"
    if not rewritten(opt):
        for block in opt.report.blocks:
            assert block.status == "refused"
            assert len(block.reason.split()) > 3, f"no sentence: {block.reason!r}"
            assert "hexa_fx itself failed" not in block.reason


def _equal_in(
    v: Variant, model: torch.nn.Module, opt: torch.nn.Module, dtype: torch.dtype, sizes: Iterable[tuple[int, int]]
) -> None:
    """At these sizes, in both modes, and again after parameters and buffers changed."""
    if v.name == "refuse_call_parity":
        return  # its result depends on how often it was called
    calls = [(batch, seq, train) for batch, seq in sizes for train in (False, True)]
    for batch, seq, train in calls:
        args, kwargs = v.inputs(batch, seq, dtype, 5)
        found = compare(model, opt, args, kwargs, train=train and v.train, seed=3)
        assert found.within(TOLERANCE[dtype]), f"{dtype}, batch {batch}, seq {seq}, train {train}: {found}"
    if v.expect == "rewritten" and not v.gap:
        counted = Counted(opt)  # which has analysed both modes by now
        for batch, seq, train in calls:
            counted.copied.train(train)
            assert counted.run(*v.inputs(batch, seq, dtype, 5)), (
                f"batch {batch}, seq {seq}, train {train}: the original code ran"
            )

    perturb(model, opt)
    for train in (False, True):
        args, kwargs = v.inputs(3, 5, dtype, 6)
        found = compare(model, opt, args, kwargs, train=train and v.train, seed=3)
        assert found.within(TOLERANCE[dtype]), f"{dtype}, after parameters and buffers changed, train {train}: {found}"


REPRESENTATIVES = [
    v
    for v in VARIANTS
    if v.name in ("loop_onehot_index_add", "loop_stacked_gate_up", "sorted_split_counts", "capacity_gshard_top2")
]


@cache
def shared(name: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """One of them and its optimized form, for tests that leave both as they are."""
    return optimized(by_name(name), torch.float64)


@pytest.mark.parametrize("v", REPRESENTATIVES, ids=lambda v: v.name)
def test_state_dict_both_ways(v: Variant) -> None:
    """A state saved from either loads into the other, and the loaded weights are used."""
    model, opt = optimized(v, torch.float64)
    fresh = v.make(9).to(torch.float64)
    model_inputs = v.inputs(3, 5, torch.float64, 2)
    opt.load_state_dict(copy.deepcopy(fresh.state_dict()))
    assert compare(fresh, opt, *model_inputs).within(1e-10)
    again = v.make(4).to(torch.float64)
    again.load_state_dict(opt.state_dict())
    assert compare(fresh, again, *model_inputs).within(0.0)
    assert compare(opt, model, *model_inputs).within(1e-10), "optimize shares parameters with its argument"


@pytest.mark.parametrize("v", REPRESENTATIVES, ids=lambda v: v.name)
def test_zero_tokens(v: Variant) -> None:
    """A batch of no tokens gives what the original gives, be it an empty tensor or an error."""
    model, opt = shared(v.name)
    x = torch.zeros(0, 7, 12, dtype=torch.float64)
    try:
        model(x)
    except Exception:
        pytest.skip("the original rejects an empty batch")
    assert compare(model, opt, (x,)).within(1e-10)


@pytest.mark.parametrize("v", REPRESENTATIVES, ids=lambda v: v.name)
def test_not_contiguous(v: Variant) -> None:
    model, opt = shared(v.name)
    x = torch.randn(2, 12, 7, dtype=torch.float64).transpose(1, 2)
    try:
        model(x)
    except RuntimeError:
        pytest.skip("the original wants a contiguous input")
    assert compare(model, opt, (x,)).within(1e-10)


@pytest.mark.parametrize("v", REPRESENTATIVES, ids=lambda v: v.name)
def test_nan_spreads_alike(v: Variant) -> None:
    """A NaN in one token stays in the rows in which the original has it.

    One-hot dispatch multiplies every token by zeros and so spreads a NaN to all of them; the rewritten block does not.
    """
    model, opt = shared(v.name)
    x = torch.randn(2, 7, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[0, 3, 2] = float("nan")
    with torch.no_grad():
        reference, value = (_first(m(x)) for m in (model, opt))
    assert value[0, 3].isnan().all()
    assert not (value.isnan() & ~reference.isnan()).any()
    if not v.name.startswith("capacity"):
        assert torch.equal(value.isnan(), reference.isnan())


def _first(output: object) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def test_registry_is_as_large_as_promised() -> None:
    names = [v.name for v in VARIANTS]
    assert len(set(names)) == len(names)
    assert sum(v.expect != "refused" for v in VARIANTS) >= 60
    assert sum(v.expect == "refused" for v in VARIANTS) >= 15


def test_docs_name_every_block() -> None:
    """docs/patterns.md is made by tests.zoo.pattern_table; a new block must be in it."""
    text = (pathlib.Path(__file__).parents[1] / "docs" / "patterns.md").read_text()
    missing = [v.name for v in VARIANTS if f"| {v.name} |" not in text]
    assert not missing, f"run python -m tests.zoo.pattern_table --write docs/patterns.md: {missing}"
