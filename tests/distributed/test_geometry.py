"""Slices, packed rows and their way back, for every layout."""

import itertools

import pytest
import torch

from hexa_fx.distributed.copies import copies_between
from hexa_fx.distributed.geometry import ROLES, Geometry, taken
from hexa_fx.plan import ExpertShape

E = 3


def weights(glu, layout1, layout2, bias, hidden, channels):
    wide = 2 * channels if glu in ("concat", "interleaved") else channels
    first = (E, wide, hidden) if layout1 == "nk" else (E, hidden, wide)
    third = (E, channels, hidden) if layout1 == "nk" else (E, hidden, channels)
    shapes = {"w1": first, "w2": (E, hidden, channels) if layout2 == "nk" else (E, channels, hidden)}
    if glu == "split":
        shapes["w3"] = third
    if bias:
        shapes["b1"] = (E, wide)
        shapes |= {"b3": (E, channels)} if glu == "split" else {}
    return {role: torch.randn(shape) for role, shape in shapes.items()}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("glu", "layout1", "layout2"),
    list(itertools.product(["none", "concat", "interleaved", "split"], ["nk", "kn"], ["nk", "kn"])),
)
@pytest.mark.parametrize(("hidden", "sizes"), [(5, (3, 0, 5)), (16, (16, 0, 8))], ids=["by element", "in chunks"])
def test_rows_hold_the_channels_of_all_ranks(glu, layout1, layout2, bias, hidden, sizes):
    geometry = Geometry(ExpertShape(E, hidden, sum(sizes), 2 if glu == "none" else 3), glu, layout1, layout2, bias)
    whole = weights(glu, layout1, layout2, bias, hidden, sum(sizes))
    rows, at = [], 0
    for size in sizes:
        local = tuple(taken(whole[r], geometry.chunks(r, at, at + size)) if r in whole else None for r in ROLES)
        packed = geometry.pack(local, size, torch.float32)
        for back, sent in zip(geometry.unpack(packed, torch.float32), local):
            assert (back is None) == (sent is None)
            assert back is None or (torch.equal(back, sent) and back.is_contiguous())
        rows.append(packed)
        at += size
    gathered = torch.cat(rows)
    for role, back in zip(ROLES, geometry.unpack(gathered, torch.float32)):
        assert (back is None) == (role not in whole)
        assert back is None or torch.equal(back, whole[role])
    views = geometry.views(gathered)
    assert torch.equal(geometry.view_grads(views, torch.float32), gathered)
    assert all(v is None or v.untyped_storage().data_ptr() == gathered.untyped_storage().data_ptr() for v in views)
    assert geometry.row % 8 == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("across", ["neither", "target", "source"])
def test_copies_in_chunks_keep_every_bit(dtype, across):
    """Of NaNs too. Rows have gaps, as packed ones do."""
    bits = torch.randint(-(2**15), 2**15, (2, 16, 64), dtype=torch.int16)
    given = bits.view(dtype)
    rows, columns = given.shape[1:]
    target = torch.zeros(2, rows, columns + 8, dtype=dtype)[..., :columns]
    if across == "target":
        target = torch.zeros(2, columns, rows + 8, dtype=dtype)[..., :rows].transpose(1, 2)
    source = given.transpose(1, 2).contiguous().transpose(1, 2) if across == "source" else given
    copies = copies_between([target], [source])
    assert [len(copies.turned), [t.dtype for t in copies.targets]] == [[1, []], [0, [torch.complex128]]][
        across == "neither"
    ]
    copies.run()
    assert torch.equal(target.contiguous().view(torch.int16), bits)
