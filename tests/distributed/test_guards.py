"""Cases that would be wrong without a sound: with the guard they raise or are exact, without it the test fails."""

import pytest
import torch
import torch.distributed as dist
from harness import run, start
from models import KINDS, MODES, Net, batch, cut, gradient_pairs, install, largest, loss_sum, make_plan, own, rewritten

from hexa_fx.distributed import shared_cache
from hexa_fx.distributed.collectives import (
    all_gather_v,
    all_reduce,
    count_traffic,
    fill_slot,
    finish,
    reduce_scatter_v,
    wait,
)
from hexa_fx.errors import PlanError
from hexa_fx.passes.partition.install import install_plan

TWO = [KINDS["concat"]] * 2
THREE = [KINDS["concat"]] * 3


def gradients_of_collectives(rank, world):
    name = dist.group.WORLD.group_name
    x = torch.arange(4.0, requires_grad=True)
    out = wait(all_reduce(x * 1.0, name))
    (out * torch.tensor([1.0, 2.0, 3.0, 4.0]) * (rank + 1)).sum().backward()
    y = torch.ones(4, requires_grad=True)
    part = wait(reduce_scatter_v(y * 1.0, [3, 1], name))
    (part * (rank + 1)).sum().backward()
    z = torch.ones(1 + rank, requires_grad=True)
    every = wait(all_gather_v(z * 1.0, [1, 2], name))
    (every * (rank + 1)).sum().backward()
    return x.grad.tolist(), y.grad.tolist(), z.grad.tolist()


def test_collectives_have_gradients():
    for rank, (all_reduced, scattered, gathered) in enumerate(run(2, gradients_of_collectives)):
        assert all_reduced == [3.0, 6.0, 9.0, 12.0]  # one rank's own gradient without a formula
        assert scattered == [1.0, 1.0, 1.0, 2.0]
        assert gathered == [3.0] * (1 + rank)


def slot_writes(rank, world):
    slot = torch.zeros(3, 4)
    before = slot._version
    finish(fill_slot(slot, torch.full((1 + rank, 4), float(rank)), [1, 2], dist.group.WORLD.group_name))
    return slot._version - before, slot[:, 0].tolist()


def test_writing_a_slot_is_seen_by_autograd():
    for bumped, rows in run(2, slot_writes):
        assert bumped > 0
        assert rows == [0.0, 1.0, 1.0]


def unbound_graph(rank, world, plan, guarded):
    import models

    model = Net(TWO)
    installed = install_plan(model, rewritten(model), plan)
    for (block,) in (forms.values() for forms in installed.blocks):
        models.run_graph(model.get_submodule(block.path), block.graph)
    if not guarded:
        saved = installed.session.saved_tensors
        saved.check_bound = saved.hook = lambda: None
    x, target = batch(7)
    try:
        loss_sum(model(x[own(plan.batch, rank)]), target[own(plan.batch, rank)]).backward()
    except (PlanError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return "none", ""


def test_gathered_weights_are_never_saved_unseen():
    plan = make_plan(2, "uneven", MODES["data"][:2], TWO)
    for kind, text in run(2, unbound_graph, plan, True):
        assert kind == "PlanError"
        assert "bind" in text
    for kind, text in run(2, unbound_graph, plan, False):  # the second guard: the slot's version counter
        assert kind == "RuntimeError"
        assert "inplace" in text


def failing_experts(rank, world, plan):
    """An error between a layer's gather and the end of its experts, where autograd saves what they need."""
    model = Net(TWO)
    saved = install(model, plan).session.saved_tensors
    x, _ = batch(sum(plan.batch))
    pack, saved._pack = saved._pack, fail
    with pytest.raises(ValueError, match="on purpose"):
        model(x)
    saved._pack = pack
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def fail(*_, **__):
    raise ValueError("on purpose")


def test_hooks_end_with_a_layer_that_fails():
    assert run(1, failing_experts, make_plan(1, "even", MODES["data"][:2], TWO)) == [None]


def failing_gather(rank, world, plan):
    """A gather that does not start, after this rank's rows were packed over those of the layer in the slot."""
    model, whole = Net(TWO), Net(TWO)
    installed = install(model, plan)
    x, target = batch(sum(plan.batch))
    loss = loss_sum(model(x), target)
    start_gather, shared_cache.fill_slot = shared_cache.fill_slot, fail
    with pytest.raises(ValueError, match="on purpose"):
        installed.session.cache._fill(0)
    shared_cache.fill_slot = start_gather
    loss.backward()
    loss_sum(whole(x), target).backward()
    return largest(gradient_pairs(model, whole, installed.session))


def test_a_gather_that_failed_is_not_used():
    assert run(1, failing_gather, make_plan(1, "even", MODES["data"][:2], TWO, slots=1))[0] < 1e-10


def changed_between(rank, world, plan):
    model = Net(TWO)
    install(model, plan)
    x, target = batch(7)
    loss = loss_sum(model(x[own(plan.batch, rank)]), target[own(plan.batch, rank)])
    with torch.no_grad():
        model.layers[0].w1.mul_(2)
    try:
        loss.backward()
    except PlanError as error:
        return str(error)
    return "none"


def test_weights_changed_between_forward_and_backward():
    plan = make_plan(2, "uneven", MODES["data"][:2], TWO)
    assert all("changed after they were gathered" in text for text in run(2, changed_between, plan))


def wrong_rows(rank, world, plan):
    model = Net(TWO)
    install(model, plan)
    x, _ = batch(5)
    model(x)


def test_other_token_counts_than_planned():
    plan = make_plan(2, "uneven", MODES["model"][:2], TWO, static=True)  # (5, 2) tokens; 5 is right on rank 0 only
    outcomes = start(2, wrong_rows, plan)
    assert "PlanError: rank 1 has 5 tokens, the plan fixed [5, 2]" in outcomes[1][1]
    assert outcomes[0][0] == "error"
    assert "RankError" in outcomes[0][1]


def traffic(rank, world, plan, kinds):
    model = Net(kinds)
    installed = install(model, plan)
    x, target = batch(sum(plan.batch))
    mine = own(plan.batch, rank)
    x = x[mine].clone().requires_grad_()  # as if the layers were in the middle of a model
    with count_traffic() as counter:
        loss_sum(model(x), target[mine]).backward()
    cache = installed.session.cache
    row = installed.session.geometry("layers.0").row
    return dict(counter), cache.nbytes, cache.gathers, row


@pytest.mark.parametrize(("world", "slots"), [(2, 1), (2, 2), (4, 2)])
def test_bytes_of_data_centric(world, slots):
    plan = make_plan(world, "uneven", MODES["data"], THREE, slots=slots)
    for rank, (counted, nbytes, gathers, row) in enumerate(run(world, traffic, plan, THREE)):
        shards = plan.layers[0].shards
        # forward gathers every layer; backward every layer but those still in a slot
        assert gathers == 3 + 3 - slots
        assert counted["all_gather_v"] == gathers * (24 - shards[rank]) * row * 8
        assert counted["reduce_scatter_v"] == 3 * (world - 1) * shards[rank] * row * 8
        assert nbytes == slots * 24 * row * 8


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_of_model_centric(world):
    plan = make_plan(world, "uneven", MODES["model"], THREE)
    for rank, (counted, _, _, _) in enumerate(run(world, traffic, plan, THREE)):
        mine, total = plan.batch[rank], sum(plan.batch)
        other = total - mine
        token, weights, ids = 8 * 8, 2 * 8, 2 * 8
        forward = other * (token + weights + ids)
        backward = other * token
        assert counted["all_gather_v"] == 3 * (forward + backward)
        assert counted["reduce_scatter_v"] == 3 * (world - 1) * (mine * token + mine * (token + weights))


def saved_bytes(rank, world, layers, slots):
    kinds = [KINDS["mlp"]] * layers
    plan = make_plan(world, "uneven", ("data_centric",) * layers, kinds, slots=slots)
    model = Net(kinds)
    installed = install(model, plan)
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        x, _ = batch(sum(plan.batch))
        y = model(x[own(plan.batch, rank)])
    slots_at = {slot.buffer.untyped_storage().data_ptr() for slot in installed.session.cache.slots}
    aliases = sum(t.untyped_storage().data_ptr() in slots_at for t in seen if t.numel())
    y.sum().backward()
    return aliases, len(seen), installed.session.cache.nbytes


@pytest.mark.parametrize("slots", [1, 2])
def test_gathered_memory_does_not_grow_with_layers(slots):
    (few_aliases, few, few_bytes), (aliases, many, nbytes) = (run(2, saved_bytes, n, slots)[0] for n in (2, 6))
    assert few_aliases == aliases == 0
    assert nbytes == few_bytes
    assert many > few > 0  # the surrounding hooks saw everything else


def other_router(rank, world, plan):
    """Rank 1's router breaks ties, and everything else, differently."""
    model, whole = Net(TWO), Net(TWO)
    install(model, plan)
    if rank == 1:
        for net in (model, whole):
            net.layers[0].wg.data.mul_(-1)
    x, _ = batch(sum(plan.batch))
    mine = own(plan.batch, rank)
    with torch.no_grad():
        return float((model(x[mine]) - whole(x)[mine]).abs().max())


def test_a_token_is_routed_by_its_own_rank():
    assert max(run(2, other_router, make_plan(2, "uneven", MODES["model"][:2], TWO))) < 1e-12


def living_graph(rank, world, plan):
    """A forward from before the cut is still alive, and with it autograd's note of the whole weights' shape."""
    model, whole = Net(TWO), Net(TWO)
    x, target = batch(sum(plan.batch))
    alive = model(x)
    installed = install(model, plan)
    mine = own(plan.batch, rank)
    loss_sum(model(x[mine]), target[mine]).backward()
    loss_sum(whole(x), target).backward()
    return largest(gradient_pairs(model, whole, installed.session)), alive.shape


@pytest.mark.parametrize("mode", ["model", "data"])
def test_a_graph_from_before_the_cut(mode):
    assert max(worst for worst, _ in run(2, living_graph, make_plan(2, "uneven", MODES[mode][:2], TWO))) < 1e-10


def swapped(rank, world, plan):
    """Weights exchanged through ``.data``, which changes no version."""
    model = Net(TWO)
    session = install(model, plan).session
    session.follow(model)
    x, _ = batch(sum(plan.batch))
    mine = own(plan.batch, rank)
    for _ in range(2):
        model(x[mine]).sum().backward()
    for layer in model.layers:
        layer.w1.data = layer.w1.data * 2
    try:
        model(x[mine])
    except PlanError as error:
        first = str(error)
    session.invalidate()
    whole = Net(TWO)
    for layer in whole.layers:
        layer.w1.data.mul_(2)
    return first, float((model(x[mine]) - whole(x)[mine]).detach().abs().max())


def test_weights_that_were_replaced():
    for text, worst in run(2, swapped, make_plan(2, "uneven", MODES["data"][:2], TWO, slots=2)):
        assert "invalidate()" in text
        assert worst < 1e-12


def other_parameters(rank, world, mode):
    """torch.func.functional_call with this rank's slices, and then with whole weights."""
    plan = make_plan(world, "uneven", MODES[mode][:2], TWO, slots=2)
    model, whole = Net(TWO), Net(TWO)
    session = install(model, plan).session
    session.follow(model)
    x, target = batch(sum(plan.batch))
    mine = own(plan.batch, rank)
    worst = 0.0
    for factor in (1.0, 2.0):
        ours, theirs = (
            {name: (p.detach() * factor).requires_grad_() for name, p in net.named_parameters()}
            for net in (model, whole)
        )
        loss_sum(torch.func.functional_call(model, ours, (x[mine],)), target[mine]).backward()
        loss_sum(torch.func.functional_call(whole, theirs, (x,)), target).backward()
        pairs = [
            (ours[f"layers.{i}.w1"].grad, cut(session, f"layers.{i}.w1", theirs[f"layers.{i}.w1"].grad)) for i in (0, 1)
        ]
        worst = max(worst, largest(pairs))
    with pytest.raises(PlanError, match="functional_call and assignments take slices"):
        torch.func.functional_call(model, theirs, (x[mine],))
    return worst


@pytest.mark.parametrize("mode", ["data", "model"])
def test_functional_call_takes_slices(mode):
    assert max(run(2, other_parameters, mode)) < 1e-10


def routing_is_gathered(rank, world, plan):
    model = Net(TWO)
    installed = install_plan(model, rewritten(model), plan)
    return [str(form.graph) for forms in installed.blocks for form in forms.values()]


def test_graphs_show_collectives_and_sizes_and_agree():
    plan = make_plan(2, "uneven", ("model_centric", "data_centric"), TWO, static=True)
    first, second = run(2, routing_is_gathered, plan)
    assert first[0].count("collectives.all_gather_v") == 3  # x, ids and weights: routing is never computed twice
    assert "[5, 2]" in first[0]
    assert "[8, 16]" in first[1]
    assert "cache_gather" in first[1]
    for one, other in zip(first, second):
        names = [[line.split(" ")[0] for line in text.splitlines()] for text in (one, other)]
        assert names[0] == names[1]


def test_optimizer_steps_are_counted():
    before = shared_cache._optimizer_steps
    p = torch.nn.Parameter(torch.zeros(1))
    p.grad = torch.ones(1)
    torch.optim.SGD([p], lr=0.1).step()
    assert shared_cache._optimizer_steps == before + 1


def exchanged_while_capturing(rank, world):
    session = install(Net(TWO), make_plan(world, "even", MODES["model"][:2], TWO)).session
    with pytest.MonkeyPatch.context() as patch:  # the process serves the next test, too
        for name in ("is_initialized", "is_current_stream_capturing"):
            patch.setattr(torch.cuda, name, lambda: True)
        with pytest.raises(PlanError, match="static_tokens=True"):
            session.exchange_counts(3)


def test_a_cuda_graph_must_not_hold_exchanged_counts():
    run(2, exchanged_while_capturing)


def test_only_what_a_collective_returned_can_be_waited_for():
    with pytest.raises(PlanError, match="no collective writes"):
        wait(torch.zeros(2))
