"""Parts of a workspace share memory if no launch uses both, and never otherwise."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
import torch

from hexa_fx.cuda import layer as cuda_layer
from hexa_fx.cuda.workspace import Workspace
from tests.runtime.cards import Cards

MIB = 1 << 20


def laid_out(parts: list[tuple[int, int, int]]) -> tuple[list[range], int]:
    """Where parts of (size, first launch, last launch) lie, and the size of all."""
    tensors = [torch.empty(size, dtype=torch.uint8) for size, *_ in parts]
    workspace = Workspace(tensors)
    for launch in range(max(last for *_, last in parts) + 1):
        for t, (_, first, last) in zip(tensors, parts, strict=True):
            if launch in (first, last):
                assert workspace.use(t.data_ptr(), launch) is not None
    whole = workspace.lay_out()
    found = [workspace.use(t.data_ptr(), parts[i][2]) for i, t in enumerate(tensors)]
    return [
        range(one[0].offset, one[0].offset + t.numel()) for one, t in zip(found, tensors, strict=True) if one
    ], whole


def test_parts_in_use_at_the_same_time_have_places_of_their_own() -> None:
    numbers = random.Random(3)
    for _ in range(60):
        times = [sorted((numbers.randrange(6), numbers.randrange(6))) for _ in range(numbers.randrange(1, 9))]
        parts = [(numbers.choice([1, 200, 256, 900, 5000]), first, last) for first, last in times]
        places, whole = laid_out(parts)
        for i, j in combinations(range(len(parts)), 2):
            if parts[i][1] <= parts[j][2] and parts[j][1] <= parts[i][2]:
                assert not range(max(places[i].start, places[j].start), min(places[i].stop, places[j].stop))
        assert all(place.start % 256 == 0 and place.stop <= whole for place in places)


@pytest.mark.parametrize(
    ("parts", "kib"),
    [
        ([(1024, 0, 1), (1024, 1, 2), (1024, 2, 3), (1024, 3, 4)], 2),
        ([(1024, 0, 0), (1024, 1, 1), (1024, 2, 2)], 1),
        ([(1024, 0, 2), (1024, 0, 2), (1024, 1, 2)], 3),
        ([(2048, 0, 1), (1024, 2, 3), (1024, 2, 3)], 2),
    ],
    ids=["a chain", "none with another", "all at once", "two where one was"],
)
def test_memory_is_shared(parts: list[tuple[int, int, int]], kib: int) -> None:
    assert laid_out(parts)[1] == kib << 10


def test_an_address_within_a_part_belongs_to_it() -> None:
    tensors = [torch.empty(1000), torch.empty(10)]
    workspace = Workspace(tensors)
    found = workspace.use(tensors[0].data_ptr() + 40, 0)
    assert found is not None
    assert found[1] == 40
    assert workspace.use(tensors[0].data_ptr() + 4000, 0) is None
    assert workspace.lay_out() == 4096  # of the other part nothing is used


SWIN = {"data-centric": (16384, 2048), "model-centric": (32768, 1024), "not partitioned": (16384, 2048)}


@pytest.mark.parametrize("case", SWIN)
def test_a_step_of_swins_layers_on_two_devices_is_played_again(hopper: Cards, case: str) -> None:
    """32768 tokens on two devices, whose host is slower than they are. Nothing is written, so the memory is only reserved."""
    tokens, inner = SWIN[case]
    experts, width, top_k = 8, 512, 2
    matrices = torch.empty(inner, 2 * experts * width, dtype=torch.bfloat16)
    w1, w2 = (matrices.as_strided((experts, inner, width), (width, 2 * experts * width, 1), at) for at in (0, 4096))
    layout2 = "kn"
    if case != "data-centric":
        layout2, w1, w2 = "nk", w1.contiguous(), w2.transpose(1, 2).contiguous()
    x = torch.empty(tokens, width, dtype=torch.bfloat16)
    ids, gates = torch.zeros(tokens, top_k, dtype=torch.int64), torch.empty(tokens, top_k, dtype=torch.bfloat16)
    weights, static = (gates, w1, None, None, None, w2, None), ("gelu", "none", (), "nk", layout2, False)
    needs = [True, True, True, False, False, False, True, False]
    for _ in range(3):
        hopper.general = 0
        y, *saved = cuda_layer.moe_ffn_forward(hopper.run_general_forward, x, ids, *weights, *static)
        every = (torch.empty_like(y), x, [saved[0]], *saved[1:], *weights, top_k, *static, needs)
        cuda_layer.moe_ffn_backward(hopper.run_general_backward, *every)
    assert hopper.general == 0
    assert all(replay._size <= 257 * MIB for replay in cuda_layer._known.values() if replay is not None)
