"""The scheduling pass on whole-model graphs: what moves where, that it stays exact, and that it refuses contradictions."""

import copy

import pytest
import torch
import torch.fx as fx
from harness import run
from models import KINDS, MODES, Net, batch, gradient_pairs, largest, loss_sum, make_plan, own, run_graph

from hexa_fx.distributed import nodes
from hexa_fx.distributed.collectives import all_gather_v
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
