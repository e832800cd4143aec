"""Packed expert weights: the same parameters to everyone, one tensor to the kernel."""

from __future__ import annotations

import copy
import io
import logging
import math
import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hexa_fx.ir import PackedWeight
from hexa_fx.isolation.size import bytes_that_stay
from hexa_fx.jit import DriverError
from hexa_fx.runtime import packing, shared_storage
from hexa_fx.runtime.guards import GuardMiss
from hexa_fx.runtime.install import install
from hexa_fx.runtime.packing import PackedExperts
from tests.runtime.handmade import WIDTH, D, E, ListMoE, list_packed, list_rewritten


@pytest.fixture(autouse=True)
def in_place(monkeypatch):
    """Weights of any size are read where they are."""
    monkeypatch.setattr(packing, "COPY_ELEMENTS", 0)


@pytest.fixture
def block() -> ListMoE:
    torch.manual_seed(0)
    return ListMoE()


def both(block: nn.Module) -> tuple[PackedExperts, PackedExperts]:
    """gate+up and down."""
    first, second = list_packed()
    return PackedExperts(block, first), PackedExperts(block, second)


def gate_up(block: ListMoE) -> torch.Tensor:
    return torch.stack([torch.cat([e.w1.weight, e.w3.weight]) for e in block.experts]).detach()


def test_it_reads_bit_for_bit_without_copying(block):
    with torch.no_grad():
        block.experts[1].w1.weight[0, :3] = torch.tensor([float("nan"), float("-inf"), -0.0])
    expected = gate_up(block)
    packed, down = both(block)
    read = packed()
    assert read.shape == (E, 2 * WIDTH, D)
    assert read.view(torch.int32).equal(expected.view(torch.int32))
    assert read.is_contiguous()
    assert down().shape == (E, D, WIDTH)
    for number, expert in enumerate(block.experts):
        assert expert.w1.weight.data_ptr() == read[number].data_ptr()
        assert expert.w3.weight.data_ptr() == read[number, WIDTH:].data_ptr()
        assert expert.w1.weight.is_contiguous()
    assert packed().data_ptr() == read.data_ptr()
    assert packed.is_packed


def test_an_optimizer_step_and_in_place_writes_are_seen(block):
    packed, _ = both(block)
    packed()
    with torch.no_grad():
        block.experts[2].w3.weight.fill_(3)
    assert packed()[2, WIDTH:].eq(3).all()
    assert packed()[2, :WIDTH].ne(3).all()


def test_tiny_weights_are_copied_where_a_gradient_is_wanted(block, monkeypatch):
    monkeypatch.setattr(packing, "COPY_ELEMENTS", 1 << 16)
    for packed in both(block):
        with torch.no_grad():
            in_place = packed()
        copied = packed()
        assert torch.equal(copied, in_place)
        assert copied.data_ptr() != in_place.data_ptr()
        factor = torch.randn_like(copied)
        (copied * factor).sum().backward()
    for number, expert in enumerate(block.experts):
        assert torch.equal(expert.w2.weight.grad, factor[number])
        assert expert.w1.weight.grad is not None


def test_gradients_are_slices_of_one_tensor(block):
    packed, _ = both(block)
    factor = torch.randn(E, 2 * WIDTH, D)
    (packed() * factor).sum().backward()
    storages = set()
    for number, expert in enumerate(block.experts):
        assert torch.equal(expert.w1.weight.grad, factor[number, :WIDTH])
        assert torch.equal(expert.w3.weight.grad, factor[number, WIDTH:])
        storages.add(expert.w1.weight.grad.untyped_storage().data_ptr())
        storages.add(expert.w3.weight.grad.untyped_storage().data_ptr())
    assert len(storages) == 1
    (packed() * factor).sum().backward()
    assert torch.equal(block.experts[3].w3.weight.grad, 2 * factor[3, WIDTH:])
    nn.utils.clip_grad_norm_(block.parameters(), 0.5)
    norm = torch.stack([p.grad.norm() for p in block.parameters() if p.grad is not None]).norm()
    torch.testing.assert_close(norm, torch.tensor(0.5), rtol=1e-4, atol=0)


def test_second_derivatives(block):
    packed, _ = both(block.double())
    parameter = block.experts[1].w1.weight
    (first,) = torch.autograd.grad((packed() ** 3).sum(), parameter, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), parameter)
    torch.testing.assert_close(second, 6 * parameter)


def test_frozen_parameters_get_no_gradient(block):
    packed, _ = both(block)
    block.experts[1].w1.weight.requires_grad_(False)
    block.experts[2].requires_grad_(False)
    packed().sum().backward()
    have = {name for name, p in block.named_parameters() if p.grad is not None}
    assert have == {f"experts.{e}.{w}.weight" for e, w in [(0, "w1"), (0, "w3"), (1, "w3"), (3, "w1"), (3, "w3")]}
    block.requires_grad_(False)
    assert not packed().requires_grad
    with torch.no_grad():
        block.requires_grad_(True)
        assert not packed().requires_grad


def test_parameter_hooks_are_called(block):
    packed, _ = both(block)
    seen = []
    block.experts[0].w1.weight.register_hook(lambda grad: seen.append(grad.shape))
    block.experts[0].w3.weight.register_post_accumulate_grad_hook(lambda p: seen.append("post"))
    packed().sum().backward()
    assert sorted(map(str, seen)) == ["post", f"torch.Size([{WIDTH}, {D}])"]


def test_experts_that_did_not_occur_can_keep_none(block):
    packed, _ = both(block)
    packed(torch.tensor([[0, 2], [2, E]])).sum().backward()
    have = {number for number, expert in enumerate(block.experts) if expert.w1.weight.grad is not None}
    assert have == {0, 2}
    assert block.experts[3].w3.weight.grad is None


MOVES = {
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "to and back": lambda m: m.double().float(),
    "one .data": lambda m: setattr(m.experts[1].w3.weight, "data", m.experts[1].w3.weight.data.clone() * 2),
    "the middle one": lambda m: setattr(m.experts[2].w1, "weight", nn.Parameter(torch.randn(WIDTH, D))),
    "assign": lambda m: m.load_state_dict({k: v.clone() * 3 for k, v in m.state_dict().items()}, assign=True),
    "load": lambda m: m.load_state_dict({k: v.clone() * 3 for k, v in m.state_dict().items()}),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=list(MOVES))
def test_moved_parameters_are_noticed(block, move):
    packed, _ = both(block)
    packed()
    move(block)
    assert torch.equal(packed(), gate_up(block))
    assert packed.is_packed
    packed().float().sum().backward()
    assert all(expert.w1.weight.grad is not None for expert in block.experts)


def test_a_transposed_square_weight_is_noticed():
    block = nn.Module()
    block.experts = nn.ModuleList(nn.Linear(D, D, bias=False) for _ in range(E))
    packed = PackedExperts(block, PackedWeight("w", (tuple(f"experts.{e}.weight" for e in range(E)),)))
    packed()
    block.experts[1].weight.data = block.experts[1].weight.data.t()
    assert torch.equal(packed(), torch.stack([expert.weight for expert in block.experts]))


def test_biases_and_unequal_parts():
    block = nn.Module()
    block.a = nn.ModuleList(nn.Linear(D, 3) for _ in range(E))
    block.b = nn.ModuleList(nn.Linear(D, 5) for _ in range(E))
    names = [tuple(f"{part}.{e}.bias" for e in range(E)) for part in "ab"]
    expected = torch.stack([torch.cat([a.bias, b.bias]) for a, b in zip(block.a, block.b)])
    packed = PackedExperts(block, PackedWeight("b1", tuple(names)))
    assert packed().shape == (E, 8)
    assert torch.equal(packed(), expected)
    (packed() * torch.arange(8)).sum().backward()
    assert block.b[2].bias.grad.tolist() == [3, 4, 5, 6, 7]
    single = PackedExperts(block, PackedWeight("b", (names[1],)))
    assert single().shape == (E, 5)


def test_state_dict_goes_both_ways(block):
    original = copy.deepcopy(block)
    install(block, list_rewritten(), list_rewritten(False))
    file = io.BytesIO()
    torch.save(block.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert list(loaded) == list(original.state_dict())
    fresh = ListMoE()
    fresh.load_state_dict(loaded)
    for name, tensor in original.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor)
    install(fresh, list_rewritten(), list_rewritten(False))
    fresh.load_state_dict({name: tensor + 1 for name, tensor in original.state_dict().items()})
    assert torch.equal(fresh._hexa_w1(), gate_up(original) + 1)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 3) -> None:
    for step in range(number):
        x = torch.randn(2, 16, D, generator=torch.Generator().manual_seed(step))
        for part in x.chunk(2):  # accumulated
            model(part).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_built_before_or_after_follows_the_original(when, kind):
    torch.manual_seed(0)
    original = ListMoE().double()
    other = copy.deepcopy(original)
    options = {"lr": 0.05, "weight_decay": 0.1, "foreach": True}
    optimizer = kind(other.parameters(), **options) if when == "before" else None
    install(other, list_rewritten(), list_rewritten(False))
    optimizer = optimizer or kind(other.parameters(), **options)
    # Every expert gets tokens in every step: a zero and a None gradient are then never told apart.
    run = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        steps(original, kind(original.parameters(), **options))
        steps(other, optimizer)
    finally:
        torch.set_default_dtype(run)
    for (name, p1), p2 in zip(original.named_parameters(), other.parameters()):
        torch.testing.assert_close(p2, p1, rtol=1e-9, atol=1e-12, msg=name)
    assert other._hexa_w1.is_packed


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_what_weight_decay_does_to_an_expert_without_tokens(block, kind):
    """The documented difference: zero instead of None, so that the optimizer decays an expert that had no tokens."""
    packed, _ = both(block)
    optimizer = kind(block.parameters(), lr=0.1, weight_decay=0.5)
    before = block.experts[3].w1.weight.detach().clone()
    packed()[:3].sum().backward()
    assert block.experts[3].w1.weight.grad.eq(0).all()
    optimizer.step()
    torch.testing.assert_close(block.experts[3].w1.weight.detach(), before * (1 - 0.1 * 0.5))
    optimizer.zero_grad()
    before = block.experts[3].w1.weight.detach().clone()
    packed(torch.tensor([0, 1, 2]))[:3].sum().backward()
    optimizer.step()
    assert torch.equal(block.experts[3].w1.weight, before)


# -- where nothing may be moved ----------------------------------------------------------------------------------------


def test_shared_parameters_are_copied(block, caplog):
    block.experts[1].w1.weight = block.experts[0].w1.weight
    packed, _ = both(block)
    with caplog.at_level(logging.INFO, logger="hexa_fx"):
        assert torch.equal(packed(), gate_up(block))
        packed().sum().backward()
    assert block.experts[0].w1.weight.grad.eq(2).all()
    assert not packed.is_packed
    assert [record.message for record in caplog.records] == [
        "_hexa_w1 is stacked by copying at every forward: experts share a parameter"
    ]


def test_the_meta_device_gives_shapes(block):
    packed, _ = both(block.to("meta"))
    assert packed().shape == (E, 2 * WIDTH, D)
    assert packed().device.type == "meta"
    block.to_empty(device="cpu")
    assert packed().device.type == "cpu"
    assert packed.is_packed


def test_different_experts_are_left_to_the_original(block):
    packed, _ = both(block)
    block.experts[1].w1.weight.data = torch.zeros(WIDTH, D, dtype=torch.float64)
    with pytest.raises(GuardMiss, match="differ in shape, dtype or device"):
        packed()


def test_buffers_are_copied():
    block = nn.Module()
    for number in range(3):
        block.register_buffer(f"w{number}", torch.randn(2, 2))
    packed = PackedExperts(block, PackedWeight("w", (("w0", "w1", "w2"),)))
    assert torch.equal(packed()[1], block.w1)
    assert not packed.is_packed


def test_a_parameter_that_became_a_parametrization_is_left_to_the_original(block):
    packed, _ = both(block)
    nn.utils.parametrizations.weight_norm(block.experts[0].w1)
    with pytest.raises(GuardMiss):
        packed.refresh()
    with pytest.raises(GuardMiss, match=r"no longer a parameter 'experts.0.w1.weight'"):
        packed()


def test_dispatch_modes_and_fake_tensors_do_not_move_anything(block):
    from torch._subclasses import FakeTensorMode

    packed, _ = both(block)
    pointer = block.experts[0].w1.weight.data_ptr()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert packed().shape == (E, 2 * WIDTH, D)
    assert type(block.experts[0].w1.weight.data) is torch.Tensor
    assert block.experts[0].w1.weight.data_ptr() == pointer


def test_a_tug_of_war_ends_in_copies(block, caplog):
    packed, _ = both(block)
    packed()
    with caplog.at_level(logging.INFO, logger="hexa_fx"):
        for _ in range(packing.REPACK_LIMIT + 1):
            for expert in block.experts:
                expert.w1.weight.data = expert.w1.weight.data.clone()
            assert torch.equal(packed(), gate_up(block))
    assert not packed.is_packed
    assert "something else moves the experts' storage" in caplog.text


def test_two_blocks_that_share_experts_share_the_storage(block):
    other = ListMoE()
    other.experts = block.experts
    first, second = both(block)[0], both(other)[0]
    assert first().data_ptr() == second().data_ptr()
    assert first.is_packed
    assert second.is_packed


def test_in_a_distributed_job_exchanged_parameters_are_not_moved(block, process_group):
    packed, _ = both(block)
    packed()
    assert packed.is_packed
    block.double()
    assert torch.equal(packed(), gate_up(block))
    assert packed.is_packed
    for expert in block.experts:
        expert.w1.weight = nn.Parameter(expert.w1.weight.detach().clone())
    pointer = block.experts[0].w1.weight.data_ptr()
    assert torch.equal(packed(), gate_up(block))
    assert not packed.is_packed
    assert block.experts[0].w1.weight.data_ptr() == pointer


def test_in_a_distributed_job_flat_parameters_are_not_moved(block, process_group):
    packed, _ = both(block)
    packed()
    for expert in block.experts:
        flat = torch.cat([expert.w1.weight.data.flatten(), expert.w3.weight.data.flatten()])
        expert.w1.weight.data = flat[: WIDTH * D].view(WIDTH, D)
        expert.w3.weight.data = flat[WIDTH * D :].view(WIDTH, D)
    assert torch.equal(packed(), gate_up(block))
    assert not packed.is_packed


# -- processes ---------------------------------------------------------------------------------------------------------


def test_shared_memory_stays_shared_and_packed(block):
    packed, _ = both(block)
    packed()
    block.share_memory()
    assert torch.equal(packed(), gate_up(block))
    assert packed.is_packed
    assert all(parameter.is_shared() for parameter in block.parameters())


def _add_one(block: ListMoE, results) -> None:
    torch.set_num_threads(1)
    before = block(torch.ones(1, 3, D)).sum().item()
    with torch.no_grad():
        block.experts[2].w1.weight.add_(1)
    results.put((before, block._hexa_w1.is_packed, block.experts[2].w1.weight.is_shared()))


def test_another_process_works_on_the_same_weights(block):
    install(block, list_rewritten(), list_rewritten(False))
    block.eval().share_memory()
    expected = block(torch.ones(1, 3, D)).sum().item()
    was = block.experts[2].w1.weight.detach().clone()
    context = torch.multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else None)
    results = context.SimpleQueue()
    process = context.Process(target=_add_one, args=(block, results))
    process.start()
    process.join(60)
    value, is_packed, is_shared = results.get()
    assert value == pytest.approx(expected)
    assert is_packed
    assert is_shared
    torch.testing.assert_close(block.experts[2].w1.weight.detach(), was + 1)


def test_a_pickle_is_adopted_without_a_copy(block):
    install(block, list_rewritten(), list_rewritten(False))
    file = io.BytesIO()
    torch.save(block, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    pointer = loaded.experts[0].w1.weight.data_ptr()
    assert loaded._hexa_w1().data_ptr() == pointer


# -- cost --------------------------------------------------------------------------------------------------------------


def test_reading_128_experts_costs_little():
    block = ListMoE(128)
    first, second = (PackedExperts(block, weight) for weight in list_packed(128))
    first(), second()

    def once() -> float:
        started = time.perf_counter()
        with torch.no_grad():
            first.refresh(), second.refresh(), first(), second()
        return time.perf_counter() - started

    assert min(once() for _ in range(50)) < 2e-3


class HostMemory:
    """Memory that grows as mapped memory does: what lies behind ``mapped`` bytes may not be touched."""

    def __init__(self, nbytes: int, limit: int = 1 << 62) -> None:
        self.bytes, self.mapped, self.limit = torch.full((nbytes,), 0xFF, dtype=torch.uint8), 0, limit

    def extend(self, nbytes: int) -> None:
        if nbytes > self.limit:
            raise DriverError("out of memory", call="cuMemCreate")
        self.mapped = nbytes

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        assert nbytes <= self.mapped
        return self.bytes[:nbytes].view(dtype).view(shape)


@pytest.mark.parametrize("limit", [1 << 62, 3 * 4 * 2 * D * WIDTH])
def test_a_few_experts_at_a_time(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    block = ListMoE(5)
    gate, up = ([getattr(e, name).weight for e in block.experts] for name in ("w1", "w3"))
    before = [p.detach().clone() for p in (*gate, *up)]
    monkeypatch.setattr(shared_storage, "PIECE_BYTES", 2 * 4 * 2 * D * WIDTH + 8)
    memory: Any = HostMemory(shared_storage.nbytes([gate, up]), limit)
    if limit < memory.bytes.numel():
        with pytest.raises(shared_storage.NoRoom):
            shared_storage._moved_in_pieces([gate, up], memory)
    else:
        stacked = shared_storage._moved_in_pieces([gate, up], memory)
        torch.testing.assert_close(stacked, torch.stack([torch.cat(pair) for pair in zip(before[:5], before[5:])]))
        assert shared_storage.adopt([gate, up]) is not None
    for parameter, value in zip((*gate, *up), before):
        torch.testing.assert_close(parameter.detach(), value, rtol=0, atol=0)


def test_no_room_to_lay_side_by_side(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    block, x = ListMoE().eval(), torch.randn(1, 9, D, generator=torch.Generator().manual_seed(4))
    flat = torch.cat([p.detach().flatten() for p in block.parameters()])  # memory that does not come free
    for parameter, view in zip(block.parameters(), flat.split([p.numel() for p in block.parameters()])):
        parameter.data = view.view_as(parameter)
    expected, before = block(x), block.experts[1].w1.weight.data_ptr()
    monkeypatch.setattr(shared_storage, "free_bytes", lambda device: 1)
    install(block, None, list_rewritten(False))
    torch.testing.assert_close(block(x), expected)
    assert block.experts[1].w1.weight.data_ptr() == before
    assert "cannot be laid side by side on cpu" in caplog.text
    assert "runs its original forward" in caplog.text
    monkeypatch.undo()
    assert "were views of a larger tensor" not in caplog.text
    torch.testing.assert_close(block(x), expected)
    assert block.experts[1].w1.weight.data_ptr() != before
    assert "(experts.0.w1.weight, ...) were views of a larger tensor" in caplog.text


def test_what_memory_of_the_host_stays_taken(tmp_path: Path) -> None:
    own = torch.zeros(5000)
    mapped = torch.from_file(str(tmp_path / "weights"), shared=True, size=5000)
    assert bytes_that_stay([own]) == 0
    assert bytes_that_stay([own[:100], own[:200]]) == 4 * 300
    assert bytes_that_stay([mapped, own]) == 4 * 5000


# -- one block that reads its weights in two ways ----------------------------------------------------------------------


def apart(block: ListMoE) -> tuple[PackedExperts, PackedExperts]:
    """gate, up."""
    paths = [tuple(f"experts.{number}.{name}.weight" for number in range(E)) for name in ("w1", "w3")]
    first, second = (PackedExperts(block, PackedWeight(name, (own,))) for name, own in zip(("gate", "up"), paths))
    return first, second


@pytest.mark.parametrize("together_first", [True, False])
def test_gate_and_up_are_read_as_one_and_as_two_from_one_place(block, together_first, caplog):
    expected = gate_up(block)
    (packed, _), (gate, up) = both(block), apart(block)
    if not together_first:
        assert torch.cat([gate(), up()], 1).equal(expected)
    assert packed().equal(expected)
    place = block.experts[1].w1.weight.data_ptr()
    for _ in range(2):
        assert torch.cat([gate(), up()], 1).equal(expected)
        assert packed().equal(expected)
    assert block.experts[1].w1.weight.data_ptr() == place
    assert not caplog.text
    assert gate().untyped_storage().data_ptr() == packed().untyped_storage().data_ptr()
    weights = torch.randn(E, WIDTH, D)
    (up() * weights).sum().backward()
    for number, expert in enumerate(block.experts):
        assert expert.w3.weight.grad.equal(weights[number])
        assert expert.w1.weight.grad is None
    with torch.no_grad():
        block.experts[2].w3.weight.fill_(3.0)
    assert bool((up()[2] == 3).all())
    assert bool((packed()[2, WIDTH:] == 3).all())


def test_rows_of_a_tensor_of_someone_else_are_laid_side_by_side(block, caplog):
    """They may be a flat buffer, which kernels could not read as fast."""
    theirs = torch.randn(E, 2 * WIDTH, D)
    for number, expert in enumerate(block.experts):
        expert.w1.weight.data = theirs[number, :WIDTH]
    gate, _ = apart(block)
    assert gate().is_contiguous()
    assert gate().equal(theirs[:, :WIDTH])
    assert "were views of a larger tensor" in caplog.text


def test_an_optimizer_with_a_flat_buffer_reaches_experts(caplog):
    """Made after the block was first read, as optimizers and averages make it."""
    block, x = ListMoE().double().eval(), torch.randn(1, 9, D, dtype=torch.float64)
    other = copy.deepcopy(block)
    install(block, None, list_rewritten(False))
    block(x)
    for each in (block, other):
        parameters = list(each.parameters())
        flat = torch.cat([p.detach().flatten() for p in parameters])
        for parameter, view in zip(parameters, flat.split([p.numel() for p in parameters])):
            parameter.data = view.view_as(parameter)
        for _ in range(2):
            each.zero_grad()
            each(x).square().sum().backward()
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            flat -= 0.1 * torch.cat([gradient.flatten() for gradient in gradients])
    torch.testing.assert_close(block(x), other(x))
    assert "were views" not in caplog.text
    assert "original forward" not in caplog.text


def test_copies_read_in_two_ways_too(block):
    (packed, _), (gate, _) = both(block), apart(block)
    expected = packed().detach().clone()
    assert gate().equal(expected[:, :WIDTH])
    copied = copy.deepcopy(block)
    (packed, _), (gate, _) = both(copied), apart(copied)
    assert packed().equal(expected)
    place = copied.experts[0].w1.weight.data_ptr()
    assert gate().equal(expected[:, :WIDTH])
    assert copied.experts[0].w1.weight.data_ptr() == place


def test_experts_that_are_tied_by_their_memory_stay_tied(block, caplog):
    """After the block was first read; what is written to one is then the other's too."""
    gate, _ = apart(block)
    gate()
    first, second = block.experts[1].w1.weight, block.experts[2].w1.weight
    first.data = second.data
    with caplog.at_level("INFO"):
        assert gate()[1].equal(second)
    assert "lie in the same memory" in caplog.text
    with torch.no_grad():
        second.fill_(3.0)
    for value in (first, gate()[1], gate()[2]):
        assert bool((value == 3).all())
