"""Blocks of the zoo through the public API on a device: rewritten or refused as on a CPU, and equal to what they were."""

from typing import Any

import pytest
import torch

from tests.zoo import pattern_table
from tests.zoo.compare import compare, operators_run
from tests.zoo.registry import VARIANTS
from tests.zoo.variant import Variant

SIZES = ((2, 7), (3, 5), (1, 130))
TOLERANCE = 1e-3
"""float32, in which the order of sums differs from the original's, relative to the largest value; a wrong row is off by 1."""


@pytest.fixture(autouse=True)
def no_fallback() -> None:
    """Widths here are such that some kernels cannot load them; torch's operators do, and are as right."""
    return


def on_device(value: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda leaf: leaf.cuda() if isinstance(leaf, torch.Tensor) else leaf, value)


@pytest.mark.parametrize("v", [v for v in VARIANTS if v.dtypes[0] != torch.float64 and not v.gap], ids=lambda v: v.name)
def test_as_on_a_cpu(v: Variant) -> None:
    dtype = v.dtypes[0]
    model = v.make(0).to(dtype).eval().cuda()
    try:
        compare(model, model, *on_device(v.inputs(*SIZES[0], dtype, 0)))
    except (RuntimeError, TypeError) as error:
        pytest.skip(f"the block is for CPUs: {error}")
    opt = pattern_table.optimized(model, *on_device(v.inputs(*SIZES[0], dtype, 0)))
    blocks = opt.report.blocks
    if v.expect != "either":
        assert any(b.status == "rewritten" for b in blocks) == (v.expect == "rewritten"), str(opt.report)
    assert not any("itself failed" in b.reason for b in blocks), str(opt.report)
    if v.name == "refuse_call_parity":
        return  # its result depends on how often it was called
    for batch, seq in SIZES:
        for train in (False, True):
            args, kwargs = on_device(v.inputs(batch, seq, dtype, 5))
            if v.expect == "rewritten":
                assert operators_run(opt.train(train), args, kwargs), (
                    f"{batch, seq}, train {train}: the original code ran"
                )
            found = compare(model, opt, args, kwargs, train=train and v.train, seed=3)
            assert found.within(TOLERANCE), f"{batch, seq}, train {train}: {found}"
