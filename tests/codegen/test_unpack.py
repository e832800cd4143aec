"""unpack's own text, run on the host: the bits of the reference, in every format; and products group by group."""

import shutil
from itertools import pairwise

import pytest
import torch

from benchmarks.launching import run
from hexa_fx.cuda import choosing as cuda_choosing
from hexa_fx.cuda import packed as cuda_packed
from hexa_fx.cuda.planning import planning_of
from hexa_fx.formats import FORMATS, MXFP4
from hexa_fx.ops.table import Esmm, EsmmAct, EsmmActBackward
from tests.codegen.emulated import emulated  # noqa: F401
from tests.formats.test_formats import SHAPES, random_codes

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
EVEN = {"fp8_block": (2, 150, 264), "int8_rows": (3, 7, 16)}
"""Rows of whole chunks."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("f", FORMATS.values(), ids=lambda f: f.name)
def test_bits_are_those_of_the_reference(emulated, f, dtype, monkeypatch):  # noqa: F811
    monkeypatch.setitem(SHAPES, f.name, EVEN.get(f.name, SHAPES[f.name]))
    packed, scales = random_codes(f)
    if f is MXFP4:
        scales[0][0, 0, 0], scales[0][1, 1, 1] = 0, 255
    experts = SHAPES[f.name][0]
    for first, end in ((0, experts), (1, 2)):
        expected = f.dense(packed[first:end], [s[first:end] for s in scales], dtype)
        found = torch.full_like(expected, 7)
        run(cuda_packed.unpack, f, packed[first:end], [s[first:end] for s in scales], found)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("most", [1, 3 * 2 * 64 * 32, 1 << 20], ids=["one by one", "three at a time", "all"])
@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_products_group_by_group(emulated, monkeypatch, most, layout):  # noqa: F811
    """With torch in place of the grouped product: which experts a group has, which rows are its own, what is zeroed."""
    f, experts = FORMATS["nf4_double"], 7
    weight = torch.randn(experts, 64, 32)
    packed, *scales = f.pack_all(weight)
    index = torch.randint(0, experts + 1, (40, 2))
    index[index == 3] = 2
    v, _, offs = torch.ops.hexa.reindex(index, experts)
    x = torch.randn(40, 32 if layout == "nk" else 64, dtype=torch.bfloat16)
    bias = torch.randn(experts, 64 if layout == "nk" else 32, dtype=torch.bfloat16)
    seen = []

    def product(o: Esmm, into):
        seen.append(o.weight.shape[0])
        bounds = o.offs.tolist()
        for e, (start, end) in enumerate(pairwise(bounds)):
            rows = o.x[o.v[start:end].long() // o.top_k]
            matrix = o.weight[e].t() if o.layout == "nk" else o.weight[e]
            into.out[start:end] = torch.addmm(o.bias[e], rows, matrix)
        if into.last:
            into.out[bounds[-1] :] = 0

    monkeypatch.setattr(cuda_packed, "esmm_segment", a_step(product))
    monkeypatch.setattr(cuda_packed, "MOST_BYTES", most)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    cuda_choosing.forget_choices()
    arguments = (x, packed, scales, f.name, bias, v, offs, 2, layout)
    found = cuda_packed.esmm_packed(*arguments)
    torch.testing.assert_close(found, torch.ops.hexa.esmm_packed(*arguments), rtol=1e-2, atol=1e-2)
    assert sum(seen) == experts
    assert max(seen) * 2 * 64 * 32 <= max(most, 2 * 64 * 32)


def a_step(function):
    """What a plan does in place of a launch."""
    return lambda o, into: planning_of(o.offs).run(function, o, into)


def dense_segment(o, into):
    """`fused_segment` by the dense operators: only rows of its experts are written, and at the end those of none."""
    kinds = {Esmm: "esmm", EsmmAct: "esmm_act", EsmmActBackward: "esmm_act_backward"}
    name = next(name for kind, name in kinds.items() if isinstance(o, kind))
    start, end = int(o.offs[0]), int(o.offs[-1])
    weight = "w1" if name == "esmm_act" else "weight"

    def after_one(t):  # the rows before are another expert's
        return None if t is None else torch.cat((torch.zeros_like(t[:1]), t))

    changed = (weight, "offs", "bias", "b1", "c", "c3")
    o = o._replace(**{each: after_one(getattr(o, each)) for each in changed if each in o._fields})
    found = getattr(torch.ops.hexa, f"{name}_low_rank" if "u" in o._fields else name)(*o)
    results = (found,) if name == "esmm" else found
    for target, rows in zip((into.out, into.act), results):
        if target is not None and target.numel():
            target[start : len(rows) if into.last else end] = rows[start : len(rows) if into.last else end]
    if into.dots is not None:
        slots = o.v[start:end].long()
        into.dots[0, slots] = results[2].float().view(-1)[slots]


@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_what_is_fused_with_products_group_by_group(emulated, monkeypatch, layout, rank):  # noqa: F811
    """Against each as an operator of its own: which rows, factors, biases and gates a group is given."""
    monkeypatch.setattr(cuda_packed, "fused_segment", a_step(dense_segment))
    monkeypatch.setattr(cuda_packed, "_fuses", lambda *_: True)
    monkeypatch.setattr(cuda_packed, "MOST_BYTES", 2 * 2 * 64 * 64)
    f, experts, k, n, dtype = FORMATS["nf4_double"], 7, 64, 64, torch.float64
    shape = (experts, n, k) if layout == "nk" else (experts, k, n)
    packed, *scales = f.pack_all(torch.randn(shape, dtype=dtype) / 8)
    index = torch.randint(0, experts + 1, (40, 2))
    index[index == 3] = 2
    v, _, offs = torch.ops.hexa.reindex(index, experts)
    x, bias, gates = (torch.randn(size, dtype=dtype) for size in ((40, k), (experts, n), (40, 2)))
    u, c = torch.randn(80, rank, dtype=dtype), torch.randn(experts, n, rank, dtype=dtype)
    second = (u, c if layout == "nk" else c.transpose(1, 2)) if rank else (None, None)
    weight, rows = (packed, scales, f.name), (v, offs, 2, layout)
    act = (x, *weight, bias, *rows, "silu", "concat", [], True, *second)
    h = torch.randn(80, 2 * n, dtype=dtype)
    back = (x, *weight, h, gates, *rows, "silu", "concat", [], *second)
    checked = {"esmm_act_packed": act, "esmm_act_backward_packed": back}
    if rank:
        checked["esmm_packed_low_rank"] = (x, *weight, bias, *rows, *second)
    for name, arguments in checked.items():
        found, expected = getattr(cuda_packed, name)(*arguments), getattr(torch.ops.hexa, name)(*arguments)
        torch.testing.assert_close(found, expected)
        if layout == "nk":
            torch.library.opcheck(getattr(torch.ops.hexa, name).default, arguments, test_utils="test_faketensor")
    kept = cuda_packed.esmm_act_packed(*act[:12], False, *second)
    assert kept[0].shape == (0, n)
    torch.testing.assert_close(kept[1], torch.ops.hexa.esmm_act_packed(*act)[1])
