"""Counts the calls in which rewritten forwards ran to their end, block by block: what a report says need not be what runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from hexa_fx.runtime.install import HexaForward


@contextmanager
def calls_counted() -> Iterator[Counter[nn.Module]]:
    """A context in which calls that ran rewritten are counted, by module; those that fell back to the original's code are not."""
    counts: Counter[nn.Module] = Counter()
    plain = HexaForward.rewritten

    def rewritten(self: HexaForward, *args: Any, **kwargs: Any) -> Any:
        result = plain(self, *args, **kwargs)
        counts[self.module] += 1
        return result

    with mock.patch.object(HexaForward, "rewritten", rewritten):
        yield counts


def own_code_runs(model: nn.Module, *args: Any, **kwargs: Any) -> list[str]:
    """The blocks of an optimized model that are reported as rewritten and run their own code in a call in eval or train mode.

    Modes that the report excepts are not asked. The model's mode stays as it was.
    """
    training, found = model.training, []
    for train in (False, True):
        model.train(train)
        with calls_counted() as counts, torch.random.fork_rng(devices=[]):
            model(*args, **kwargs)
        mode = "train" if train else "eval"
        blocks = [b for b in model.report.rewritten if b.modes.get(mode, "rewritten") == "rewritten"]
        found += [f"{b.name} in {mode} mode" for b in blocks if not counts[model.get_submodule(b.path)]]
    model.train(training)
    return found
