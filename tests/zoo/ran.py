"""Whether rewritten forwards ran, block by block, by the report's counts: what it calls rewritten need not be what runs."""

from typing import Any

import torch
from torch import nn


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
