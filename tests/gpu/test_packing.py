"""Experts of a list are laid side by side a few at a time, without a second copy of them."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from hexa_fx.ir import PackedWeight
from hexa_fx.runtime import packing, shared_storage
from hexa_fx.runtime.packing import PackedExperts

pytestmark = pytest.mark.gpu
EXPERTS, ROWS, COLUMNS = 12, 3000, 1000


def free() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def test_a_list_moves_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    piece = 2 * 4 * ROWS * COLUMNS
    monkeypatch.setattr(shared_storage, "PIECE_BYTES", piece)
    monkeypatch.setattr(packing, "COPY_ELEMENTS", 0)
    block = nn.ModuleList(nn.Linear(COLUMNS, ROWS, bias=False, device="cuda") for _ in range(EXPERTS))
    expected = torch.stack([expert.weight.detach() for expert in block])
    before, least = free(), []
    extend = shared_storage.MappedMemory.extend

    def watched(self: shared_storage.MappedMemory, nbytes: int) -> None:
        extend(self, nbytes)
        least.append(torch.cuda.mem_get_info()[0])

    monkeypatch.setattr(shared_storage.MappedMemory, "extend", watched)
    read = PackedExperts(block, PackedWeight("w", (tuple(f"{e}.weight" for e in range(EXPERTS)),)))
    packed = read()
    assert len(least) == EXPERTS // 2
    torch.testing.assert_close(packed.detach(), expected, rtol=0, atol=0)
    assert before - min(least) <= piece + (16 << 20)
    (packed * 2).sum().backward()
    assert block[3].weight.grad is not None
    assert bool((block[3].weight.grad == 2).all())
    x = torch.randn(5, COLUMNS, device="cuda")
    torch.testing.assert_close(block[7](x), x @ expected[7].t())
    with_block = free()
    del packed, read, block
    assert free() - with_block >= 4 * EXPERTS * ROWS * COLUMNS
