"""Experts of a list are laid side by side a few at a time, without a second copy of them."""

import gc
import weakref

import pytest
import torch
from torch import nn

from hexa_fx.ir import PackedWeight
from hexa_fx.runtime import moved_stack
from hexa_fx.runtime.listed_experts import ListedExperts

pytestmark = pytest.mark.gpu
EXPERTS, ROWS, COLUMNS = 12, 3000, 1000


def test_a_list_moves_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held is counted in this process: others share the device."""
    piece = 2 * 4 * ROWS * COLUMNS
    monkeypatch.setattr(moved_stack, "PIECE_BYTES", piece)
    block = nn.ModuleList(nn.Linear(COLUMNS, ROWS, bias=False, device="cuda") for _ in range(EXPERTS))
    expected = torch.stack([expert.weight.detach().cpu() for expert in block])
    held: list[int] = []
    memories: list[weakref.ref[moved_stack.MappedMemory]] = []
    extend = moved_stack.MappedMemory.extend

    def watched(self: moved_stack.MappedMemory, nbytes: int) -> None:
        extend(self, nbytes)
        held.append(torch.cuda.memory_allocated() + self.mapped)
        memories.append(weakref.ref(self))

    monkeypatch.setattr(moved_stack.MappedMemory, "extend", watched)
    before = torch.cuda.memory_allocated()
    read = ListedExperts(block, PackedWeight("w", (tuple(f"{e}.weight" for e in range(EXPERTS)),)))
    packed = read()
    assert len(held) == EXPERTS // 2
    torch.testing.assert_close(packed.detach().cpu(), expected, rtol=0, atol=0)
    assert max(held) <= before + piece + (4 << 20)
    (packed * 2).sum().backward()
    assert block[3].weight.grad is not None
    assert bool((block[3].weight.grad == 2).all())
    x = torch.randn(5, COLUMNS)
    torch.testing.assert_close(block[7](x.cuda()).cpu(), x @ expected[7].t(), rtol=1e-4, atol=1e-4)
    del packed, read, block, x
    gc.collect()
    assert memories[0]() is None, "the memory is not given back"
