"""The partition as one axis of a mesh: with FSDP2, HSDP and DDP on data axes and pipeline stages outside, against one device."""

import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run, scripts
from models import full, largest
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import hexa_fx
from hexa_fx.distributed import checkpoint, gradients, slice_states
from hexa_fx.distributed.data import split_batch
from hexa_fx.distributed.gradients import clip_grad_norm_, ignore_in_ddp, sync_gradients, weighted_loss
from hexa_fx.errors import InputError, PlanError
from hexa_fx.passes.partition.plan_layers import PartitionConfig
from tests.zoo.common import MLP, Looped

WIDTH, CHANNELS, EXPERTS = 8, 12, 4
DEVICE = os.environ.get("MESH_DEVICE", "cpu")
EVEN, FIRST, ALL = None, (1.0, 3.0), (1.0, 1000.0)
"""Seconds of the ranks: equal, more channels on the first rank, all there if some may have none."""
CONFIG = hexa_fx.HexaConfig(verify=False)


class Stacked(Looped):
    """Gate and up in one weight, so that a rank's share of it is two pieces."""

    def __init__(self) -> None:
        super().__init__(None, WIDTH, EXPERTS)
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 2 * CHANNELS, WIDTH) * 0.3)
        self.bias = nn.Parameter(torch.randn(EXPERTS, 2 * CHANNELS) * 0.3)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, CHANNELS) * 0.3)
        self.down_bias = nn.Parameter(torch.randn(EXPERTS, WIDTH) * 0.3)

    def expert(self, e: int, rows: Tensor) -> Tensor:
        gate, up = (rows @ self.gate_up[e].t() + self.bias[e]).chunk(2, -1)
        return (nn.functional.silu(gate) * up) @ self.down[e].t() + self.down_bias[e]


class Separate(Looped):
    """Three weights, each with the intermediate size in one piece, as torchtitan stores them."""

    def __init__(self) -> None:
        super().__init__(None, WIDTH, EXPERTS)
        self.w1, self.w3 = (nn.Parameter(torch.randn(EXPERTS, CHANNELS, WIDTH) * 0.3) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(EXPERTS, WIDTH, CHANNELS) * 0.3)

    def expert(self, e: int, rows: Tensor) -> Tensor:
        return (nn.functional.silu(rows @ self.w1[e].t()) * (rows @ self.w3[e].t())) @ self.w2[e].t()


class Layer(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.mix, self.moe = nn.Linear(WIDTH, WIDTH), kind()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(torch.tanh(self.mix(x)))


def listed() -> nn.Module:
    """One module an expert."""
    return Looped(lambda: MLP(WIDTH, CHANNELS), WIDTH, EXPERTS)


KINDS: dict[str, Callable[[], nn.Module]] = {"stacked": Stacked, "separate": Separate, "listed": listed}


def build(kind: str, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(KINDS[kind]) for _ in range(2))).to(DEVICE, dtype)


def data(rows: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(DEVICE, dtype)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) ** 2).sum(-1).mean()


def whole_of(model: nn.Module, session: Any, pick: Any) -> dict[str, Tensor]:
    """Every parameter (or its gradient) whole, put together from all ranks of the partition."""
    cut = {shard.name: shard for shard in session.shards}
    found = {}
    for name, parameter in model.named_parameters():
        held = full(pick(parameter))
        shard = cut.get(name)
        if shard is not None and tuple(held.shape) != shard.whole:
            held = put_together(held, shard, session)
        found[name] = held
    return found


def put_together(held: Tensor, shard: Any, session: Any) -> Tensor:
    out = held.new_zeros(shard.whole)
    for chunk in shard.chunks:
        out.narrow(chunk.dim, chunk.start, chunk.length).copy_(held.narrow(chunk.dim, chunk.local, chunk.length))
    dist.all_reduce(out, group=session.groups.main)
    return out


def difference(model: nn.Module, whole: nn.Module, session: Any, pick: Any) -> float:
    ours = whole_of(model, session, pick)
    return largest([(ours[name], pick(parameter)) for name, parameter in whole.named_parameters()])


def trained(rank: int, model: nn.Module, whole: nn.Module, x: Tensor, step: Any, session: Any) -> list[float]:
    """Differences of losses, norms, gradients and parameters to one device over two steps of AdamW."""
    ours = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=False)
    theirs = torch.optim.AdamW(whole.parameters(), lr=1e-2, foreach=False)
    found = []
    for _ in range(2):
        loss = step()
        dist.all_reduce(loss)
        reference = loss_of(whole, x)
        reference.backward()
        found.append(float((loss - reference).detach().abs()))
        found.append(difference(model, whole, session, lambda p: p.grad))
        ours_norm = clip_grad_norm_(model, session, 0.1)
        found.append(float((ours_norm - nn.utils.clip_grad_norm_(whole.parameters(), 0.1)).abs()))
        ours.step(), theirs.step()
        ours.zero_grad(), theirs.zero_grad()
    found.append(difference(model, whole, session, lambda p: p.detach()))
    return found


def sharded(model: nn.Module, session: Any, data_mesh: DeviceMesh, dense: DeviceMesh) -> None:
    """FSDP2: blocks whose experts are cut over the data axes, everything else over all ranks."""
    for path in session.graphs:
        fully_shard(model.get_submodule(path), mesh=data_mesh)
    for layer in model:
        fully_shard(layer, mesh=dense)
    fully_shard(model, mesh=dense)


def fsdp(rank: int, world: int, kind: str, strategy: Any, capacities: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Over a mesh (shard, hexa) or (replicate, shard, hexa), uneven numbers of tokens in the replicas."""
    names = ("replicate", "shard", "hexa")[3 - len(shape) :]
    mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=names)
    mesh["shard", "hexa"]._flatten("dense")
    outer, dense = (mesh["shard"], mesh["dense"])
    if len(shape) == 3:
        outer, dense = mesh["replicate", "shard"], mesh["replicate", "dense"]
    model, whole, x = build(kind, dtype), build(kind, dtype), data(14, dtype)
    # room for 4 of the 12 channels on the first rank, in 2 layers
    caps = (2 * 4 * 3 * EXPERTS * WIDTH * 16, 2**30) if capacities == FIRST and strategy == "data" else None
    hexa_fx.optimize_(
        model,
        x,
        CONFIG,
        mesh=mesh["hexa"],
        strategy=strategy,
        capacities=capacities,
        partition=PartitionConfig(tile=2, data_parallel="mean", batch=7, memory_caps=caps),
        data_mesh=outer,
    )
    session = model.partition
    kinds = {isinstance(shard.parameter, DTensor) for shard in session.shards}
    sharded(model, session, outer, dense)
    axis = mesh["hexa"]
    replicas = x.split((9, 5)) if world > axis.size() else (x,)
    mine = split_batch(replicas[rank // axis.size()], session.plan, axis.get_local_rank())

    def step() -> Tensor:
        loss = weighted_loss(session, loss_of(model, mine), len(mine))
        loss.backward()
        sync_gradients(model, session)  # of the router, which is in the block
        return loss.detach() / world

    found = trained(rank, model, whole, x, step, session)
    session.close()
    return found, kinds, session.cache.hits


@pytest.mark.parametrize(
    ("kind", "strategy", "capacities", "shape", "dtype"),
    [
        ("stacked", "data", EVEN, (2, 2), torch.float32),
        ("stacked", "model", EVEN, (2, 1, 2), torch.float64),
        ("stacked", "data", EVEN, (2, 1), torch.float64),
        pytest.param("separate", "data", EVEN, (2, 1, 2), torch.float64, marks=pytest.mark.slow),
        pytest.param("stacked", "data", FIRST, (2, 2), torch.float64, marks=pytest.mark.slow),
        pytest.param("stacked", "model", FIRST, (2, 2), torch.float64, marks=pytest.mark.slow),
        ("listed", "data", FIRST, (2, 2), torch.float64),
        ("stacked", "model", ALL, (1, 2), torch.float64),
    ],
)
def test_fsdp_and_hsdp(kind: str, strategy: str, capacities: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for found, kinds, _ in run(math.prod(shape), fsdp, kind, strategy, capacities, shape, dtype):
        assert max(found) < (2e-6 if dtype == torch.float32 else 1e-12), found
        assert kinds == {capacities is EVEN and kind != "listed"}


def idle_ranks(rank: int, world: int) -> None:
    """A rank may have no channels where it is asked for; FSDP2 takes no empty gradients."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "hexa"))
    model, x = build("stacked"), data(4)
    config = PartitionConfig(tile=2, data_parallel="mean", least_channels=0)
    axes = {"mesh": mesh["hexa"], "data_mesh": mesh["shard"]}
    hexa_fx.optimize_(model, x, CONFIG, **axes, strategy="model", capacities=ALL, partition=config)
    session = model.partition
    assert [layer.idle for layer in session.plan.layers] == [(1,), (1,)]
    mine = split_batch(x, session.plan, rank)
    loss_of(model, mine).backward()
    sharded(model, session, mesh["shard"], mesh["shard"])
    with pytest.raises(PlanError, match=r"of which ranks \[1\] of the plan have no channels.*least_channels=1"):
        model(mine)
    session.close()


def test_fsdp_refuses_ranks_without_channels() -> None:
    run(2, idle_ranks)


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("capacities", ["even", "uneven"])
@pytest.mark.parametrize("strategy", ["data", "model"])
def test_fsdp_on_gpus(strategy: str, capacities: str, tmp_path: Path) -> None:
    """Over NCCL: 2 GPUs as (1, 2), 4 as (2, 2)."""
    world = 4 if torch.cuda.device_count() >= 4 else 2
    given = (strategy, capacities)
    with scripts(world, "mesh_rank.py", tmp_path / "store", str(world), "nccl", *given, MESH_DEVICE="cuda") as ranks:
        outputs = [process.communicate(timeout=200)[0] for process in ranks]  # of all, for the first to fail says why
        for process, output in zip(ranks, outputs, strict=True):
            assert process.returncode == 0, "\n".join(outputs)
            assert "largest difference" in output


def ddp(rank: int, world: int, kind: str, strategy: str) -> Any:
    """DDP over all ranks for everything but the experts, whose replicas, if there are any, the session averages."""
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "hexa"))
    model, whole, x = build(kind), build(kind), data(14)
    config = PartitionConfig(tile=2, data_parallel="mean", batch=7)
    axes = {"mesh": mesh["hexa"], "data_mesh": mesh["data"]}
    hexa_fx.optimize_(model, x, CONFIG, **axes, strategy=strategy, capacities=EVEN, partition=config)
    session = model.partition
    ignore_in_ddp(model, session)
    wrapped = DistributedDataParallel(model)
    replicas = x.split((9, 5)) if world > 2 else (x,)
    mine = split_batch(replicas[rank // 2], session.plan, mesh["hexa"].get_local_rank())

    def step() -> Tensor:
        loss = weighted_loss(session, loss_of(wrapped, mine), len(mine))
        loss.backward()
        if world > 2:
            sync_gradients(model, session, only_experts=True)
        return loss.detach() / world

    found = trained(rank, model, whole, x, step, session)
    session.close()
    return found


@pytest.mark.parametrize(
    ("world", "kind", "strategy"),
    [
        (4, "stacked", "data"),
        (2, "listed", "data"),
        (2, "listed", "model"),
        pytest.param(4, "stacked", "model", marks=pytest.mark.slow),
    ],
)
def test_ddp(world: int, kind: str, strategy: str) -> None:
    assert max(map(max, run(world, ddp, kind, strategy))) < 1e-12


def tensor_parallel(rank: int, world: int, strategy: str) -> Any:
    """Mixers under tensor parallelism: over an axis of its own, or over the partition's with sequences in parts."""
    names = ("hexa",) if world == 2 else ("hexa", "tensor")
    mesh = init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)
    model, whole, x = build("stacked"), build("stacked"), data(8)
    config = PartitionConfig(tile=2, batch=8)
    hexa_fx.optimize_(model, x, CONFIG, mesh=mesh["hexa"], strategy=strategy, capacities=EVEN, partition=config)
    session, place = model.partition, Shard(0) if world == 2 else Replicate()
    style = ColwiseParallel(input_layouts=place, output_layouts=place)
    for layer in model:
        parallelize_module(layer, mesh[names[-1]], {"mix": style})
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("hexa_fx.distributed.wrappers").addHandler(handler)
    mine = split_batch(x, session.plan, mesh["hexa"].get_local_rank())

    def step() -> Tensor:
        loss = weighted_loss(session, loss_of(model, mine), len(mine))
        loss.backward()
        sync_gradients(model, session)
        return loss.detach() / (world // 2)

    found = trained(rank, model, whole, x, step, session)
    session.close()
    return found, said


@pytest.mark.parametrize("strategy", ["data", pytest.param("model", marks=pytest.mark.slow)])
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_tensor_parallel_mixers(world: int, strategy: str) -> None:
    for found, said in run(world, tensor_parallel, strategy):
        assert max(found) < 1e-12, found
        assert ["'0.mix.weight' is a DTensor on ranks of the partition" in one for one in said] == [True] * (world == 2)


def check_norm_of_equal_meshes(rank: int, model: nn.Module, session: Any) -> None:
    """torch may give a parameter the older of two equal meshes, on some ranks."""
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "hexa"))
    spread, given = gradients._spread_over, []

    def of_another_mesh(*args: Any) -> Any:
        groups = spread(*args)
        given.append(groups) if len(groups) == 2 else None
        return (other["data"].get_group(), groups[1]) if len(groups) == 2 > len(given) and rank % 2 else groups

    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = clip_grad_norm_(model, session, 1e9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "_spread_over", of_another_mesh)
        assert clip_grad_norm_(model, session, 1e9) == before
    assert given


def fsdp_on_the_data_axis_alone(rank: int, world: int) -> Any:
    """Nothing said to the session of the axis outside: FSDP2 averages over it, everything else is summed over the partition."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "hexa"))
    model, whole, x = build("stacked"), build("stacked"), data(12)
    config = PartitionConfig(tile=2, batch=6)
    hexa_fx.optimize_(model, x, CONFIG, mesh=mesh["hexa"], strategy="data", capacities=EVEN, partition=config)
    session = model.partition
    for layer in model:
        fully_shard(layer, mesh=mesh["data"])
    mine = split_batch(x.split(6)[rank // 2], session.plan, mesh["hexa"].get_local_rank())

    def step() -> Tensor:
        loss = weighted_loss(session, loss_of(model, mine), len(mine))
        loss.backward()
        sync_gradients(model, session)
        return loss.detach() / 2

    found = trained(rank, model, whole, x, step, session)
    with pytest.raises(InputError, match="as data_mesh="):
        checkpoint.save("nowhere", model, session)
    check_norm_of_equal_meshes(rank, model, session)
    session.close()
    told, axes = build("stacked"), {"mesh": mesh["hexa"], "data_mesh": mesh["data"]}
    hexa_fx.optimize_(told, x, CONFIG, strategy="data", capacities=EVEN, partition=config, **axes)
    for layer in told:
        fully_shard(layer, mesh=mesh["data"])
    with pytest.raises(PlanError, match="fully_shard averages gradients over ranks for which the plan sums"):
        told(mine)
    told.partition.close()
    with pytest.raises(PlanError, match="shares ranks"):
        hexa_fx.optimize_(build("stacked"), x, CONFIG, mesh=mesh["hexa"], data_mesh=mesh["hexa"], capacities=EVEN)
    return found


@pytest.mark.slow
def test_fsdp_on_the_data_axis_alone() -> None:
    assert max(map(max, run(4, fsdp_on_the_data_axis_alone))) < 1e-12


def pipelined(rank: int, world: int, strategy: str) -> Any:
    """Two stages of one layer each, two microbatches under way at once."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "hexa"))
    place, share = mesh["pipe"].get_local_rank(), mesh["hexa"].get_local_rank()
    model, whole, x = build("stacked"), build("stacked"), data(8)
    stage = model[place : place + 1]
    axis = mesh["hexa"]
    config = PartitionConfig(tile=2)
    hexa_fx.optimize_(stage, x, CONFIG, mesh=axis, strategy=strategy, capacities=EVEN, partition=config)
    session = stage.partition
    piece = pipelining.PipelineStage(stage, place, 2, torch.device("cpu"), group=mesh["pipe"].get_group())
    schedule = pipelining.Schedule1F1B(piece, 2, loss_fn=lambda y, _: (y**2).sum(-1).mean(), scale_grads=False)
    mine, losses = x.split(4)[share], []
    schedule.step(*([mine] if place == 0 else []), target=mine, losses=losses)
    sync_gradients(stage, session)
    loss_of(whole, x).backward()
    for parameter in stage.parameters():  # 2 ranks, 2 microbatches: sums of means of as many tokens
        parameter.grad /= 4
    found = difference(stage, whole[place : place + 1], session, lambda p: p.grad)
    session.close()
    return found


@pytest.mark.parametrize("strategy", ["data", pytest.param("model", marks=pytest.mark.slow)])
def test_pipeline_outside(strategy: str) -> None:
    assert max(run(4, pipelined, strategy)) < 1e-12


def said_of_pieces(model: nn.Module) -> None:
    """Who writes what torch.distributed.checkpoint does not: DTensors in several pieces, and handles in its async_save."""
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slice_states.log, "warning", lambda text, *args: said.append(text % args))
        handle = checkpoint.state_dict(model, model.partition)["model"]["0.moe.down"]
        assert not said
        get_model_state_dict(model)
        model.state_dict()
    assert len(said) == 1
    assert "'0.moe.gate_up' is a DTensor of which each rank has several pieces" in said[0]
    with pytest.raises(InputError, match=r"async_checkpoint\.async_save"):
        handle.new_empty(1)


def saved(rank: int, world: int, kind: str, folder: str) -> Any:
    """Trains under FSDP2 x hexa and saves; continues on four ranks of unequal shares, and in a mesh of another shape."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "hexa"))
    model, x = build(kind), data(8)
    config = PartitionConfig(tile=1, data_parallel="mean")
    axes = {"mesh": mesh["hexa"], "data_mesh": mesh["data"]}
    hexa_fx.optimize_(model, x, CONFIG, **axes, strategy="data", capacities=EVEN, partition=config)
    session = model.partition
    for layer in model:
        fully_shard(layer, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    loss_of(model, split_batch(x, session.plan, mesh["hexa"].get_local_rank())).backward()
    sync_gradients(model, session)
    optimizer.step()
    checkpoint.save(f"{folder}/ours", model, session, optimizer)
    expected = whole_of(model, session, lambda p: p.detach())
    if kind == "separate":  # every share is one piece, so torch's own functions do
        torch.distributed.checkpoint.save(get_model_state_dict(model), checkpoint_id=f"{folder}/torch")
    session.close()

    found = []
    for shape, capacities in (((4,), (1.0, 2.0, 3.0, 1.0)), ((1, 4), EVEN)):
        names = ("data", "hexa")[2 - len(shape) :]
        other = init_device_mesh("cpu", shape, mesh_dim_names=names)
        fresh = build(kind)
        for parameter in fresh.parameters():
            nn.init.zeros_(parameter)
        mesh = other["hexa"] if len(shape) == 2 else other
        hexa_fx.optimize_(fresh, x, CONFIG, mesh=mesh, strategy="model", capacities=capacities, partition=config)
        again = torch.optim.AdamW(fresh.parameters(), lr=1e-2, foreach=False)
        checkpoint.load(f"{folder}/ours", fresh, fresh.partition, again)
        loaded = whole_of(fresh, fresh.partition, lambda p: p.detach())
        found.append(largest([(loaded[name], expected[name]) for name in expected]))
        moments = whole_of(fresh, fresh.partition, lambda p, s=again.state: s[p]["exp_avg"])
        before = whole_of(model, session, lambda p: optimizer.state[p]["exp_avg"])
        found.append(largest([(moments[name], before[name]) for name in expected]))
        if kind == "stacked" and len(shape) == 2:
            said_of_pieces(fresh)
        if kind == "separate" and len(shape) == 2:
            into = get_model_state_dict(fresh)
            for value in into.values():
                value.zero_()
            torch.distributed.checkpoint.load(into, checkpoint_id=f"{folder}/torch")
            loaded = whole_of(fresh, fresh.partition, lambda p: p.detach())
            found.append(largest([(loaded[name], expected[name]) for name in expected]))
        fresh.partition.close()
    return found, float(sum(value.abs().sum() for value in expected.values()))


@pytest.mark.parametrize(
    "kind", ["stacked", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("separate", "listed"))]
)
def test_a_checkpoint_continues_on_another_mesh(kind: str, tmp_path: Path) -> None:
    for found, size in run(4, saved, kind, str(tmp_path)):
        assert max(found) == 0.0
        assert size > 1.0
    model, x = build(kind), data(8)
    expected = loss_of(model, x)
    checkpoint.load(tmp_path / "ours", model)
    assert not torch.equal(loss_of(model, x), expected)


def broken_off() -> float:
    raise RuntimeError("in the middle")


def mixed_kinds(rank: int, world: int) -> list[float]:
    """Optimizers of all parameters in one group, where torch takes DTensors and others only apart, against one device's."""
    mesh, found = init_device_mesh("cpu", (1, world), mesh_dim_names=("data", "hexa")), []
    for options in ({"foreach": True}, {"fused": True}, {}):
        model, whole, x = build("separate"), build("separate"), data(8)
        hexa_fx.optimize_(model, x, CONFIG, mesh=mesh["hexa"], strategy="data", capacities=EVEN)
        session = model.partition
        assert {isinstance(shard.parameter, DTensor) for shard in session.shards} == {True}
        ours, theirs = (torch.optim.AdamW(net.parameters(), lr=1e-2, **options) for net in (model, whole))
        schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in (ours, theirs)]
        ours.step()  # without gradients
        with pytest.raises(RuntimeError, match="in the middle"):
            ours.step(broken_off)
        for _ in range(3):
            (loss_of(model, split_batch(x, session.plan, rank)) / world).backward()
            loss_of(whole, x).backward()
            sync_gradients(model, session)
            ours.step(), theirs.step()
            ours.zero_grad(), theirs.zero_grad()
            for schedule in schedules:
                schedule.step()
        assert [len(group["params"]) for group in ours.param_groups] == [len([*model.parameters()])]
        found.append(difference(model, whole, session, lambda p: p.detach()))
        session.close()
    return found


def test_optimizers_that_take_one_kind_of_tensor() -> None:
    for found in run(2, mixed_kinds):
        assert max(found) < 1e-12
