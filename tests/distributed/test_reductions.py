"""Weight gradients that are summed while backward goes on: only where autograd would have done nothing but add."""

import pytest
import torch
from harness import run
from models import KINDS, MODES, Net, batch, cut, gradient_pairs, install, largest, loss_sum, make_plan, own

from hexa_fx.distributed import gradients
from hexa_fx.distributed.gradients import load_balancing_loss, unscale_, weighted_loss

THREE = [KINDS["concat-kn"], KINDS["mlp"], KINDS["split"]]


def plan_of(**extra):
    return make_plan(2, "uneven", MODES["data"], THREE, slots=2, **extra)


def both(rank, plan, microbatches=1):
    """Backward of a partitioned model and of one process, ``microbatches`` times."""
    model, whole = Net(THREE), Net(THREE)
    installed = install(model, plan)
    mine = own(plan.batch, rank)
    return model, whole, installed, [(batch(sum(plan.batch), seed=i), mine) for i in range(microbatches)]


def accumulated(rank, world, plan):
    model, whole, installed, data = both(rank, plan, 3)
    for (x, target), mine in data:
        loss_sum(model(x[mine]), target[mine]).backward()
        loss_sum(whole(x), target).backward()
    return largest(gradient_pairs(model, whole, installed.session)), installed.session.reductions.deferred


def test_sums_are_deferred_and_accumulate():
    for worst, deferred in run(2, accumulated, plan_of()):
        assert worst < 1e-10
        assert deferred == 9  # three layers, three backwards


def hooked(rank, world, plan):
    """A hook sees the whole gradient at once; another one runs when it was added."""
    model, whole, installed, [((x, target), mine)] = both(rank, plan)
    seen, added = {}, []
    model.layers[1].w1.register_hook(lambda g: seen.update(w1=g.clone()))
    model.layers[2].w2.register_post_accumulate_grad_hook(lambda p: added.append(p.grad.clone()))
    loss_sum(model(x[mine]), target[mine]).backward()
    loss_sum(whole(x), target).backward()
    pairs = gradient_pairs(model, whole, installed.session)
    pairs.append((seen["w1"], cut(installed.session, "layers.1.w1", whole.layers[1].w1.grad)))
    pairs.append((added[0], cut(installed.session, "layers.2.w2", whole.layers[2].w2.grad)))
    return largest(pairs), installed.session.reductions.deferred


def test_hooks_get_their_gradients():
    for worst, deferred in run(2, hooked, plan_of()):
        assert worst < 1e-10
        assert deferred == 1  # the layer without hooks


def asked_for(rank, world, plan):
    """torch.autograd.grad returns gradients and adds none."""
    model, whole, installed, [((x, target), mine)] = both(rank, plan)
    names = [f"layers.{i}.{name}" for i in range(3) for name in ("w1", "w2")]
    ours, theirs = dict(model.named_parameters()), dict(whole.named_parameters())
    found = torch.autograd.grad(loss_sum(model(x[mine]), target[mine]), [ours[name] for name in names])
    expected = torch.autograd.grad(loss_sum(whole(x), target), [theirs[name] for name in names])
    untouched = all(p.grad is None for p in model.parameters())
    pairs = [(g, cut(installed.session, name, e)) for name, g, e in zip(names, found, expected)]
    loss_sum(model(x[mine]), target[mine]).backward(inputs=[ours["layers.0.w1"], ours["layers.0.b1"]])  # and not w2
    only = [name for name, p in ours.items() if p.grad is not None]
    pairs.append((ours["layers.0.w1"].grad, cut(installed.session, "layers.0.w1", expected[0])))
    return largest(pairs), untouched, only


def test_gradients_as_values():
    for worst, untouched, only in run(2, asked_for, plan_of()):
        assert worst < 1e-10
        assert untouched
        assert only == ["layers.0.w1", "layers.0.b1"]


def interrupted(rank, world, plan):
    """An error in the middle of backward on all ranks; the next step is as if nothing had happened."""
    model, whole, installed, [((x, target), mine)] = both(rank, plan)
    session = installed.session
    session.follow(model)

    def fail(_):
        raise ValueError("by the user")

    handle = model.layers[1].wg.register_hook(fail)
    with pytest.raises(ValueError, match="by the user"):
        loss_sum(model(x[mine]), target[mine]).backward()
    handle.remove()
    model.zero_grad()
    loss_sum(model(x[mine]), target[mine]).backward()
    loss_sum(whole(x), target).backward()
    pairs = gradient_pairs(model, whole, installed.session)
    handle = model.layers[1].register_forward_pre_hook(lambda *_: fail(None))
    with pytest.raises(ValueError, match="by the user"):
        model(x[mine])
    handle.remove()
    pairs.append((model(x[mine]), whole(x)[mine]))
    of_job = session.groups.host._get_backend(torch.device("cpu")).options._timeout
    return largest(pairs), of_job.total_seconds()


@pytest.mark.parametrize("mode", ["data", "model"])
def test_steps_that_an_error_breaks_off(mode):
    for worst, timeout in run(2, interrupted, make_plan(2, "uneven", MODES[mode], THREE, slots=2)):
        assert worst < 1e-10
        assert timeout == 120  # what the job's process group was given


def first_gathers(rank, world, plan):
    """From the second pass on, the first layers' weights travel before anything of the model runs."""
    model, _, installed, [((x, target), mine)] = both(rank, plan)
    cache = installed.session.cache
    installed.session.follow(model)
    counts = []
    model.layers[0].register_forward_pre_hook(lambda *_: counts.append(cache.gathers))
    for _ in range(3):
        before = cache.gathers
        loss_sum(model(x[mine]), target[mine]).backward()
        counts[-1] -= before
    return counts, cache.gathers


@pytest.mark.parametrize("slots", [1, 2])
def test_gathers_start_with_the_models_forward(slots):
    plan = make_plan(2, "uneven", MODES["data"], THREE, slots=slots)
    for counts, total in run(2, first_gathers, plan):
        assert counts == [0, slots, slots]
        assert total == 3 * (6 - slots)  # no gather more than without


def overflowing(rank, world, plan, ours):
    """Only rank 1's experts overflow; both ranks must skip the step."""
    model = Net(THREE, torch.float32)
    session = install(model, plan).session
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    x, target = batch(sum(plan.batch), dtype=torch.float32)
    mine = own(plan.batch, rank)
    scaler.scale(loss_sum(model(x[mine]), target[mine])).backward()
    if rank == 1:
        model.layers[1].w1.grad.view(-1)[0] = float("inf")
    before = model.layers[0].w2.detach().clone()
    if ours:
        unscale_(scaler, optimizer, session)
    scaler.step(optimizer)
    scaler.update()
    return bool(torch.equal(before, model.layers[0].w2)), scaler.get_scale()


def test_all_ranks_skip_a_step_that_overflowed_on_one():
    assert run(2, overflowing, plan_of(), True) == [(True, 2.0), (True, 2.0)]
    assert run(2, overflowing, plan_of(), False) == [(False, 4.0), (True, 2.0)]


def balancing(rank, world, plan, ours):
    def loss_of(logits, index, session=None):
        probabilities = torch.softmax(logits, -1)
        if session is not None:
            return load_balancing_loss(session, probabilities, index)
        share = torch.bincount(index.flatten(), minlength=4).double() / len(logits)
        return 4 * (share * probabilities.mean(0)).sum()

    session = install(Net(THREE), plan).session
    logits = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    index = logits.detach().topk(2).indices
    mine = own(plan.batch, rank)
    expected = torch.autograd.grad(loss_of(logits, index), logits)[0][mine]
    if ours:
        part = loss_of(logits[mine], index[mine], session)
    else:
        part = weighted_loss(session, loss_of(logits[mine], index[mine]), plan.batch[rank])
    return largest([(torch.autograd.grad(part, logits)[0][mine], expected)])


def test_load_balancing_loss_of_the_global_batch():
    assert max(run(2, balancing, plan_of(), True)) < 1e-12
    assert max(run(2, balancing, plan_of(), False)) > 1e-4


def sent_between_devices(rank, world):
    """Types of what `sync_gradients` sends over the main group."""
    model, _, installed, ((data, mine),) = both(rank, plan_of())
    x, target = (t[mine] for t in data)
    loss_sum(model(x), target).backward()
    sent = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "all_reduce_", lambda x, *_: sent.append(x.dtype))
        gradients.sync_gradients(model, installed.session)
    return sent


def test_which_gradients_there_are_is_no_question_to_the_device():
    """The host would wait for it, once a step."""
    assert run(2, sent_between_devices) == [[torch.float64]] * 2
