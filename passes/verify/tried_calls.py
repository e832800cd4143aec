"""Calls of a comparison: made repeatedly, with the errors that they raise as values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hexa_fx.isolation.outcome import Outcome
from hexa_fx.isolation.random_state import random_states
from hexa_fx.isolation.size import is_out_of_memory
from hexa_fx.runtime.guards import GuardMiss


def tried(run: Callable[[], Outcome]) -> Outcome | Exception:
    """What ``run`` gives, or the error that it raises. Where memory is full, the error goes on to the caller."""
    try:
        return run()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return error


class LateMiss(RuntimeError):
    """A condition left a call to the original after random numbers were drawn, so that the original would draw others."""


def missing_early(call: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``call``, and does not let it miss a guard once it has drawn random numbers of its own."""

    def run(*args: Any, **kwargs: Any) -> Any:
        before = random_states()
        try:
            return call(*args, **kwargs)
        except GuardMiss as miss:
            if miss.called or all(map(torch.equal, before, random_states())):
                raise
            raise LateMiss(f"{miss}, which it asks after it has drawn random numbers") from None

    return run


def repeated(call: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """A function that calls ``call`` repeatedly and returns the last result."""

    def run(*args: Any, **kwargs: Any) -> Any:
        for _ in range(calls - 1):
            call(*args, **kwargs)
        return call(*args, **kwargs)

    return run
