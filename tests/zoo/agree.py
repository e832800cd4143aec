"""A model and its optimized form on calls that it was not optimized on: that they agree, and that rewritten forwards ran."""

from typing import Any

import torch
from torch import nn

import hexa_fx
from tests.zoo.compare import Counted, compare
from tests.zoo.variant import D


def tokens(*sizes: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """(*sizes, D), of a seed that is the first size."""
    return torch.randn(*sizes, D, dtype=dtype, generator=torch.Generator().manual_seed(sizes[0]))


def agree(original: nn.Module, optimized: nn.Module, *calls: Any, train: bool = True, tolerance: float = 1e-10) -> None:
    """Every call, which is a tensor or a tuple of arguments, runs rewritten and leaves what the original leaves."""
    given = [call if isinstance(call, tuple) else (call,) for call in calls]
    for args in given:
        found = compare(original, optimized, args, train=train)
        assert found.within(tolerance), ([getattr(value, "shape", value) for value in args], found)
    counted = Counted(optimized.train(train))
    for args in given:
        assert counted.run(args), str(optimized.report)


def rewritten(model: nn.Module, example: Any, *calls: Any, train: bool = True, tolerance: float = 1e-10) -> Any:
    """The model optimized on an example, something of which is rewritten, and which agrees with it on the calls."""
    optimized = hexa_fx.optimize(model, example)
    assert optimized.report.rewritten, str(optimized.report)
    agree(model, optimized, *calls, train=train, tolerance=tolerance)
    return optimized


def own_code_runs(model: nn.Module, *args: Any, **kwargs: Any) -> list[str]:
    """The blocks of an optimized model that are reported as rewritten and run their own code in a call in eval or train mode.

    The model's mode stays as it was.
    """
    training, found = model.training, []
    for train in (False, True):
        before = {block.path: block.calls.rewritten for block in model.report.rewritten}
        with torch.random.fork_rng(devices=[]):
            model.train(train)(*args, **kwargs)
        own = [block for block in model.report.rewritten if block.calls.rewritten <= before[block.path]]
        found += [f"{block.name} in {'train' if train else 'eval'} mode ({dict(block.calls.own)})" for block in own]
    model.train(training)
    return found
