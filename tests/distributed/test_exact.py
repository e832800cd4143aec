"""Outputs and all gradients of a partitioned model equal those of one process on the global batch, in float64."""

import itertools

import pytest
from harness import run
from models import KINDS, MODES, SPLITS, Net, batch, gradient_pairs, install, loss_sum, make_plan, own


def errors(rank, plan, kinds, steps=1):
    """Largest difference of outputs and gradients to one process."""
    model = Net(kinds)
    whole = Net(kinds)
    installed = install(model, plan)
    total = sum(plan.batch)
    worst = 0.0
    for step in range(steps):
        x, target = batch(total, seed=step)
        mine = own(plan.batch, rank)
        x0, xr = x[mine].clone().requires_grad_(), x.clone().requires_grad_()
        y, yr = model(x0), whole(xr)
        (loss_sum(y, target[mine]) / total).backward()
        (loss_sum(yr, target) / total).backward()
        pairs = [(y, yr[mine]), (x0.grad, xr.grad[mine]), *gradient_pairs(model, whole, installed.session)]
        worst = max([worst, *(float((a - b).detach().abs().max()) for a, b in pairs if a.numel())])
        assert all(a.shape == b.shape for a, b in pairs)
        model.zero_grad(), whole.zero_grad()
    cache = installed.session.cache
    installed.session.close()
    return worst, cache.gathers, cache.nbytes


def many(rank, world, cases):
    """Several cases in one launch. Each is (name, plan arguments, kinds)."""
    out = {}
    for name, arguments, kinds in cases:
        out[name] = errors(rank, make_plan(world, kinds=kinds, **arguments), kinds, steps=2)
    return out


def cases(world, full):
    splits, modes, kinds = list(SPLITS[world]), list(MODES), list(KINDS)
    grid = itertools.product(splits, modes, kinds, (1, 2), (False, True), ("reduce_scatter", "all_reduce"))
    if not full:  # every value of every dimension, and every split with every mode
        grid = [
            (
                split,
                mode,
                kinds[(i * 3 + j) % len(kinds)],
                1 + (i + j) % 2,
                (i + j) % 2 == 0,
                ("reduce_scatter", "all_reduce")[i % 2],
            )
            for i, split in enumerate(splits)
            for j, mode in enumerate(modes)
        ]
    for split, mode, kind, slots, static, reduce in grid:
        arguments = {"split": split, "modes": MODES[mode], "slots": slots, "static": static, "reduce": reduce}
        yield f"{split}-{mode}-{kind}-{slots}-{static}-{reduce}", arguments, [KINDS[kind]] * 3


@pytest.mark.parametrize("world", [1, 2, 4])
def test_equals_one_process(world):
    for result in run(world, many, list(cases(world, full=False)), timeout=60):
        bad = {name: worst for name, (worst, _, _) in result.items() if not worst < 1e-10}
        assert not bad


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("world", [2, 4])
def test_equals_one_process_full_matrix(world):
    for result in run(world, many, list(cases(world, full=True)), timeout=1400):
        bad = {name: worst for name, (worst, _, _) in result.items() if not worst < 1e-10}
        assert not bad
