"""Parts of a workspace share memory if no launch uses both, and never otherwise."""

import random
from itertools import combinations

import pytest
import torch

from hexa_fx.cuda import layer as cuda_layer
from hexa_fx.cuda.plan import Part, lay_out
from tests.cuda.cards import Cards

MIB = 1 << 20


def laid_out(parts: list[tuple[int, int, int]]) -> tuple[list[range], int]:
    """Where parts of (size, first launch, last launch) lie, and the size of all."""
    found = [Part(size) for size, *_ in parts]
    for part, (_, first, last) in zip(found, parts, strict=True):
        part.use(first)
        part.use(last)
    whole = lay_out(found)
    return [range(one.offset, one.offset + size) for one, (size, *_) in zip(found, parts, strict=True)], whole


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


def test_a_part_that_no_launch_uses_takes_no_memory() -> None:
    used, unused = Part(4000), Part(10)
    used.use(0)
    assert lay_out([used, unused]) == 4096


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
        y, *saved = cuda_layer.LAYERS["moe_ffn_forward"](hopper.run_general_forward, x, ids, *weights, *static)
        every = (torch.empty_like(y), x, [saved[0]], *saved[1:], *weights, top_k, *static, needs)
        cuda_layer.LAYERS["moe_ffn_backward"](hopper.run_general_backward, *every)
    assert hopper.general == 0
    assert all(plan.workspace <= 257 * MIB for plan in cuda_layer._known.values() if plan)
