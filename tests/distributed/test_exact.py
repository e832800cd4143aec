"""Outputs and all gradients of a partitioned model equal those of one process; slices, packed rows and their way back."""

import itertools

import pytest
import torch
from harness import run
from models import KINDS, MODES, SPLITS, Net, batch, gradient_pairs, install, loss_sum, make_plan, own

from hexa_fx.distributed.copies import copies_between
from hexa_fx.distributed.geometry import ROLES, Geometry, taken
from hexa_fx.plan import ExpertShape


def errors(rank, plan, kinds, steps=1):
    """Largest difference of outputs and gradients to one process."""
    model = Net(kinds)
    whole = Net(kinds)
    installed = install(model, plan)
    total = sum(plan.batch)
    worst = 0.0
    for step in range(steps):
        x, target = batch(total, seed=step)
        mine = own(plan.batch, rank)
        x0, xr = x[mine].clone().requires_grad_(), x.clone().requires_grad_()
        y, yr = model(x0), whole(xr)
        (loss_sum(y, target[mine]) / total).backward()
        (loss_sum(yr, target) / total).backward()
        pairs = [(y, yr[mine]), (x0.grad, xr.grad[mine]), *gradient_pairs(model, whole, installed.session)]
        worst = max([worst, *(float((a - b).detach().abs().max()) for a, b in pairs if a.numel())])
        assert all(a.shape == b.shape for a, b in pairs)
        model.zero_grad(), whole.zero_grad()
    cache = installed.session.cache
    installed.session.close()
    return worst, cache.gathers, cache.nbytes


def many(rank, world, cases):
    """Several cases in one launch. Each is (name, plan arguments, kinds)."""
    out = {}
    for name, arguments, kinds in cases:
        out[name] = errors(rank, make_plan(world, kinds=kinds, **arguments), kinds, steps=2)
    return out


def cases(world, full):
    splits, modes, kinds = list(SPLITS[world]), list(MODES), list(KINDS)
    grid = itertools.product(splits, modes, kinds, (1, 2), (False, True), ("reduce_scatter", "all_reduce"))
    if not full:  # every value of every dimension, and every split with every mode
        grid = [
            (
                split,
                mode,
                kinds[(i * 3 + j) % len(kinds)],
                1 + (i + j) % 2,
                (i + j) % 2 == 0,
                ("reduce_scatter", "all_reduce")[i % 2],
            )
            for i, split in enumerate(splits)
            for j, mode in enumerate(modes)
        ]
    for split, mode, kind, slots, static, reduce in grid:
        arguments = {"split": split, "modes": MODES[mode], "slots": slots, "static": static, "reduce": reduce}
        yield f"{split}-{mode}-{kind}-{slots}-{static}-{reduce}", arguments, [KINDS[kind]] * 3


@pytest.mark.parametrize("world", [1, 2, 4])
def test_equals_one_process(world):
    for result in run(world, many, list(cases(world, full=False)), timeout=60):
        bad = {name: worst for name, (worst, _, _) in result.items() if not worst < 1e-10}
        assert not bad


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("world", [2, 4])
def test_equals_one_process_full_matrix(world):
    for result in run(world, many, list(cases(world, full=True)), timeout=1400):
        bad = {name: worst for name, (worst, _, _) in result.items() if not worst < 1e-10}
        assert not bad


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
