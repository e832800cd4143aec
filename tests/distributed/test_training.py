"""Partitioned layers inside training as people do it, and routing that is recorded and replayed over them."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run
from models import KINDS, MODES, Net, batch, cut, gradient_pairs, install, largest, loss_sum, make_plan, own
from test_mesh import CONFIG, build, data, difference, loss_of
from test_mesh import data as tokens
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import hexa_fx
from hexa_fx.distributed.collectives import count_traffic
from hexa_fx.distributed.data import CapacityBatchSampler, split_batch
from hexa_fx.distributed.gradients import (
    clip_grad_norm_,
    expert_parameters,
    ignore_in_ddp,
    sync_gradients,
    weighted_loss,
)
from hexa_fx.errors import PlanError
from hexa_fx.passes.partition.plan_layers import PartitionConfig, plan_layers
from hexa_fx.plan import Plan
from hexa_fx.routing import record_routing, replay_routing

THREE = [KINDS["concat-kn"], KINDS["mlp"], KINDS["split"]]


def accumulate(rank, world, plan, norm_type):
    """Five AdamW steps of two microbatches of different lengths, clipped, fed by the splitter."""
    model, whole = Net(THREE), Net(THREE)
    session = install(model, plan).session
    ours = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    theirs = torch.optim.AdamW(whole.parameters(), lr=1e-2, weight_decay=0.1)
    norms = []
    for step in range(5):
        for micro in range(2):
            x, target = batch((sum(plan.batch) + step) * (micro + 1), seed=10 * step + micro)
            mine = split_batch({"x": x, "target": target}, plan, rank)
            mean = ((model(mine["x"]) - mine["target"]) ** 2).mean() if len(mine["x"]) else model(mine["x"]).mean()
            (weighted_loss(session, mean, len(mine["x"])) / 2).backward()
            (((whole(x) - target) ** 2).mean() / 2).backward()
        sync_gradients(model, session)
        norm = clip_grad_norm_(model, session, 0.5, norm_type)
        norms.append((norm, torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5, norm_type)))
        ours.step(), theirs.step()
        ours.zero_grad(), theirs.zero_grad()
    names = dict(whole.named_parameters())
    assert session.shards
    return largest([(p, cut(session, n, names[n])) for n, p in model.named_parameters()] + norms)


@pytest.mark.parametrize("mode", list(MODES))
def test_five_steps_with_accumulation_and_clipping(mode):
    config = PartitionConfig(batch=7, tile=4)
    made = make_plan(2, "uneven", MODES[mode], THREE, slots=2, capacities=(1.0, 2.0))
    assert config.batch == sum(made.batch)
    assert max(run(2, accumulate, made, 2.0)) < 1e-10


def test_clipping_by_largest_gradient():
    assert max(run(2, accumulate, make_plan(2, "h0", MODES["mixed"], THREE), float("inf"))) < 1e-10


def wrapped_wrongly(rank, world, listed):
    """Of lists of experts, which are plain slices, the first forward says it; of DTensors torch does, or averages are said."""
    from test_mesh import CONFIG, EVEN, build, data
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    mesh = init_device_mesh("cpu", (world,))
    flat = partial(FullyShardedDataParallel, device_id=torch.device("cpu"))
    for how, said, of_torch in (
        (lambda model, _: DistributedDataParallel(model), "gave every rank the slice", True),
        (lambda model, session: ignore_in_ddp(model, session) or DistributedDataParallel(model), "averages", False),
        (lambda model, _: fully_shard(model, mesh=mesh), "fully_shard cut", True),
        (
            lambda model, session: fully_shard(model, mesh=mesh, ignored_params=expert_parameters(session)),
            "fully_shard averages",
            False,
        ),
        (lambda model, _: flat(model, use_orig_params=True), "with the rest of the model", True),
        (lambda model, session: flat(model, ignored_states=expert_parameters(session)), "Parallel averages", False),
    ):
        model, x = build("listed" if listed else "stacked"), data(4)
        hexa_fx.optimize_(model, x, CONFIG, mesh=mesh, strategy="model", capacities=EVEN)
        session = model.partition
        refusal = pytest.raises(PlanError, match=said)
        with pytest.raises((RuntimeError, TypeError, ValueError)) if of_torch and not listed else refusal:
            how(model, session)(x)
        session.close()


@pytest.mark.parametrize("listed", [False, True])
def test_wrappers_that_would_mix_slices(listed):
    run(2, wrapped_wrongly, listed)


def recomputed(rank, world, plan):
    model, whole = Net(THREE), Net(THREE)
    installed = install(model, plan)
    x, target = batch(sum(plan.batch))
    mine = own(plan.batch, rank)
    h = x[mine].clone().requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        for layer in model.layers:
            h = checkpoint(layer, h, use_reentrant=False)
    loss_sum(h, target[mine]).backward()
    loss_sum(whole(x), target).backward()
    return largest(gradient_pairs(model, whole, installed.session)), sum(kept), installed.session.cache.gathers


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("mode", list(MODES))
def test_under_activation_checkpointing(mode, slots):
    plan = make_plan(2, "uneven", MODES[mode], THREE, slots=slots)
    for worst, kept, gathers in run(2, recomputed, plan):
        assert worst < 1e-10
        assert kept <= 5 * 8 * 3 + 8  # the layers' inputs: what is saved inside goes through checkpointing's hooks
        if mode == "data":  # forward all, backward all but the last layer's (or two)
            assert gathers <= 3 + 3


def listed_steps(rank, world):
    """Experts in a list, whose weights a data-centric layer copies: every step gathers those of the step before."""
    model, whole, x, worst = build("listed"), build("listed"), tokens(9), []
    given = {"strategy": "data", "capacities": (1.0, 2.0), "partition": PartitionConfig(tile=2, batch=9)}
    hexa_fx.optimize_(model, x, CONFIG, mesh=init_device_mesh("cpu", (world,)), **given)
    session = model.partition
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.1, foreach=False) for net in (model, whole)]
    mine = split_batch(x, session.plan, rank)
    for _ in range(3):
        weighted_loss(session, loss_of(model, mine), len(mine)).backward()
        sync_gradients(model, session)
        loss_of(whole, x).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        worst.append(difference(model, whole, session, lambda p: p.detach()))
    session.close()
    return worst


def test_gathers_of_lists_see_every_step():
    assert max(map(max, run(2, listed_steps))) < 1e-12


def autocast(rank, world, plan):
    model, whole = Net(THREE, torch.float32), Net(THREE, torch.float32)
    installed = install(model, plan)
    x, target = batch(sum(plan.batch), dtype=torch.float32)
    mine = own(plan.batch, rank)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x[mine])
        reference = whole(x)
    loss_sum(y.float(), target[mine]).backward()
    loss_sum(reference.float(), target).backward()
    cache = installed.session.cache
    dtypes = {str(slot.dtype) for slot in cache.slots if slot.dtype is not None}
    errors = [
        float((a - b).norm() / b.norm().clamp(min=1e-6))
        for a, b in gradient_pairs(model, whole, installed.session)
        if a.numel()
    ]
    return max(errors), dtypes, {p.grad.dtype for p in model.parameters()}


def summed_bytes(rank, world, plan):
    """The result of `autocast`, and the bytes of weight gradients that this rank received."""
    with count_traffic() as traffic:
        result = autocast(rank, world, plan)
    return result, traffic["reduce_scatter_v"]


def test_weight_gradients_may_be_summed_in_the_autocast_dtype():
    plan = make_plan(2, "uneven", MODES["data"], THREE, data_parallel="mean")
    wide = run(2, summed_bytes, plan)
    narrow = run(2, summed_bytes, replace(plan, grad_dtype="compute"))
    for ((_, _, kept), all_bytes), ((_, _, grads), half) in zip(wide, narrow, strict=True):
        assert kept == grads == {torch.float32}
        assert half * 2 == all_bytes > 0


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("grad_dtype", ["parameter", "compute"])
def test_autocast_gathers_in_its_dtype_and_reduces_in_the_one_planned(mode, grad_dtype):
    plan = make_plan(2, "uneven", MODES[mode], THREE, grad_dtype=grad_dtype)
    for worst, dtypes, grads in run(2, autocast, plan):
        assert worst < 0.05
        assert dtypes <= {"torch.bfloat16"}
        assert grads == {torch.float32}


def inference_then_training(rank, world, plan):
    model, whole = Net(THREE), Net(THREE)
    installed = install(model, plan)
    x, target = batch(sum(plan.batch))
    mine = own(plan.batch, rank)
    with torch.inference_mode():
        first = model(x[mine]).clone()
    with torch.no_grad():
        second = model(x[mine])
    loss_sum(model(x[mine]), target[mine]).backward()
    loss_sum(whole(x), target).backward()
    pairs = [(second, whole(x)[mine]), *gradient_pairs(model, whole, installed.session)]
    return largest(pairs), float((first - second).abs().max())


def test_inference_before_training():
    for worst, apart in run(2, inference_then_training, make_plan(2, "uneven", MODES["mixed"], THREE, slots=2)):
        assert worst < 1e-10
        assert apart < 1e-12


def frozen(rank, world, plan):
    """Frozen experts in the middle layer; two microbatches forward before either goes backward."""
    model, whole = Net(THREE), Net(THREE)
    installed = install(model, plan)
    for net in (model, whole):
        for name in ("w1", "b1", "w2", "b2"):
            getattr(net.layers[1], name).requires_grad_(False)
    losses, references = [], []
    for seed in range(2):
        x, target = batch(sum(plan.batch), seed=seed)
        mine = own(plan.batch, rank)
        losses.append(loss_sum(model(x[mine]), target[mine]))
        references.append(loss_sum(whole(x), target))
    for loss, reference in zip(losses, references):
        loss.backward(), reference.backward()
    for net in (model, whole):
        for p in net.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    return largest(gradient_pairs(model, whole, installed.session))


@pytest.mark.parametrize("slots", [1, 2])
def test_frozen_experts_and_interleaved_microbatches(slots):
    assert max(run(2, frozen, make_plan(2, "uneven", MODES["data"], THREE, slots=slots))) < 1e-10


def test_samplers_of_all_ranks_make_the_global_batch():
    plan = Plan(3, (), (3, 0, 2), capacities=(1.0, 8.0, 1.5))
    ranks = [CapacityBatchSampler(23, plan, rank, seed=3) for rank in range(3)]
    for sampler in ranks:
        sampler.set_epoch(2)
    order = torch.randperm(23, generator=torch.Generator().manual_seed(5)).tolist()
    steps = list(zip(*ranks))
    assert len(steps) == len(ranks[0]) == 5
    assert [[i for part in step for i in part] for step in steps] == [order[i : i + 5] for i in range(0, 23, 5)]
    assert [len(part) for part in steps[0]] == [3, 0, 2]
    assert len(list(CapacityBatchSampler(23, plan, 0, drop_last=True))) == 4


def test_splitting_a_batch():
    plan = plan_layers({}, [1.0, 3.0], config=PartitionConfig(batch=8))
    data = {"ids": torch.arange(8), "more": [torch.ones(8, 2)], "flag": True, "scalar": torch.tensor(1.0)}
    parts = [split_batch(data, plan, rank) for rank in range(2)]
    assert [p["ids"].tolist() for p in parts] == [[0, 1, 2, 3, 4, 5], [6, 7]]
    assert parts[1]["more"][0].shape == (2, 2)
    assert parts[1]["flag"] is True


def replayed(rank: int, world: int, kind: str, strategy: str) -> list[float]:
    """Differences of losses and gradients on replayed routing, after routers have changed, before and after a new plan."""
    model, whole, x = build(kind), build(kind), data(9)
    config = hexa_fx.PartitionConfig(tile=2)
    mesh = init_device_mesh("cpu", (world,))
    hexa_fx.optimize_(model, x, CONFIG, mesh=mesh, strategy=strategy, capacities=(1.0, 2.0), partition=config)
    hexa_fx.optimize_(whole, x, CONFIG)
    session, found = model.partition, []
    for capacities in (None, (3.0, 1.0)):
        session = session if capacities is None else session.replan(capacities=capacities)
        mine = split_batch(x, session.plan, rank)
        logs = []
        for net, rows in ((model, mine), (whole, x)):
            with record_routing(net) as log, torch.no_grad():
                net(rows)
            logs.append(log)
            for layer in net:
                layer.moe.router.weight.data.neg_()
        with replay_routing(model, logs[0]):
            loss = weighted_loss(session, loss_of(model, mine), len(mine))
            loss.backward()
        with replay_routing(whole, logs[1]):
            reference = loss_of(whole, x)
            reference.backward()
        sync_gradients(model, session)
        total = loss.detach().clone()
        dist.all_reduce(total)
        found += [float((total - reference).abs()), difference(model, whole, session, lambda p: p.grad)]
        model.zero_grad(), whole.zero_grad()
    session.close()
    return found


@pytest.mark.parametrize(("kind", "strategy"), [("stacked", "model"), ("listed", "data")])
def test_replay_over_a_partition(kind: str, strategy: Any) -> None:
    for found in run(2, replayed, kind, strategy):
        assert max(found) < 1e-12
