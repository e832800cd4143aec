"""`hexa_fx.optimize_` with a mesh on unmodified transformers models: every strategy, every kind of capacities."""

import copy
import gc
import io
import pickle
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from harness import run
from models import cut, held, largest
from test_transformers import build, loss_of
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

import hexa_fx
from hexa_fx.distributed import checkpoint as checkpoints
from hexa_fx.distributed import slice_states
from hexa_fx.distributed.data import split_batch
from hexa_fx.distributed.gradients import sync_gradients, weighted_loss
from hexa_fx.distributed.groups import make_groups
from hexa_fx.errors import InputError, PlanError
from hexa_fx.passes.partition import plan_layers
from hexa_fx.passes.partition.plan_layers import PartitionConfig
from hexa_fx.plan import LayerCost
from tests.zoo.common import Looped

pytest.importorskip("transformers")


def mesh_of(world):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (world,))


def compared(model, whole, data, rank, loss):
    """Largest difference of loss and gradients to one process; the plan; the report."""
    session = model.partition
    mine = split_batch(data, session.plan, rank)
    part = weighted_loss(session, loss(model, mine), len(mine))
    part.backward()
    sync_gradients(model, session)
    reference = loss(whole, data)
    reference.backward()
    total = part.detach().clone()
    dist.all_reduce(total)
    names = dict(whole.named_parameters())
    pairs = [(total, reference.detach())]
    for name, p in model.named_parameters():
        grad = names[name].grad
        pairs.append(
            (
                held(session, name, torch.zeros_like(p) if p.grad is None else p.grad),
                cut(session, name, torch.zeros_like(names[name]) if grad is None else grad),
            )
        )
    plan, report = session.plan, str(model.report)
    session.close()
    return largest(pairs), plan, report, model.report.to_json()


def one_step(rank, world, name, strategy, capacities):
    model, whole = build(name), build(name)
    ids = torch.randint(0, 40, (5, 6), generator=torch.Generator().manual_seed(1))
    config = PartitionConfig(tile=4)
    same = hexa_fx.optimize_(
        model, {"input_ids": ids}, mesh=mesh_of(world), strategy=strategy, capacities=capacities, partition=config
    )
    assert same is model
    code = [model.partition.readable(layer.path) for layer in model.partition.plan.layers]
    return *compared(model, whole, ids, rank, loss_of), code


MIXED = {"model.layers.0.mlp": "data", "model.layers.1.mlp": "model"}


@pytest.mark.parametrize(
    ("name", "strategy", "capacities"),
    [
        ("mixtral", "auto", (1.0, 2.0)),
        ("qwen3", MIXED, "measure"),
        ("mixtral", "data", None),
        ("mixtral", "model", None),
        ("qwen3", "model", (3.0, 1.0)),
        pytest.param("mixtral", "model", (1.0, 2.0, 1.5, 2.0), marks=pytest.mark.slow),
        pytest.param("qwen3", "data", (1.0, 2.0, 1.5, 2.0), marks=pytest.mark.slow),
        pytest.param("qwen3", "auto", (1.0, 2.0), marks=pytest.mark.slow),
    ],
)
def test_one_step_equals_one_process(name, strategy, capacities):
    world = len(capacities) if isinstance(capacities, tuple) else 2
    for worst, plan, report, text, code in run(world, one_step, name, strategy, capacities):
        for layer, shown in zip(plan.layers, code):
            if layer.mode == "fsdp":
                continue
            data = layer.mode == "data_centric"
            assert f"h_i {list(layer.shards)}" in shown
            assert ("cache_gather" if data else "all_gather_v") in shown
            assert ("cache_release" if data else "reduce_scatter_v") in shown
        # Mixtral's routing weights are float32, and so are the sums of their gradients over ranks
        summed = name == "mixtral" and "model_centric" in [layer.mode for layer in plan.layers]
        assert worst < (5e-9 if summed else 1e-10)
        assert sum(plan.batch) == 5  # the example's first dimension
        assert [layer.shape.top_k for layer in plan.layers] == [2, 2]
        assert plan.fingerprint in report
        assert plan.fingerprint not in text  # JSON holds the plan itself
        assert '"shards"' in text
        if strategy == "auto":
            assert all(min(c.seconds_data_centric, c.seconds_fsdp) > 0 for c in (layer.cost for layer in plan.layers))
            assert "GB/s" in report
            assert "for 30 tokens" in report
        if strategy is MIXED:
            assert [layer.mode for layer in plan.layers] == ["data_centric", "model_centric"]
            assert min(plan.capacities) > 0
        if capacities == (3.0, 1.0):
            assert plan.layers[0].shards == (4, 20)
            assert plan.batch == (1, 4)


def whole_experts_alive(rank, world, mode):
    """Bytes of the experts' whole weights that are left; ``mode`` is what auto finds."""
    model, ids = build("qwen3"), torch.randint(0, 40, (4, 6))
    experts = [StorageWeakRef(p.untyped_storage()) for name, p in model.named_parameters() if ".experts." in name]
    plan_layers.layer_cost = lambda *_, **__: (mode, LayerCost(0.0, 0.0))
    hexa_fx.optimize_(model, {"input_ids": ids}, mesh=mesh_of(world), strategy="auto", capacities=None)
    assert {layer.mode for layer in model.partition.plan.layers} == {mode}
    gc.collect()
    alive = sum(not storage.expired() for storage in experts)
    model(input_ids=ids[2 * rank :][:2], labels=ids[2 * rank :][:2]).loss.backward()
    model.partition.close()
    return len(experts), alive


@pytest.mark.parametrize("mode", ["fsdp", "data_centric", "model_centric"])
def test_nothing_holds_whole_experts(mode):
    """The run that auto times puts back what was there before, and the session keeps what plans it anew."""
    assert run(2, whole_experts_alive, mode) == [(4, 0), (4, 0)]


def wrong_requests(rank, world):
    ids = torch.randint(0, 40, (4, 6))
    for strategy in ({"model.layers.7.mlp": "data"}, "expert"):
        with pytest.raises(PlanError, match=r"model.layers.7.mlp|strategy 'expert': expected 'auto'"):
            hexa_fx.optimize_(
                build("mixtral"), {"input_ids": ids}, mesh=mesh_of(world), strategy=strategy, capacities=None
            )
    for said, change, asked in WRONG:
        model, x = Two("listed"), torch.randn(8, 16, dtype=torch.float64)
        change(model, rank)
        whole = {name: p.shape for name, p in model.named_parameters()}
        given = {"mesh": mesh_of(world), "strategy": "data", "capacities": None} | asked(rank)
        with pytest.raises(PlanError, match=said):
            hexa_fx.optimize_(model, x, CONFIG, **given)
        assert {name: p.shape for name, p in model.named_parameters()} == whole
    model, x = Two("halves"), torch.randn(8, 16, dtype=torch.float64)
    hexa_fx.optimize_(model, x, CONFIG, mesh=mesh_of(world), strategy="data", capacities=None)
    register_parametrization(model.blocks[1], "first", nn.Identity())
    with pytest.raises(PlanError, match=r"something is added to 'blocks.1.first'"):
        model(x)
    if rank == 0:
        with pytest.raises(PlanError, match="rank 0 is not in the mesh"):
            make_groups(dist.GroupMember.NON_GROUP_MEMBER)
    return True


def other_weights(model, rank):
    with torch.no_grad():
        model.mix.bias[0] += rank


def tied_expert(model, _):
    model.blocks[1].experts[0] = model.blocks[0].experts[0]


def expert_elsewhere(model, _):
    model.more = nn.Linear(24, 16)
    model.more.weight = model.blocks[0].experts[2].down.weight


class Adapter(nn.Module):
    """What is asked of PEFT's wrappers around parameters."""

    parameter_name, lora_A, num_experts = "weight", (), 4
    _activate_lora = get_delta_factors = None

    def __init__(self, around):
        super().__init__()
        self.get_base_layer = lambda: around


def adapter(model, _):
    model.more = Adapter(model.blocks[1].experts[3].down)


CONFIG = hexa_fx.HexaConfig(verify=False)


def same(model, _):
    return model


WRONG = [
    ("strategy is (data|model) and on rank . (data|model)", same, lambda rank: {"strategy": ("data", "model")[rank]}),
    ("tile is . and on rank", same, lambda rank: {"partition": PartitionConfig(tile=1 + rank)}),
    ("'mix.bias' and 0 more parameters of rank 1 are not those of rank 0", other_weights, lambda _: {}),
    ("'blocks.0.experts.0.gate.weight' is used twice", tied_expert, lambda _: {}),
    ("'blocks.0.experts.2.down.weight' is also 'more.weight'", expert_elsewhere, lambda _: {}),
    ("something is added to 'blocks.1.experts.3.down.weight'", adapter, lambda _: {}),
    ("mesh is a str", same, lambda _: {"mesh": "cpu"}),
    ("data_mesh is a int", same, lambda _: {"data_mesh": 2}),
    ("strategy is a NoneType", same, lambda _: {"strategy": None}),
    ("capacities is 'measure'", same, lambda _: {"capacities": 3}),
]


def test_wrong_requests():
    assert all(run(2, wrong_requests))


@pytest.mark.parametrize(
    "wrong",
    [
        *({"tile": 0}, {"batch": 4.0}, {"tokens": -1}, {"data_parallel": "average"}, {"dtype_bytes": -2}),
        *({"bytes_per_element": 0}, {"kernel_columns": 0}, {"attention_seconds": -1.0}),
        *({"memory_caps": "all"}, {"memory_caps": (1.5, 2)}),
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_wrong_options(wrong):
    with pytest.raises(PlanError, match=next(iter(wrong))):
        PartitionConfig(**wrong)


def test_profile_devices_is_at_the_top():
    from hexa_fx.distributed.profile import profile_devices

    assert hexa_fx.profile_devices is profile_devices


# --- experts that are stored otherwise -------------------------------------------------------------------------------


class Expert(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(16, 24, bias), nn.Linear(16, 24, bias), nn.Linear(24, 16, bias)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Stored(Looped):
    """Up before gate in one weight: as halves, or alternating; the gate is read through a slice."""

    def __init__(self, how):
        super().__init__(None, 16)
        self.how = how
        self.first = nn.Parameter(torch.randn(4, 16, 48) * 0.2)
        self.bias = nn.Parameter(torch.randn(4, 48) * 0.2)
        self.down = nn.Parameter(torch.randn(4, 24, 16) * 0.2)

    def expert(self, e, rows):
        h = rows @ self.first[e] + self.bias[e]
        up, gate = h.chunk(2, -1) if self.how == "halves" else (h[..., ::2], h[..., 1::2])
        return (nn.functional.silu(gate) * up) @ self.down[e]


class Flat(Looped):
    """All experts below each other in one matrix, as megablocks stores them."""

    def __init__(self):
        super().__init__(None, 16)
        self.w1, self.w2 = (nn.Parameter(torch.randn(4 * 24, 16) * 0.2) for _ in range(2))

    def expert(self, e, rows):
        return nn.functional.gelu(rows @ self.w1.view(4, 24, 16)[e].t()) @ self.w2.view(4, 24, 16)[e]


KINDS = {
    "listed": lambda: Looped(lambda: Expert(False), 16),  # one module an expert, as most code on the hub has it
    "listed-bias": lambda: Looped(lambda: Expert(True), 16),
    "halves": lambda: Stored("halves"),
    "alternating": lambda: Stored("alternating"),
    "flat": lambda: Flat(),
}


class Two(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.mix = nn.Linear(16, 16)
        self.blocks = nn.ModuleList([KINDS[kind]() for _ in range(2)])
        self.double()

    def forward(self, x):
        for block in self.blocks:
            x = x + block(torch.tanh(self.mix(x)))
        return x


def square_loss(model, x):
    return (model(x) ** 2).sum(-1).mean()


def stored(rank, world, kind, strategy, capacities):
    model, whole = Two(kind), Two(kind)
    x = torch.randn(14, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    hexa_fx.optimize_(
        model, x, mesh=mesh_of(world), strategy=strategy, capacities=capacities, partition=PartitionConfig(tile=4)
    )
    return compared(model, whole, x, rank, square_loss)


_slow = pytest.mark.slow
STORED = [(kind, strategy) for kind in KINDS for strategy in ("data", "model")]
QUICK = {("listed-bias", "data"), ("listed", "model"), ("halves", "data"), ("alternating", "model"), ("flat", "model")}


@pytest.mark.parametrize(
    ("kind", "strategy"), [case if case in QUICK else pytest.param(*case, marks=_slow) for case in STORED]
)
def test_experts_stored_in_other_ways(kind, strategy):
    for worst, plan, _, _ in run(2, stored, kind, strategy, (1.0, 3.0)):
        assert worst < 1e-10
        assert plan.layers[0].shards == ((12, 12) if strategy == "data" else (20, 4))


def stored_twice(value):
    """What torch.load gives of what the first rank saved, and of what this one did."""
    file = io.BytesIO()
    torch.save(value, file)
    box = [file.getvalue()]
    dist.broadcast_object_list(box)
    return torch.load(io.BytesIO(box[0])), torch.load(io.BytesIO(file.getvalue()))


def check_what_needs_whole_weights(model):
    for asked in (hexa_fx.undo_, lambda model: hexa_fx.quantize_experts_(model, "nf4")):
        with pytest.raises(InputError, match="cut over devices"):
            asked(model)


def check_slices_in_state_dicts(model, whole):
    """A rank's own slices load, those of equal shape that another rank saved do not. It is said once that they are slices."""
    said = []
    of_others = pytest.raises(PlanError, match="slice of another rank or plan") if dist.get_rank() else nullcontext()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.0, momentum=0.9) for net in (model, whole)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slice_states.log, "warning", lambda text, *args: said.append(text % args))
        checkpoints.state_dict(model, model.partition)
        checkpoints.state_dict(model, model.partition, optimizers[0])
        assert not said
        for part in (model.blocks, model):
            of_first, own = stored_twice(part.state_dict())
            part.load_state_dict(own)
            with of_others:
                part.load_state_dict(of_first)
        for net, optimizer in zip((model, whole), optimizers):
            for p in net.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
            of_first, own = stored_twice(optimizer.state_dict())
            optimizer.load_state_dict(own)
            with of_others if net is model else nullcontext():
                optimizer.load_state_dict(of_first)
            late = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
            late.load_state_dict(of_first)  # torch tells nobody
            with of_others if net is model else pytest.raises(PlanError, match=r"state of 'blocks.0.* is whole"):
                late.step()
        check_flattened(model, optimizers[0], of_others)
        type("Own", (torch.optim.AdamW,), {})(model.parameters(), lr=0.0).step()
        Other(model.parameters(), {"lr": 0.0}).step()
        for kind in (torch.optim.Adafactor, torch.optim.LBFGS):
            with pytest.raises(PlanError, match=rf"{kind.__name__} looks at whole matrices .* slices of 'blocks.0"):
                kind(model.parameters(), lr=0.0).step(lambda: 0.0)
        model.zero_grad()
        whole.zero_grad()
        assert len(said) == 3
        assert said.pop().startswith("Other may look at whole matrices")
        assert "as (12, 16) and not (24, 16)" in said[0]
        assert "state of this rank's slices" in said[1]


class Other(torch.optim.Optimizer):
    """Of which nothing is known."""

    def step(self, closure=None):
        return None


def check_flattened(model, optimizer, of_others):
    """As torch.distributed.checkpoint flattens the state, which leaves out what the groups of an optimizer do not have."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    of_first, own = stored_twice(get_optimizer_state_dict(model, optimizer, options=options))
    model.zero_grad()
    for taking in (optimizer, torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)):
        set_optimizer_state_dict(model, taking, own, options=options)
        with of_others:
            set_optimizer_state_dict(model, taking, of_first, options=options)


def one_block_twice(rank, world):
    """A block that occurs twice, each call recomputed by the older kind of checkpointing, which runs forward without gradients."""
    model, whole = Two("listed"), Two("listed")
    x = torch.randn(6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for net in (model, whole):
        net.blocks[1] = net.blocks[0]
    config = PartitionConfig(tile=4)
    hexa_fx.optimize_(model, x, CONFIG, mesh=mesh_of(world), strategy="data", capacities=None, partition=config)
    with pytest.raises(PlanError, match="cannot be copied or pickled"):
        copy.deepcopy(model)
    with pytest.raises(PlanError, match="cannot be copied or pickled"):
        pickle.dumps(model.blocks[0])
    with pytest.raises(PlanError, match="of the state dict is whole"):
        model.load_state_dict(whole.state_dict())
    check_slices_in_state_dicts(model, whole)
    check_what_needs_whole_weights(model)
    with pytest.raises(InputError, match="give its session"):
        checkpoints.state_dict(model)
    with pytest.raises(InputError, match="did not cut the experts of this model"):
        sync_gradients(whole, model.partition)
    with pytest.raises(InputError, match="number of samples"):
        weighted_loss(model.partition, x.sum(), 2.5)

    def loss(net, data):
        h = data
        for block in net.blocks:
            h = h + (
                checkpoint(block, torch.tanh(net.mix(h)), use_reentrant=True)
                if net is model
                else block(torch.tanh(net.mix(h)))
            )
        return (h**2).sum(-1).mean() + square_loss(net, data)

    return compared(model, whole, x, rank, loss)[0]


def test_one_block_twice():
    assert max(run(2, one_block_twice)) < 1e-10


@pytest.mark.parametrize("kind", ["listed-bias", "halves", "flat"])
def test_other_storage_with_an_empty_shard(kind):
    for worst, plan, _, _ in run(2, stored, kind, "model", (1.0, 1e9)):
        assert worst < 1e-10
        assert plan.layers[0].shards == (24, 0)
