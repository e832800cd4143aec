"""scaled_transpose's own text, run on the host: the reference's bits for every pair of dtypes, at ragged ends of tiles."""

import shutil

import pytest
import torch

from hexa_fx.cuda import rows as cuda_rows
from hexa_fx.errors import InputError
from hexa_fx.ops import scaled_transpose
from hexa_fx.ops.products import scaled_transpose_any
from hexa_fx.ops.table_variants import ScaledTranspose
from tests.codegen.emulated import emulated  # noqa: F401

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@needs_compiler
@pytest.mark.parametrize(("dtype", "out"), [(F32, BF16), (BF16, F32), (F16, F16), (F64, F32), (F32, F64)], ids=str)
def test_bits_are_those_of_the_reference(emulated, dtype, out):  # noqa: F811
    for shape in ((1, 1), (130, 5), (64, 128), (3, 193), (0, 7), (7, 0)):
        x = torch.randn(shape).to(dtype)
        x.view(-1)[:1] = torch.nan
        for scale in (1.0, 0.3):
            found, expected = (
                cuda_rows.scaled_transpose(x, out, scale),
                scaled_transpose_any(ScaledTranspose(x, out, scale)),
            )
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_it_is_rounded_once():
    x = torch.tensor([[1 + 2**-9, 3.0]])
    expected = (x.double() * 1.3).to(BF16).t()
    assert torch.equal(scaled_transpose(x, BF16, 1.3), expected)
    assert not torch.equal((x.to(BF16) * 1.3).t(), expected)


def test_other_arguments_are_refused():
    for x, dtype in ((torch.randn(4, 3).t(), BF16), (torch.randn(4), BF16), (torch.randn(4, 3), torch.int32)):
        with pytest.raises(InputError, match="scaled_transpose"):
            scaled_transpose(x, dtype)
