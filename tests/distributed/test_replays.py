"""Partitioned layers are played again like others, with the results of the general path: on stand-ins for cards that leave numbers.

Weights of a data-centric layer are views of a slot that other layers overwrite, so a replay must take their addresses anew, and in
backward those of the slot that was gathered again.
"""

import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from harness import run
from models import KINDS, MODES, Net, install, loss_sum, make_plan
from models import D as WIDTH

from hexa_fx.cuda import choosing as cuda_choosing
from hexa_fx.cuda import fallback as cuda_fallback
from tests.cuda.filling import Filling

STEPS = 3


def trained(rank, kinds, plan, rows, replaying):
    """Output and gradients of every step, and how often the general path ran in each."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        cards = Filling()
        cards.stand_in(patch, Path(folder))
        cards.be_hopper(patch)
        cards.take_over(patch)
        cards.replaying = replaying
        model = Net(kinds, torch.bfloat16)
        installed = install(model, plan)
        installed.session.follow(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        found, general = [], []
        for step in range(STEPS):
            cards.general = 0
            generator = torch.Generator().manual_seed(10 * step + rank)
            x = torch.randn(rows[rank], WIDTH, generator=generator).to(torch.bfloat16)
            y = model(x)
            loss_sum(y, torch.zeros_like(y)).backward()
            found.append([y.detach().clone(), *(p.grad.clone() for p in model.parameters())])
            general.append(cards.general)
            optimizer.step()
            optimizer.zero_grad()
        assert not cuda_fallback.fallbacks
        installed.session.close()
        cuda_choosing.forget_choices()
    return found, general


def both_ways(rank, world, kinds, plan, rows):
    """How often the general path ran in each step, with replays and without. What comes out is the same."""
    (replayed, counts), (once, calls) = (trained(rank, kinds, plan, rows, replaying) for replaying in (True, False))
    for mine, theirs in zip(replayed, once, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    if rows[rank]:
        assert all(not torch.equal(a[0], b[0]) for a, b in pairwise(replayed))
    return counts, calls


ALL, NONE = (6, 0), (0, 0)
"""Calls in a step, forward and backward of three layers, and how many of them run on the general path in the end."""

CASES = {
    "data, two slots": ("mlp", "data", "even", 2, (200, 200), (ALL, ALL)),
    "data, one slot": ("mlp", "data", "even", 1, (200, 200), (ALL, ALL)),
    "data, uneven": ("mlp", "data", "uneven", 2, (240, 130), (ALL, ALL)),
    "model": ("mlp", "model", "uneven", 2, (100, 100), (ALL, ALL)),
    "model, gated": ("concat", "model", "uneven", 2, (120, 90), (ALL, ALL)),
    "model, a rank without channels": ("mlp", "model", "h0", 2, (100, 100), (ALL, NONE)),
    "mixed": ("mlp", "mixed", "uneven", 2, (150, 150), (ALL, ALL)),
}


@pytest.mark.parametrize("case", CASES)
def test_partitioned_layers_are_played_again(case):
    kind, mode, split, slots, rows, wanted = CASES[case]
    kinds = [KINDS[kind]] * 3
    plan = make_plan(2, split, MODES[mode], kinds, slots=slots)
    for (counts, calls), (every, late) in zip(run(2, both_ways, kinds, plan, rows), wanted, strict=True):
        assert calls == [every] * STEPS
        assert counts[-1] == late
