"""Judges mutants with dormant features: optimized while the feature sleeps, compared when it is awake.

    python -m tests.zoo.judge --family dormant --log dormant.jsonl --judged 5000

A refused block and one whose guards make it run its own code are right; a wrong result, and an error where the original gives
none, are not.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.zoo import pattern_table
from tests.zoo.compare import compare, operators_run
from tests.zoo.dormant import Dormant, Feature, dormant, owners


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: ``invalid`` (its own code does not run or does not repeat itself), ``refused``, ``equal``, or
    ``WRONG`` with the difference. `tests.zoo.judge_dormant` knows two more.
    """

    outcome: str
    detail: str = ""


SIZES = ((2, 7), (3, 5), (1, 1), (2, 16))
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-4}


def judge_seed(seed: int) -> tuple[Verdict, str]:
    """The verdict on the mutant of that number, and what was changed.

    Beside the outcomes of `tests.zoo.judge`: ``own code`` if it is rewritten and runs its own code once the feature is awake, and
    ``asleep`` if that changes nothing.
    """
    case = dormant(seed)
    if case is None:
        return Verdict("nothing to mutate"), ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return judge(case), case.what
    except Exception as error:
        return Verdict("CRASH", f"{type(error).__name__}: {error}"), case.what
    finally:
        case.feature.outside(False)


def judge(case: Dormant) -> Verdict:
    dtype = torch.float64 if torch.float64 in case.variant.dtypes else torch.float32
    model = case.variant.make(0).to(dtype).eval()
    args, kwargs = _call(case, 2, 7, dtype, 0, awake=False)
    try:
        if not compare(model, model, args, kwargs).within(0.0):
            return Verdict("invalid", "does not repeat itself")
        slept = [_output(model, *_call(case, *size, dtype, 7, awake=False)) for size in SIZES]
    except Exception as error:
        return Verdict("invalid", type(error).__name__)
    opt = pattern_table.optimized(model, args, kwargs)
    if not any(block.status == "rewritten" for block in opt.report.blocks):
        return Verdict("refused", "; ".join(block.reason for block in opt.report.blocks) or "no candidate")
    for size in SIZES:
        call = _call(case, *size, dtype, 5, awake=False)
        found = _differ(case, model, opt, call, dtype, nan=False)
        if found:
            return Verdict("WRONG", f"asleep, {size}: {found}")
    dtype = _wake(case, model, opt, dtype)
    return _awake(case, model, opt, dtype, slept)


def _awake(case: Dormant, model: nn.Module, opt: nn.Module, dtype: torch.dtype, slept: list[torch.Tensor]) -> Verdict:
    moved, ran = False, False
    for size, before in zip(SIZES, slept):
        for call in _calls(case, size, dtype):
            found = _differ(case, model, opt, call, dtype, nan=bool(case.feature.poison))
            if found:
                return Verdict("WRONG", f"awake, {size}: {found}")
            ran |= _runs(opt, call)
        try:
            now = _output(model, *_call(case, *size, dtype, 7, awake=True))
            moved |= now.shape != before.shape or not torch.allclose(now.to(before), before, rtol=1e-3, equal_nan=True)
        except Exception:
            moved = True
    if not moved:
        return Verdict("asleep")
    return Verdict("equal" if ran else "own code")


def _wake(case: Dormant, model: nn.Module, opt: nn.Module, dtype: torch.dtype) -> torch.dtype:
    case.feature.outside(True)
    for block in (model, opt):
        block.to(case.feature.dtype or dtype)
        for module in owners(block, case.owner):
            case.feature.wake(module)
        if case.feature.poison:
            _poison(block, case.feature)
    return next((p.dtype for p in model.parameters()), dtype)


def _poison(block: nn.Module, feature: Feature) -> None:
    """One element of the last matrix."""
    matrices = [p for p in block.parameters() if p.dim() > 1]
    with torch.no_grad():
        matrices[-1][(-1,) * matrices[-1].dim()] = feature.poison


def _calls(case: Dormant, size: tuple[int, int], dtype: torch.dtype) -> Iterator[tuple[tuple, dict]]:
    """Random tokens, and equal ones, which all go to the same experts."""
    args, kwargs = _call(case, *size, dtype, 5, awake=True)
    yield args, kwargs
    yield tuple(torch.ones_like(a) * 0.3 * case.feature.scale if _is_float(a) else a for a in args), kwargs


def _call(
    case: Dormant, batch: int, seq: int, dtype: torch.dtype, seed: int, awake: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = case.variant.inputs(batch, seq, dtype, seed)
    if awake and case.feature.scale != 1:
        args = (args[0] * case.feature.scale, *args[1:])
    if awake and case.feature.poison and seed == 5:
        args = (args[0].clone(memory_format=torch.contiguous_format), *args[1:])
        args[0].view(-1)[0] = case.feature.poison
    if case.masked:
        mask = torch.ones(batch * seq, dtype=torch.bool)
        if awake:
            mask = torch.rand(batch * seq, generator=torch.Generator().manual_seed(seed)) < 0.6
        kwargs = {**kwargs, "dormant": mask.to(getattr(torch, case.masked))}
    return args, kwargs


def _differ(case: Dormant, model: nn.Module, opt: nn.Module, call: tuple, dtype: torch.dtype, nan: bool) -> str:
    args, kwargs = call
    gradients = not nan and case.feature.scale == 1
    for train in (False,) if nan else (False, True):
        train = train and case.variant.train and "dropout" not in case.what
        if _is_dropout(case):
            return _seeded(model, opt, call, dtype)
        try:
            if not compare(model, model, args, kwargs, train=train, backward=gradients).within(0.0) and not nan:
                continue
        except Exception as error:
            opt.train(train)
            if not _raises(opt, call):
                return f"the original raises {type(error).__name__}: {error}" if nan is False else ""
            continue
        if nan:
            return _where_finite(_drawn_alike(model, call), _drawn_alike(opt, call), dtype, args[0])
        found = compare(model, opt, args, kwargs, train=train, backward=gradients)
        if not found.within(_TOLERANCE[dtype]) and not _chaotic(model, call, train, found.forward):
            return f"train {train}: {found}"
    return ""


def _drawn_alike(model: nn.Module, call: tuple) -> torch.Tensor:
    torch.manual_seed(3)
    return _output(model.eval(), *call)


def _is_dropout(case: Dormant) -> bool:
    return case.what.split(": ")[1] == "dropout"


def _seeded(model: nn.Module, opt: nn.Module, call: tuple, dtype: torch.dtype) -> str:
    """Modes are left as they are: which submodule is in train mode is the point."""
    torch.manual_seed(3)
    try:
        one = _output(model, *call)
    except Exception as error:
        torch.manual_seed(3)
        return "" if _raises(opt, call) else f"with dropout, the original raises {type(error).__name__}: {error}"
    torch.manual_seed(3)
    found = _where_finite(one, _output(opt, *call), dtype)  # weights may be divided by a sum that dropout makes 0
    return f"with dropout, {found}" if found else ""


def _raises(opt: nn.Module, call: tuple) -> bool:
    try:
        _output(opt, *call)
    except Exception:
        return True
    return False


def _where_finite(one: torch.Tensor, two: torch.Tensor, dtype: torch.dtype, given: torch.Tensor | None = None) -> str:
    """One-hot dispatch spreads a NaN to every token; where the original has a number, that has to come.

    Not in the row of a token that is ``given`` as NaN, which the original may leave without an expert (docs/supported.md).
    """
    usual = one.isfinite()
    if given is not None and given.shape == one.shape:
        usual &= given.isfinite().all(-1, keepdim=True)
    scale = one[usual].abs().max().clamp(min=1e-6) if bool(usual.any()) else torch.ones(())
    fits = bool(((one - two)[usual].abs() <= _TOLERANCE[dtype] * scale).all())
    return "" if one.shape == two.shape and fits else "another number, or NaN, where the original is finite"


def _chaotic(model: nn.Module, call: tuple, train: bool, error: float) -> bool:
    """Whether rounding alone moves the original about as far."""
    args, kwargs = call
    moved = tuple(a * (1 + 4 * torch.finfo(a.dtype).eps) if _is_float(a) else a for a in args)
    model.train(train)
    torch.manual_seed(0)
    one = _output(model, args, kwargs)
    torch.manual_seed(0)
    two = _output(model, moved, kwargs)
    return float((one - two).abs().max() / one.abs().max().clamp(min=1e-6)) >= error / 100


def _runs(opt: nn.Module, call: tuple) -> bool:
    try:
        return operators_run(opt, *call) > 0
    except Exception:
        return False


def _output(model: nn.Module, args: tuple, kwargs: dict) -> torch.Tensor:
    with torch.no_grad():
        found = model(*[a.clone() if isinstance(a, torch.Tensor) else a for a in args], **kwargs)
    leaves = torch.utils._pytree.tree_leaves(vars(found) if hasattr(found, "__dataclass_fields__") else found)
    return next(leaf for leaf in leaves if _is_float(leaf))


def _is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
