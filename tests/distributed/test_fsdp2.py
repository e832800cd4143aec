"""FSDP2: an optimized model under `fully_shard`, by hand and as planned, compared with the whole original on one device."""

import copy
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import run
from test_mesh import CONFIG, build, loss_of, trained, whole_of
from test_mesh import data as tokens
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

import hexa_fx
from hexa_fx.distributed import checkpoint
from hexa_fx.distributed.data import split_batch
from hexa_fx.distributed.gradients import expert_parameters, ignore_in_ddp, sync_gradients, weighted_loss
from hexa_fx.errors import InputError, PlanError
from hexa_fx.passes.partition.plan_layers import PartitionConfig
from hexa_fx.runtime.install import installed_forward
from hexa_fx.steps import fully_sharded
from hexa_fx.steps.context import OneDevice
from tests.zoo.common import MLP, Looped
from tests.zoo.library_styles import ProjectionModules
from tests.zoo.variant import D


def listed() -> tuple[nn.Module, object, object]:
    """Experts as a list, whose weights an optimized block keeps side by side."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), *(Looped(lambda: MLP(8, 12), 8) for _ in range(2))).double()
    data = [torch.randn(9, 8, dtype=torch.float64) for _ in range(2)]
    return model, data, lambda m, x: m(x).square().mean()


def mixtral() -> tuple[nn.Module, object, object]:
    import transformers as hf

    config = hf.MixtralConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = hf.MixtralForCausalLM(config).double()
    model.set_experts_implementation("eager")
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 40, (2, 2, 5))]
    return model, data, lambda m, batch: m(**batch).loss


def sorted_rows() -> tuple[nn.Module, object, object]:
    """Experts that are given rows in their order and counts: who is chosen, only the module around them knows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), *(nn.Sequential(ProjectionModules()) for _ in range(2))).double()
    data = [torch.randn(9, D, dtype=torch.float64) for _ in range(2)]
    return model, data, lambda m, x: m(x).square().mean()


def compare(rank: int, world: int, name: str, late: str = "") -> str:
    """``late``: what takes the experts once the model is sharded, ``optimize`` or transformers' own setting."""
    mesh = init_device_mesh("cpu", (world,))
    build = {"mixtral": mixtral, "listed": listed, "sorted": sorted_rows}[name]
    whole, data, loss_of = build()
    example = data[0]
    sharded = copy.deepcopy(whole)
    if not late:
        hexa_fx.optimize_(sharded, example)
        assert len(sharded.report.rewritten) == 2
    for layer in sharded.model.layers if build is mixtral else list(sharded)[1:]:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    if late == "optimize":
        with pytest.raises(InputError, match="leave the example out"):
            hexa_fx.optimize_(sharded, example)
        hexa_fx.optimize_(sharded, config=replace(CONFIG, own_code_when_small=False))
    said: list[str] = []
    logging.getLogger("hexa_fx.runtime.forward").addFilter(lambda record: said.append(record.getMessage()) is None)
    if late == "setting":
        hexa_fx.patch_transformers()
        sharded.set_experts_implementation("hexa")
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (whole, sharded)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.stack([loss_of(whole, batch) for batch in data]).mean().backward()
        own = loss_of(sharded, data[rank])
        own.backward()
        torch.testing.assert_close(own.detach(), loss_of(whole, data[rank]).detach(), rtol=1e-9, atol=1e-9)
        for (label, a), b in zip(whole.named_parameters(), sharded.parameters()):
            torch.testing.assert_close(b.grad.full_tensor(), a.grad, rtol=1e-8, atol=1e-10, msg=label)
        for optimizer in optimizers:
            optimizer.step()
    for (label, a), b in zip(whole.named_parameters(), sharded.parameters()):
        torch.testing.assert_close(b.full_tensor(), a, rtol=1e-8, atol=1e-10, msg=label)
    if late == "optimize":
        calls = 2 if name == "sorted" else 3  # of three: the first shows that it is not the experts alone
        assert [block.calls.rewritten for block in sharded.report.blocks] == [calls, calls], sharded.report
        assert not any("runs its original forward" in line for line in said), said
    return "equal"


@pytest.mark.parametrize("name", ["listed", "mixtral"])
def test_loss_gradients_and_steps_equal_one_device(name: str) -> None:
    if name == "mixtral":
        pytest.importorskip("transformers")
    assert run(2, compare, name) == ["equal", "equal"]


def test_experts_of_ours_in_a_model_that_was_sharded_before() -> None:
    pytest.importorskip("transformers.integrations.moe")
    assert run(2, compare, "mixtral", "setting") == ["equal", "equal"]


@pytest.mark.parametrize("name", ["listed", "mixtral", "sorted"])
def test_a_model_that_was_sharded_before_is_analysed_in_its_first_call(name: str) -> None:
    if name == "mixtral":
        pytest.importorskip("transformers")
    assert run(2, compare, name, "optimize") == ["equal", "equal"]


def wrapped_before(rank: int, world: int) -> str:
    whole, data, loss_of = listed()
    wrapped = nn.parallel.DistributedDataParallel(copy.deepcopy(whole))
    hexa_fx.optimize_(wrapped, config=replace(CONFIG, own_code_when_small=False))
    torch.stack([loss_of(whole, batch) for batch in data]).mean().backward()
    loss_of(wrapped, data[rank]).backward()
    for (label, a), b in zip(whole.named_parameters(), wrapped.parameters()):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-8, atol=1e-10, msg=label)
    assert [block.calls.rewritten for block in wrapped.report.rewritten] == [1, 1]
    return "equal"


def sharded_after(rank: int, world: int, how: str) -> str:
    """Sharded between `optimize_` and the first call: the layers only, or the whole in one flat parameter."""
    whole, data, loss_of = mixtral()
    model = copy.deepcopy(whole)
    hexa_fx.optimize_(model, config=replace(CONFIG, own_code_when_small=False))
    called = model
    if how == "FSDP1":
        called = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    for layer in model.model.layers if how == "layers" else ():
        fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
    for _ in range(2):
        loss = loss_of(called, data[rank])
        loss.backward()
        torch.testing.assert_close(loss.detach(), loss_of(whole, data[rank]).detach(), rtol=1e-9, atol=1e-9)
    assert [(block.calls.rewritten, dict(block.calls.own)) for block in model.report.blocks] == [(2, {}), (2, {})]
    return "equal"


@pytest.mark.parametrize("how", ["layers", "FSDP1"])
def test_a_model_that_is_sharded_before_its_first_call(how: str) -> None:
    pytest.importorskip("transformers")
    assert run(2, sharded_after, how) == ["equal", "equal"]


def test_a_model_in_ddp_is_analysed_in_its_first_call() -> None:
    """And says so where it was asked: on the wrapper."""
    assert run(2, wrapped_before) == ["equal", "equal"]


def planned(rank: int, world: int, kind: str, strategy: Any, around: str, folder: str) -> Any:
    """A plan with ``fsdp``: under nothing, under the user's FSDP2, or under DDP. Two steps on unequal batches, and a checkpoint."""
    mesh = init_device_mesh("cpu", (world,))
    model, whole, x = build(kind), build(kind), tokens(9)
    config = PartitionConfig(tile=2, batch=9, data_parallel="mean" if around else "sum")
    hexa_fx.optimize_(model, x, CONFIG, mesh=mesh, strategy=strategy, capacities=(1.0, 2.0), partition=config)
    session, wrapped = model.partition, model
    assert session.plan.fingerprint in str(model.report)
    described = session.readable("0.moe")
    if around == "fsdp":
        for layer in model:
            fully_shard(layer, mesh=mesh, ignored_params=expert_parameters(session))
        fully_shard(model, mesh=mesh, ignored_params=expert_parameters(session))
    if around == "ddp":
        ignore_in_ddp(model, session)
        wrapped = nn.parallel.DistributedDataParallel(model)
    mine = split_batch(x, session.plan, rank)

    def step() -> torch.Tensor:
        loss = weighted_loss(session, loss_of(wrapped, mine), len(mine))
        loss.backward()
        if not around:
            sync_gradients(model, session)
        return loss.detach() / (world if around else 1)

    found = trained(rank, model, whole, x, step, session)
    checkpoint.save(folder, model, session)
    session.close()
    if rank == 0:
        again = build(kind)
        checkpoint.load(folder, again)
        found += [float((a - b).detach().abs().max()) for a, b in zip(again.parameters(), whole.parameters())]
    kinds = [isinstance(p, torch.distributed.tensor.DTensor) for p in model.get_submodule("0.moe").parameters()]
    return found, session.plan, described, all(kinds)


@pytest.mark.parametrize(
    ("kind", "strategy", "around"),
    [
        ("stacked", {"0": "fsdp", "1": "data"}, ""),
        ("listed", "fsdp", "fsdp"),
        pytest.param("stacked", "fsdp", "", marks=pytest.mark.slow),
        pytest.param("stacked", {"0": "fsdp", "1": "model"}, "fsdp", marks=pytest.mark.slow),
        pytest.param("stacked", {"0": "fsdp", "1": "model"}, "ddp", marks=pytest.mark.slow),
    ],
)
def test_as_a_plan_has_it(kind: str, strategy: Any, around: str, tmp_path: Any) -> None:
    for found, plan, code, sharded in run(2, planned, kind, strategy, around, str(tmp_path / "saved")):
        assert max(found) < 1e-12, found
        assert plan.batch == (6, 3)
        assert [layer.mode == "fsdp" for layer in plan.layers] == [True, strategy == "fsdp"]
        assert "fsdp, every parameter in equal parts" in code
        assert "cache_gather" not in code
        assert sharded


def foreseen_by_nobody(rank: int, world: int) -> Any:
    """A plan with ``fsdp`` under autocast, in which the router gives another dtype than in the example; and a unit in a block."""
    mesh = init_device_mesh("cpu", (world,))
    whole, data, loss_of = mixtral()
    model, config = copy.deepcopy(whole.float()), replace(CONFIG, own_code_when_small=False)
    given = {"strategy": "fsdp", "partition": PartitionConfig(batch=4, data_parallel="mean"), "capacities": None}
    hexa_fx.optimize_(model, data[0], config, mesh=mesh, **given)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with torch.autocast("cpu", torch.bfloat16):
        loss, wanted = loss_of(model, data[rank]), torch.stack([loss_of(whole, batch) for batch in data])
    loss.backward()
    wanted.mean().backward()
    torch.testing.assert_close(loss, wanted[rank], rtol=1e-2, atol=0.0)
    for (name, a), b in zip(whole.named_parameters(), model.parameters()):
        found = b.grad.full_tensor()
        assert (found - a.grad).norm() <= 0.05 * a.grad.norm() + 1e-6, name
    calls = [(forward.ran, dict(forward.own)) for m in model.modules() if (forward := installed_forward(m))]
    model.partition.close()
    inside, data, loss_of = listed()
    for layer in list(inside)[1:]:
        fully_shard(layer.experts[0], mesh=mesh)
    hexa_fx.optimize_(inside, config=config)
    loss_of(inside, data[rank])
    return calls, [block.reason for block in inside.report.blocks]


def test_units_of_fsdp2_in_calls_that_nobody_foresaw() -> None:
    pytest.importorskip("transformers")
    for calls, reasons in run(2, foreseen_by_nobody):
        assert calls == [(1, {}), (1, {})]
        assert all("is a unit of FSDP2 inside of the block" in reason for reason in reasons)


def mixed(rank: int, world: int, kind: str, strategy: str, policy: MixedPrecisionPolicy, dtype: torch.dtype) -> Any:
    """FSDP2 around experts that it does not have: with mixed precision they multiply in its dtype, too. How far results and
    gradients are from the model's in float64, and how far those of FSDP2 that has all of it are.
    """
    mesh, x = init_device_mesh("cpu", (world,)), tokens(8, dtype)
    model, whole, exact = build(kind, dtype), build(kind, dtype), build(kind, dtype).double()
    config = PartitionConfig(tile=2, batch=8, data_parallel="mean")
    hexa_fx.optimize_(model, x, mesh=mesh, strategy=strategy, capacities=(1.0, 2.0), partition=config)
    session = model.partition
    for net, ignored in ((model, expert_parameters(session)), (whole, None)):
        for layer in net:
            fully_shard(layer, mesh=mesh, mp_policy=policy, ignored_params=ignored)
        fully_shard(net, mesh=mesh, mp_policy=policy, ignored_params=ignored)
    mine = split_batch(x, session.plan, rank)
    for _ in range(2):
        y, want = model(mine), whole(mine)
        (y.to(dtype) ** 2).sum().backward()
        (want.to(dtype) ** 2).sum().backward()
        (exact(x.double()) ** 2).sum().div(world).backward()
    gathers, found = session.cache.gathers, whole_of(model, session, lambda p: p.grad)
    all_found = [(y, *found.values()), (want, *(p.grad.full_tensor() for p in whole.parameters()))]
    right = [exact(mine.double()), *(p.grad for p in exact.parameters())]
    far = [max(apart(one, other) for one, other in zip(each, right, strict=True)) for each in all_found]
    session.close()
    return *far, y.dtype, {p.grad.dtype for p in model.parameters()}, gathers


def apart(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found - right).abs().max() / right.abs().max())


HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("policy", "dtype"), [(HALF, torch.float32), (MixedPrecisionPolicy(), torch.float64)], ids=["mixed", "exact"]
)
@pytest.mark.parametrize("kind", ["stacked", "listed"])
@pytest.mark.parametrize("strategy", ["data", "model"])
def test_around_experts(kind: str, strategy: str, policy: Any, dtype: torch.dtype) -> None:
    for ours, theirs, of_result, kinds, gathers in run(2, mixed, kind, strategy, policy, dtype):
        assert ours <= 1.5 * theirs + 1e-12, (ours, theirs)
        assert of_result == (policy.param_dtype or dtype)
        assert kinds == {dtype}
        assert gathers <= (8 if strategy == "data" else 0)  # once a pass


def wrong(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("data", "hexa"))
    given = {"strategy": "fsdp", "capacities": None}
    with pytest.raises(PlanError, match="not along one of its axes"):
        hexa_fx.optimize_(build("stacked"), tokens(4), CONFIG, mesh=mesh["hexa"], **given)


def test_not_along_an_axis() -> None:
    run(2, wrong)


class NeverRecorded:
    """An event of a recording that failed: nobody can wait for it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("CUDA error: invalid argument")


def forgotten(rank: int, world: int) -> float:
    """A step that fails in the middle of a forward, after which FSDP2 has gathered weights and events that are none."""
    mesh = init_device_mesh("cpu", (world,))
    whole, data, loss_of = listed()
    sharded = copy.deepcopy(whole)
    for layer in list(sharded)[1:]:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    loss_of(sharded, data[rank]).backward()
    sharded.zero_grad()

    def fail(*_: Any) -> None:
        raise ValueError("while it is recorded")

    handle = sharded[2].router.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="while it is recorded"):
        sharded(data[rank])
    handle.remove()
    for group in fully_sharded.sharded_groups(sharded):
        for name in fully_sharded._EVENTS:
            setattr(group, name, NeverRecorded())
        for parameter in group.fsdp_params:
            gathered = parameter._unsharded_param
            if gathered.untyped_storage().size():
                gathered.data.fill_(torch.nan)  # what was gathered never arrived
    OneDevice(sharded).abandon()
    loss_of(sharded, data[rank]).backward()
    (sum(loss_of(whole, batch) for batch in data) / world).backward()
    names = dict(whole.named_parameters())
    return max(float((p.grad.full_tensor() - names[n].grad).abs().max()) for n, p in sharded.named_parameters())


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="needs torch 2.13")
def test_a_step_that_was_not_recorded_is_forgotten() -> None:
    assert max(run(2, forgotten)) < 1e-12
