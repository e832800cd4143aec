"""Slices, packed rows and their way back, for every layout."""

import itertools

import pytest
import torch

from hexa_fx.distributed.geometry import ROLES, Geometry, taken
from hexa_fx.plan import ExpertShape

E, D, I = 3, 5, 8  # noqa: E741


def weights(glu, layout1, layout2, bias):
    wide = 2 * I if glu in ("concat", "interleaved") else I
    first = (E, wide, D) if layout1 == "nk" else (E, D, wide)
    third = (E, I, D) if layout1 == "nk" else (E, D, I)
    shapes = {"w1": first, "w2": (E, D, I) if layout2 == "nk" else (E, I, D)}
    if glu == "split":
        shapes["w3"] = third
    if bias:
        shapes["b1"] = (E, wide)
        shapes |= {"b3": (E, I)} if glu == "split" else {}
    return {role: torch.randn(shape) for role, shape in shapes.items()}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("glu", "layout1", "layout2"),
    list(itertools.product(["none", "concat", "interleaved", "split"], ["nk", "kn"], ["nk", "kn"])),
)
def test_rows_hold_the_channels_of_all_ranks(glu, layout1, layout2, bias):
    geometry = Geometry(ExpertShape(E, D, I, 2 if glu == "none" else 3), glu, layout1, layout2, bias)
    whole = weights(glu, layout1, layout2, bias)
    rows, at = [], 0
    for size in (3, 0, 5):
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
