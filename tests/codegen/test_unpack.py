"""unpack's own text, run on the host: the bits of the reference, in every format; and products group by group."""

from __future__ import annotations

import shutil
from itertools import pairwise

import pytest
import torch

from hexa_fx.cuda import choosing as cuda_choosing
from hexa_fx.cuda import unpack as cuda_unpack
from hexa_fx.formats import FORMATS, MXFP4
from hexa_fx.ops.operands import Esmm
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
        cuda_unpack.unpack(f, packed[first:end], [s[first:end] for s in scales], found)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("most", [1, 3 * 2 * 64 * 32, 1 << 20], ids=["one by one", "three at a time", "all"])
@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_products_group_by_group(emulated, monkeypatch, most, layout):  # noqa: F811
    """With torch in place of the grouped product: which experts a group has, which rows are its own, what is zeroed."""
    torch.manual_seed(0)
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

    monkeypatch.setattr(cuda_unpack, "esmm_segment", product)
    monkeypatch.setattr(cuda_unpack, "MOST_BYTES", most)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    cuda_choosing.forget_choices()
    arguments = (x, packed, scales, f.name, bias, v, offs, 2, layout)
    found = cuda_unpack.esmm_packed(*arguments)
    torch.testing.assert_close(found, torch.ops.hexa.esmm_packed(*arguments), rtol=1e-2, atol=1e-2)
    assert sum(seen) == experts
    assert max(seen) * 2 * 64 * 32 <= max(most, 2 * 64 * 32)
