"""What a partitioned layer makes the host do, counted: the host launches kernels, and small layers wait for it.

`benchmarks/partition_host.py` measures the time. These counts are exact, so that what was removed does not come back.
"""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from harness import run
from models import KINDS, MODES, Net, batch, install, loss_sum, make_plan

import hexa_fx
from hexa_fx.distributed import collectives, shared_cache

THREE = [KINDS["concat"]] * 3
OURS = str(Path(hexa_fx.__file__).parent / "distributed")
PARTS = (OURS, "torch/distributed", "torch/_library", "torch/_ops.py", "torch/autograd", "contextlib.py", "weakref.py")


def counted(step):
    """Calls of Python functions, by file, that belong to the partition: its own, and torch's that reach collectives."""
    calls = Counter()

    def note(frame, event, _):
        if event == "call":
            calls[frame.f_code.co_filename] += 1

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return sum(n for file, n in calls.items() if any(part in file for part in PARTS))


def python_calls(rank, world, plan):
    """Calls a layer of forward and of backward, once everything is known."""
    model = Net(THREE)
    installed = install(model, plan)
    installed.session.follow(model)
    x, target = batch(sum(plan.batch))
    for _ in range(2):
        loss_sum(model(x), target).backward()
    losses = []
    forward = counted(lambda: losses.append(loss_sum(model(x), target)))
    return forward / 3, counted(losses[0].backward) / 3


@pytest.mark.parametrize(("mode", "forward", "backward"), [("data", 98, 110), ("model", 70, 86)])
def test_python_calls_of_a_layer(mode, forward, backward):
    plan = make_plan(1, "even", MODES[mode], THREE, slots=2, static=True)
    ((in_forward, in_backward),) = run(1, python_calls, plan)
    # torch's own share differs a little between its versions
    assert 20 < in_forward <= forward
    assert 20 < in_backward <= backward


def launches(rank, world, plan):
    """Collectives, saved tensors that pass through hooks, and copies of weights, of one step."""
    seen = Counter()

    def noting(module, name, what):
        original = getattr(module, name)

        def noted(*args, **kwargs):
            seen[what] += 1
            return original(*args, **kwargs)

        setattr(module, name, noted)
        return lambda: setattr(module, name, original)

    model = Net(THREE)
    installed = install(model, plan)
    installed.session.follow(model)
    x, target = batch(sum(plan.batch))
    undo = [
        noting(collectives, "_gather", "gathers"),
        noting(collectives, "_scatter", "scatters"),
        noting(shared_cache.SavedTensors, "_pack", "saved"),
        noting(shared_cache.GatherSource, "of", "sources"),
        noting(torch, "_foreach_copy_", "copies"),
    ]
    steps = []
    try:
        for _ in range(3):
            seen.clear()
            loss_sum(model(x), target).backward()
            steps.append(dict(seen))
    finally:
        for back in undo:
            back()
    return steps


def test_launches_of_a_step():
    ((first, *later),) = run(1, launches, make_plan(1, "even", MODES["data"], THREE, slots=2, static=True))
    assert first["sources"] == 3
    for step in later:  # nothing is worked out again; two of three layers are still in a slot when backward begins
        assert step["gathers"] == 3 + 1
        assert step["scatters"] == 3
        assert step["copies"] == 4 + 3 + 3  # own rows of a gather, rows of the gradients, the sums of gradients
        assert "sources" not in step
        assert step["saved"] <= 3 * 9  # only of the experts


def test_launches_of_a_model_centric_step():
    ((_, *later),) = run(1, launches, make_plan(1, "even", MODES["model"], THREE, static=True))
    for step in later:
        assert step == {"gathers": 3 * (3 + 1), "scatters": 3 * (1 + 2)}  # no saved tensor passes through Python
