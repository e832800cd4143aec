"""The memory table of docs/fine_tuning.md is what the function computes, and the function counts what is there."""

from pathlib import Path

import pytest
import torch

from benchmarks.fine_tuning_memory import MODELS, memory, packed_bytes, table
from hexa_fx.formats.quantized_weight import QuantizedWeight

PAGE = Path(__file__).parents[2] / "docs" / "fine_tuning.md"


def test_the_page_has_the_table():
    assert table() in PAGE.read_text(encoding="utf-8"), "run python -m benchmarks.fine_tuning_memory"


@pytest.mark.parametrize("format", ["nf4", "nf4_double", "mxfp4", "fp8_block", "int8_rows"])
def test_packed_bytes_are_those_of_packed_weights(format):
    shape = (3, 256, 320)
    assert packed_bytes(shape, format) == QuantizedWeight.of(torch.zeros(shape), format).stored_bytes


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Qwen3-30B-A3B", 30.5), ("gpt-oss-20b", 20.9), ("gpt-oss-120b", 116.8), ("Mixtral 8x7B", 46.7)],
)
def test_parameters_of_the_models(name, billions):
    (shape,) = [m for m in MODELS if m.name == name]
    dense = memory(shape, "bf16")
    assert (dense.experts + dense.rest) / 2e9 == pytest.approx(billions, rel=5e-3)
