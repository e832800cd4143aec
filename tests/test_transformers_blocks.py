"""Blocks of the newer families of transformers, in float32 and in the bfloat16 that their checkpoints are in."""

import pytest
import torch

pytest.importorskip("transformers")

from tests.zoo import transformers_blocks as blocks

SOME = ("kimi_linear", "minimax_m2", "muse_spark")
"""Sigmoid and grouped routers; an expert that ends in float32 (muse_spark)."""

KNOWN = blocks.families()


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in SOME else pytest.mark.slow) for name in KNOWN]
)
def test_what_runs_is_rewritten(family: str) -> None:
    made = [found.block for found in blocks.blocks(family) if found.block is not None]
    if family in SOME and not made:
        pytest.fail(f"no block of {family} was made")
    for block in made:
        for dtype, most in ((torch.float32, 2e-5), (torch.bfloat16, 0.15)):
            outcome = blocks.judge(block, dtype)
            if outcome.status == "not run":
                continue
            assert outcome.status == "rewritten", outcome.reason
            assert max(outcome.forward, outcome.gradient) <= most
