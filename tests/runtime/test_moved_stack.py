"""Parameters that lie in one stacked tensor, as CUDA's kernels read them: here on a CPU, whose own kernels need no stack."""

import copy
import io
import logging
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hexa_fx.jit import DriverError
from hexa_fx.runtime import moved_stack
from hexa_fx.runtime.moved_stack import MovedStack, NoRoom, found
from tests.runtime.handmade import WIDTH, D, E, ListMoE


class Reader:
    """Gate and up of a block, or gate alone."""

    def __init__(self, block: Any, names: tuple[str, ...] = ("w1", "w3")) -> None:
        self.block, self.names, self.moved = block, names, MovedStack("w1")

    @property
    def parts(self) -> list[list[torch.Tensor]]:
        return [[getattr(expert, name).weight for expert in self.block.experts] for name in self.names]

    def __call__(self) -> torch.Tensor | None:
        parts = self.parts
        return self.moved.read(parts, [tensor for part in parts for tensor in part])

    def expected(self) -> torch.Tensor:
        return torch.stack([torch.cat(list(rows)) for rows in zip(*self.parts)]).detach()


@pytest.fixture
def block() -> ListMoE:
    torch.manual_seed(0)
    return ListMoE()


def test_it_is_read_bit_for_bit_and_every_parameter_has_a_storage_of_its_own(block):
    with torch.no_grad():
        block.experts[1].w1.weight[0, :3] = torch.tensor([float("nan"), float("-inf"), -0.0])
    read = Reader(block)
    expected = read.expected()
    stack = read()
    assert stack is not None
    assert stack.view(torch.int32).equal(expected.view(torch.int32))
    for number, expert in enumerate(block.experts):
        assert expert.w1.weight.data_ptr() == stack[number].data_ptr()
        assert expert.w3.weight.data_ptr() == stack[number, WIDTH:].data_ptr()
        assert expert.w1.weight.untyped_storage().nbytes() == expert.w1.weight.numel() * 4
    assert read().data_ptr() == stack.data_ptr()
    with torch.no_grad():
        block.experts[2].w3.weight.fill_(3)
    assert bool(read()[2, WIDTH:].eq(3).all())


def test_files_copies_and_freed_memory_are_those_of_one(block):
    plain = copy.deepcopy(block)
    Reader(block)()
    for value in (lambda m: m.experts[1].state_dict(), lambda m: m.experts[1].w1.weight, lambda m: m.state_dict()):
        sizes = []
        for model in (plain, block):
            torch.save(value(model), file := io.BytesIO())
            sizes.append(len(file.getvalue()))
        assert sizes[0] == sizes[1]
    assert len(pickle.dumps(block.experts[1].w1.weight)) == len(pickle.dumps(plain.experts[1].w1.weight))
    with pytest.raises(RuntimeError, match="not resizable"):
        block.experts[1].w1.weight.untyped_storage().resize_(0)


@pytest.mark.parametrize("frozen", ["", "experts.1", "w1", "experts"])
def test_gradients(block, frozen):
    """Slices of one if all want one, else tensors of their own."""
    read = Reader(block)
    for name, parameter in block.named_parameters():
        parameter.requires_grad_(not frozen or frozen not in name)
    factor, stack = torch.randn(E, 2 * WIDTH, D), read()
    assert stack.requires_grad is (frozen != "experts")
    if stack.requires_grad:
        (stack * factor).sum().backward()
    for number, expert in enumerate(block.experts):
        for weight, rows in ((expert.w1.weight, slice(0, WIDTH)), (expert.w3.weight, slice(WIDTH, None))):
            assert (weight.grad is not None) is weight.requires_grad
            if weight.grad is None:
                continue
            assert torch.equal(weight.grad, factor[number, rows])
            assert (weight.grad.untyped_storage().nbytes() == weight.numel() * 4) is bool(frozen)


def test_a_write_is_one_to_the_stack(block):
    read = Reader(block)
    stack = read()
    loss = stack.square().sum()
    with torch.no_grad():
        block.experts[2].w3.weight.fill_(3)
    read.moved.note_writes()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


MOVES: dict[str, Callable[[Any], Any]] = {
    "half": lambda m: m.half(),
    "to and back": lambda m: m.double().float(),
    "one .data": lambda m: setattr(m.experts[1].w3.weight, "data", m.experts[1].w3.weight.data.clone() * 2),
    "the middle one": lambda m: setattr(m.experts[2].w1, "weight", nn.Parameter(torch.randn(WIDTH, D))),
    "assign": lambda m: m.load_state_dict({k: v.clone() * 3 for k, v in m.state_dict().items()}, assign=True),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=list(MOVES))
def test_moved_parameters_are_noticed(block, move):
    read = Reader(block)
    read()
    move(block)
    assert torch.equal(read(), read.expected())
    assert not read.moved.why_copied


def test_several_readers_share_a_stack_which_outlives_them(block):
    """A block may read gate and up as one in one mode and as two in another."""
    place = Reader(block)().data_ptr()
    both, gate = Reader(block), Reader(block, ("w1",))
    assert both().data_ptr() == place
    assert gate().data_ptr() == place
    assert torch.equal(gate(), gate.expected())
    copied = Reader(copy.deepcopy(block))
    assert torch.equal(copied(), both())
    assert copied().data_ptr() != place


def test_views_that_lie_as_a_stack_are_read_where_they_are(block):
    whole = torch.randn(E, WIDTH, D)
    for number, expert in enumerate(block.experts):
        expert.w1.weight.data = whole[number]
    read = Reader(block, ("w1",))
    assert read().data_ptr() == whole.data_ptr()
    whole.zero_()
    assert not read().any()


def share(block: Any) -> None:
    block.experts[1].w1.weight = block.experts[0].w1.weight


def tie(block: Any) -> None:
    block.experts[1].w1.weight.data = block.experts[0].w1.weight.data


def flatten(block: Any) -> None:
    parameters = list(block.experts.parameters())
    flat = torch.cat([p.detach().flatten() for p in parameters])
    for parameter, view in zip(parameters, flat.split([p.numel() for p in parameters])):
        parameter.data = view.view_as(parameter)


@pytest.mark.parametrize(
    ("change", "reason"),
    [(share, "experts share a parameter"), (tie, "lie in the same memory"), (flatten, "parts of a larger tensor")],
)
def test_where_nothing_may_be_moved(block, change, reason, caplog):
    read = Reader(block)
    read()
    change(block)
    places = [p.data_ptr() for p in block.parameters()]
    with caplog.at_level(logging.INFO, logger="hexa_fx"):
        assert read() is None
        assert read() is None
    assert [record.message.partition(reason)[1] for record in caplog.records] == [reason]
    assert [p.data_ptr() for p in block.parameters()] == places


def test_a_tug_of_war_ends_in_copies(block):
    read = Reader(block)
    for _ in range(moved_stack.REPACK_LIMIT):
        assert read() is not None
        for expert in block.experts:
            expert.w1.weight.data = expert.w1.weight.data.clone()
    assert read() is None
    assert "something else moves" in read.moved.why_copied


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
    read = Reader(ListMoE(5))
    parts, expected = read.parts, read.expected()
    monkeypatch.setattr(moved_stack, "PIECE_BYTES", 2 * 4 * 2 * D * WIDTH + 8)
    memory: Any = HostMemory(5 * 4 * 2 * D * WIDTH, limit)
    shape = (5, 2 * WIDTH, D)
    if limit < memory.bytes.numel():
        with pytest.raises(NoRoom):
            moved_stack._moved_in_pieces(parts, memory, shape)
    else:
        assert torch.equal(moved_stack._moved_in_pieces(parts, memory, shape), expected)
        moved_stack._note(memory.tensor(shape, torch.float32))
        assert found(parts) is not None
    assert torch.equal(read.expected(), expected)
