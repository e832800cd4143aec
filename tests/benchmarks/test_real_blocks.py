"""The models of real widths that are measured: each has a small form, with which scripts are tried without a GPU."""

import pytest
import torch

from benchmarks.real_blocks import REAL_BLOCKS, make, tokens_of


@pytest.mark.parametrize("name", REAL_BLOCKS)
def test_the_small_form_runs(name: str) -> None:
    with torch.no_grad():
        result = make(name, "cpu", 64)(input_ids=tokens_of("cpu", 4))
    assert getattr(result, "logits", result).isfinite().all()
