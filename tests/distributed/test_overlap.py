"""The scheduling pass on whole-model graphs, and weight gradients that are summed while backward goes on: both exact."""

import copy

import pytest
import torch
import torch.fx as fx
from harness import run
from models import KINDS, MODES, Net, batch, cut, gradient_pairs, install, largest, loss_sum, make_plan, own, run_graph

from hexa_fx.distributed import gradients, nodes
from hexa_fx.distributed.collectives import all_gather_v
from hexa_fx.distributed.gradients import load_balancing_loss, unscale_, weighted_loss
from hexa_fx.errors import PlanError
from hexa_fx.ir import RewrittenBlock
from hexa_fx.passes.partition.collectives import Placement, partition_graph
from hexa_fx.passes.partition.install import install_plan
from hexa_fx.passes.partition.overlap import check_schedule, dependency_graph, overlap

THREE = [KINDS["concat"], KINDS["mlp"], KINDS["concat"]]


def whole_graph(mode, slots, split="uneven"):
    """A whole model's graph with its collectives, not yet scheduled."""
    plan = make_plan(2, split, MODES[mode], THREE, slots=slots)
    graph = fx.symbolic_trace(Net(THREE)).graph
    return partition_graph(graph, plan.layers, plan, Placement(0, "none", "0")), plan


def names(graph):
    return [getattr(node.target, "__name__", str(node.target)) for node in graph.nodes if node.op == "call_function"]


def positions(graph, target):
    return [i for i, node in enumerate(graph.nodes) if node.target is target]


@pytest.mark.parametrize("slots", [1, 2])
def test_gathers_start_as_soon_as_their_slot_is_free(slots):
    graph, _ = whole_graph("data", slots)
    report = overlap(graph, slots)
    prefetches = positions(graph, nodes.cache_prefetch)
    gathers = positions(graph, nodes.cache_gather)
    releases = positions(graph, nodes.cache_release)
    experts = [i for i, node in enumerate(graph.nodes) if "moe_ffn" in str(node.target)]
    assert len(prefetches) == len(gathers) == 3
    first_call = next(i for i, node in enumerate(graph.nodes) if node.op == "call_function")
    assert prefetches[0] == first_call  # before the first attention
    for i in range(slots, 3):
        assert releases[i - slots] < prefetches[i] < gathers[i]
    if slots == 2:  # behind the experts of the layer before, too
        assert prefetches[1] < experts[0]
        assert prefetches[2] < experts[1]
    assert all(gather - prefetch > 5 for prefetch, gather in zip(prefetches, gathers))  # attention and router at least
    assert report.critical_path


def test_tokens_travel_while_the_router_runs():
    graph, _ = whole_graph("model", 1)
    before = names(graph)
    overlap(graph, 1)
    after = names(graph)
    assert sorted(before) == sorted(after) != after
    start = positions(graph, all_gather_v)[0]
    router = next(i for i, node in enumerate(graph.nodes) if "softmax" in str(node.target))
    assert start < router


def in_seconds(gather):
    """One second a call; tokens travel for four, weights for ``gather``."""
    return lambda node: {all_gather_v: 4.0, nodes.cache_prefetch: gather}.get(node.target, float(node.op[:4] == "call"))


def behind(graph, target, layer):
    """Whether the prefetch of a layer comes after the first node with this target."""
    (prefetch,) = (i for i, n in enumerate(graph.nodes) if n.target is nodes.cache_prefetch and n.args[-2] == layer)
    return prefetch > positions(graph, target)[0]


@pytest.mark.parametrize(("gather", "held"), [(8.0, ("layers.2",)), (1000.0, ())])
def test_weights_wait_for_tokens_that_the_critical_path_waits_for_if_they_have_the_time(gather, held):
    graph, _ = whole_graph("mixed", 1)  # weights, tokens, weights
    report = overlap(graph, 1, in_seconds(gather))
    assert report.held == held
    assert behind(graph, nodes.cache_release, "layers.2")
    assert behind(graph, all_gather_v, "layers.2") == bool(held)
    tokens = {node.name for node in graph.nodes if node.target is all_gather_v}
    assert tokens & set(report.critical_path) if held else not tokens & set(report.critical_path)


def test_scheduling_twice_changes_nothing_for_tokens():
    graph, _ = whole_graph("model", 1)
    overlap(graph, 1)
    once = names(graph)
    overlap(graph, 1)
    assert names(graph) == once


def test_a_gather_into_a_used_slot_is_found():
    graph, _ = whole_graph("data", 2)
    overlap(graph, 2)
    # with one slot, this schedule gathers layer 1 while layer 0 still computes
    with pytest.raises(PlanError, match="slot dependency"):
        check_schedule(graph, dependency_graph(graph, 1))


def test_contradictions_name_their_cycle():
    graph, _ = whole_graph("data", 1)
    dag = dependency_graph(graph, 1)
    gathers = [node.name for node in graph.nodes if node.target is nodes.cache_gather]
    dag.add_edge(gathers[1], gathers[0])
    with pytest.raises(PlanError, match=r"cycle: .*cache_gather"):
        check_schedule(graph, dag)


def scheduled(rank, world, mode, slots, steps, seconds=None):
    """A whole model as one scheduled graph, against one process; also the runtime's view of the schedule."""
    plan = make_plan(world, "uneven", MODES[mode], THREE, slots=slots)
    model, whole = Net(THREE), Net(THREE)
    estimate = None if seconds is None else in_seconds(seconds)
    installed = install_plan(model, [RewrittenBlock("", fx.symbolic_trace(model).graph)], plan, seconds=estimate)
    run_graph(model, next(iter(installed.blocks[0].values())).graph)
    installed.session.bind(model)
    cache, started = installed.session.cache, []
    plain = cache.prefetch
    cache.prefetch = lambda *args: (before := cache.gathers, plain(*args), started.append(cache.gathers - before))
    ours = torch.optim.SGD(model.parameters(), lr=1e-2)
    theirs = torch.optim.SGD(whole.parameters(), lr=1e-2)
    worst = 0.0
    for step in range(steps):
        x, target = batch(sum(plan.batch), seed=step)
        mine = own(plan.batch, rank)
        loss_sum(model(x[mine]), target[mine]).backward()
        loss_sum(whole(x), target).backward()
        worst = max(worst, largest(gradient_pairs(model, whole, installed.session)))
        for p in model.parameters():
            if all(p is not shard.parameter for shard in installed.session.shards):
                torch.distributed.all_reduce(p.grad)
        ours.step(), theirs.step()
        ours.zero_grad(), theirs.zero_grad()
    return worst, installed.session.cache.gathers / steps, sum(started) / steps


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("mode", ["data", "mixed"])
def test_scheduled_whole_model_is_exact(mode, slots):
    layers = MODES[mode].count("data_centric")
    for worst, gathers, _ in run(2, scheduled, mode, slots, 3):
        assert worst < 1e-10
        assert gathers == 2 * layers - min(slots, layers)  # nothing is gathered twice


def test_weights_that_wait_are_exact_and_gathered_where_the_schedule_says():
    for worst, gathers, started in run(2, scheduled, "mixed", 1, 3, 8.0):
        assert worst < 1e-10
        assert gathers == 3  # two in forward, one in backward, which finds the last layer's weights still there
        assert started == 2  # and not by the cache on its own, as soon as the slot is free


def misplaced(rank, world, during_experts):
    """Two slots' schedule on one slot; or a gather placed between a layer's gather and its experts."""
    plan = make_plan(world, "uneven", MODES["data"], THREE, slots=2)
    model, whole = Net(THREE), Net(THREE)
    installed = install_plan(model, [RewrittenBlock("", fx.symbolic_trace(model).graph)], plan)
    cache = installed.session.cache
    cache.slots = cache.slots[:1]
    graph = copy.deepcopy(next(iter(installed.blocks[0].values())).graph)
    if during_experts:
        gather = next(node for node in graph.nodes if node.target is nodes.cache_gather)
        last = [node for node in graph.nodes if node.target is nodes.cache_prefetch][-1]
        for weight in last.all_input_nodes:
            gather.append(weight)
            gather = weight
        gather.append(last)
    run_graph(model, graph)
    installed.session.bind(model)
    x, target = batch(sum(plan.batch))
    mine = own(plan.batch, rank)
    try:
        loss_sum(model(x[mine]), target[mine]).backward()
    except PlanError as error:
        return str(error)
    loss_sum(whole(x), target).backward()
    return largest(gradient_pairs(model, whole, installed.session))


def test_a_wrong_schedule_is_refused_or_only_slow():
    assert all("still uses the slot" in text for text in run(2, misplaced, True))
    assert max(run(2, misplaced, False)) < 1e-10


OF_THREE = [KINDS["concat-kn"], KINDS["mlp"], KINDS["split"]]


def plan_of(**extra):
    return make_plan(2, "uneven", MODES["data"], OF_THREE, slots=2, **extra)


def both(rank, plan, microbatches=1):
    """Backward of a partitioned model and of one process, ``microbatches`` times."""
    model, whole = Net(OF_THREE), Net(OF_THREE)
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
    for worst, timeout in run(2, interrupted, make_plan(2, "uneven", MODES[mode], OF_THREE, slots=2)):
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
    plan = make_plan(2, "uneven", MODES["data"], OF_THREE, slots=slots)
    for counts, total in run(2, first_gathers, plan):
        assert counts == [0, slots, slots]
        assert total == 3 * (6 - slots)  # no gather more than without


def overflowing(rank, world, plan, ours):
    """Only rank 1's experts overflow; both ranks must skip the step."""
    model = Net(OF_THREE, torch.float32)
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

    session = install(Net(OF_THREE), plan).session
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
