"""Save under one plan; load under another, on another number of ranks, or on one device. Optimizer state too."""

import os

import pytest
import torch
from harness import run, start
from models import KINDS, MODES, D, Net, batch, cut, install, largest, loss_sum, make_plan, own
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from hexa_fx.distributed import checkpoint
from hexa_fx.distributed.gradients import sync_gradients
from hexa_fx.errors import InputError, PlanError

THREE = [KINDS["concat"], KINDS["interleaved"], KINDS["split"]]


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def step(model, optimizer, x, target, session=None):
    (loss_sum(model(x), target) / 7).backward()
    if session is not None:
        sync_gradients(model, session)
    optimizer.step()
    optimizer.zero_grad()


def saved(rank, world, plan, path):
    model = Net(THREE)
    session = install(model, plan).session
    optimizer = optimizer_of(model)
    x, target = batch(sum(plan.batch))
    mine = own(plan.batch, rank)
    for _ in range(2):
        step(model, optimizer, x[mine], target[mine], session)
    checkpoint.save(path, model, session, optimizer)


def reference(total):
    model = Net(THREE)
    optimizer = optimizer_of(model)
    x, target = batch(total)
    for _ in range(2):
        step(model, optimizer, x, target)
    return model, optimizer


def loaded(rank, world, plan, path, total):
    """Load, take a third step, and compare everything with one process that took three."""
    whole, theirs = reference(total)
    model = Net(THREE)
    for p in model.parameters():
        torch.nn.init.zeros_(p)
    installed = install(model, plan)
    optimizer = optimizer_of(model)
    optimizer.param_groups[0]["lr"] = 1.0
    checkpoint.load(path, model, installed.session, optimizer)
    assert optimizer.param_groups[0]["lr"] == 3e-3
    x, target = batch(sum(plan.batch))
    mine = own(plan.batch, rank)
    x7, target7 = batch(sum(plan.batch))
    (loss_sum(model(x[mine]), target[mine]) / 7).backward()
    sync_gradients(model, installed.session)
    optimizer.step()
    (loss_sum(whole(x7), target7) / 7).backward()
    theirs.step()
    names = dict(whole.named_parameters())
    pairs = [(p, cut(installed.session, n, names[n])) for n, p in model.named_parameters()]
    for name, p in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            pairs.append((optimizer.state[p][key], cut(installed.session, name, theirs.state[names[name]][key])))
    assert all(int(state["step"]) == 3 for state in optimizer.state.values())
    return largest(pairs)


def test_load_under_other_plans(tmp_path):
    path = str(tmp_path / "checkpoint")
    plan = make_plan(2, "uneven", MODES["mixed"], THREE)
    run(2, saved, plan, path)
    assert checkpoint.is_complete(path)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint"]
    for world, split, mode in ((2, "h0", "data"), (4, "zeros", "model"), (1, "even", "mixed")):
        other = make_plan(world, split, MODES[mode], THREE)
        assert max(run(world, loaded, other, path, 7)) < 1e-10, (world, split)
    # and the unpartitioned model, in this process
    whole, theirs = reference(7)
    model = Net(THREE)
    optimizer = optimizer_of(model)
    checkpoint.load(path, model, None, optimizer)
    pairs = list(zip(model.parameters(), whole.parameters()))
    pairs += [
        (optimizer.state[p]["exp_avg"], theirs.state[q]["exp_avg"])
        for p, q in zip(model.parameters(), whole.parameters())
    ]
    assert largest(pairs) < 1e-10


class WithMore(Net):
    """Beside the layers a part that gets no gradient, and one that is trained only in the second half."""

    def __init__(self):
        super().__init__(THREE)
        self.unused, self.scale = torch.nn.Linear(3, 3).double(), torch.nn.Parameter(torch.ones(D, dtype=torch.float64))
        self.scale.requires_grad_(False)

    def forward(self, x):
        return super().forward(x) * self.scale


def several_of(model):
    """An optimizer for what is in stacks, another for everything else, and their schedules."""
    stacked = [p for p in model.parameters() if p.dim() == 3]
    others = [p for p in model.parameters() if p.dim() < 3 and p.requires_grad]
    optimizers = [torch.optim.AdamW(stacked, lr=1e-2, amsgrad=True), torch.optim.SGD(others, lr=0.1, momentum=0.9)]
    return optimizers, [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7) for optimizer in optimizers]


def steps(model, made, number, session=None, rows=slice(None)):
    x, target = batch(7)
    optimizers, schedules = made
    for _ in range(number):
        (loss_sum(model(x[rows]), target[rows]) / 7).backward()
        if session is not None:
            sync_gradients(model, session)
        for each in (*optimizers, *schedules):
            each.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


def continued(rank, world, first, second, path):
    """Two optimizers go on under another plan, with a parameter that begins to be trained."""
    torch.manual_seed(0)
    model, whole = WithMore(), WithMore()
    session = install(model, first).session
    made, theirs = several_of(model), several_of(whole)
    steps(model, made, 2, session, own((5, 2), rank))
    steps(whole, theirs, 2)
    checkpoint.save(path, model, session, made[0])
    again = WithMore()
    installed = install(again, second)
    for each in (again, whole):
        each.scale.requires_grad_(True)
    late, schedules = several_of(again)
    checkpoint.load(path, again, installed.session, late)
    for schedule, before in zip(schedules, made[1]):
        schedule.load_state_dict(before.state_dict())
    theirs[0][1].add_param_group({"params": [whole.scale], "lr": theirs[0][1].param_groups[0]["lr"], "momentum": 0.9})
    theirs[1][1].base_lrs.append(0.1)
    steps(again, (late, schedules), 2, installed.session, own((3, 4), rank))
    steps(whole, theirs, 2)
    names = dict(whole.named_parameters())
    of_one = [p for p in model.parameters() if p.dim() == 3]
    partly = torch.optim.AdamW(of_one[:1] + [model.unused.weight])
    of_one[0].grad = torch.zeros_like(of_one[0])
    partly.step()
    partly.add_param_group({"params": of_one[1:]})
    with pytest.raises(InputError, match="of which this optimizer has none after its steps"):
        checkpoint.load(path, model, session, partly)
    return largest([(p, cut(installed.session, n, names[n])) for n, p in again.named_parameters() if "unused" not in n])


def test_several_optimizers_and_parameters_without_state(tmp_path):
    plans = make_plan(2, "uneven", MODES["mixed"], THREE), make_plan(2, "h0", MODES["data"], THREE)
    assert max(run(2, continued, *plans, str(tmp_path / "one"))) < 1e-12


class RowSums(torch.optim.SGD):
    """Works on single elements, and keeps something that is of rows."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p]["row_sum"] = p.grad.sum(-1)
        return super().step(closure)


def factored(rank, world, plan):
    model = Net(THREE)
    session = install(model, plan).session
    optimizer = RowSums(model.parameters(), lr=0.1)
    steps(model, ([optimizer], []), 1, session, own(plan.batch, rank))
    with pytest.raises(PlanError, match=r"keeps 'row_sum' of 'layers.0.w1' as .* only what it keeps of every element"):
        checkpoint.state_dict(model, session, optimizer)


def test_factored_state_of_slices_is_refused():
    run(2, factored, make_plan(2, "uneven", MODES["data"], THREE))


def test_what_torch_saved_of_the_original_model_loads_and_the_other_way_round(tmp_path):
    whole, theirs = reference(7)
    saved = {"model": whole.state_dict(), "optimizer": get_optimizer_state_dict(whole, theirs)}
    torch.distributed.checkpoint.save(saved, checkpoint_id=tmp_path / "torch", no_dist=True)
    checkpoint.save(tmp_path / "ours", whole, None, theirs)
    for path in ("torch", "ours"):
        model = Net(THREE)
        optimizer = optimizer_of(model)
        if path == "torch":
            checkpoint.load(tmp_path / path, model, None, optimizer)
        else:
            into = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
            torch.distributed.checkpoint.load(into, checkpoint_id=tmp_path / path, no_dist=True)
            set_optimizer_state_dict(model, optimizer, into["optimizer"])
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(p, q)
            torch.testing.assert_close(optimizer.state[p], theirs.state[q])


def test_gradients_are_kept_and_do_not_keep_state_from_loading(tmp_path):
    whole, theirs = reference(7)
    checkpoint.save(tmp_path / "one", whole, None, theirs)
    model = Net(THREE)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer = optimizer_of(model)
    checkpoint.load(tmp_path / "one", model, None, optimizer)
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        assert bool((p.grad == 1).all())
        torch.testing.assert_close(optimizer.state[p], theirs.state[q])


def test_an_optimizer_of_another_model_is_refused():
    with pytest.raises(InputError, match="build it on this model"):
        checkpoint.state_dict(Net(THREE), None, optimizer_of(Net(THREE)))


def loaded_parameters(rank, world, plan, path):
    """... after what would be taken for slices, or for whole parameters, was refused."""
    whole = Net(THREE)
    model = Net(THREE)
    for p in model.parameters():
        torch.nn.init.zeros_(p)
    installed = install(model, plan)
    with pytest.raises(InputError, match="not a wrapper or a part"):
        checkpoint.state_dict(torch.nn.Sequential(model), installed.session)
    with pytest.raises(InputError, match="does not fit: Missing key in checkpoint state_dict: optimizer"):
        checkpoint.load(path, model, installed.session, optimizer_of(model))
    checkpoint.load(path, model, installed.session)
    names = dict(whole.named_parameters())
    return largest([(p, cut(installed.session, n, names[n])) for n, p in model.named_parameters()])


def test_checkpoint_of_one_device_loads_into_a_plan(tmp_path):
    path = str(tmp_path / "one")
    checkpoint.save(path, Net(THREE))
    assert max(run(2, loaded_parameters, make_plan(2, "uneven", MODES["data"], THREE), path)) == 0.0


def dies_while_saving(rank, world, plan, path):
    model = Net(THREE)
    session = install(model, plan).session
    if rank == 1:

        def die(*_, **__):
            os._exit(3)

        checkpoint._dcp_save = die
    checkpoint.save(path, model, session)


def test_a_crash_leaves_the_old_checkpoint(tmp_path):
    path = str(tmp_path / "checkpoint")
    plan = make_plan(2, "uneven", MODES["data"], THREE)
    run(2, saved, plan, path)
    before = sorted(os.listdir(path))
    outcomes = start(2, dies_while_saving, plan, path)
    assert outcomes[0][0] == "error"
    assert "RankError" in outcomes[0][1]
    assert sorted(os.listdir(path)) == before
    model = Net(THREE)
    checkpoint.load(path, model)  # still loads
    # the instant at which a job has taken the old one away and not yet put the new one there
    os.rename(path, path + ".old")
    checkpoint.load(path, model)
    os.remove(os.path.join(path + ".old", ".metadata"))
    with pytest.raises(InputError, match="no complete checkpoint"):
        checkpoint.load(path, model)


def dies_while_loading(rank, world, plan, path):
    model = Net(THREE)
    session = install(model, plan).session
    if rank == 1:
        checkpoint._dcp_load = lambda *_, **__: os._exit(3)
    checkpoint.load(path, model, session)


def test_a_crash_while_loading_is_an_error(tmp_path):
    path = str(tmp_path / "checkpoint")
    plan = make_plan(2, "uneven", MODES["data"], THREE)
    run(2, saved, plan, path)
    outcomes = start(2, dies_while_loading, plan, path)
    kind, text = outcomes[0]
    assert kind == "error"
    assert "RankError" in text
    assert "failed in reading a checkpoint on rank 0" in text
