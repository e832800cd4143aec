"""transformers 4: experts in module lists, loops over them. CI runs this file in an environment of its own (.ci/run)."""

import pytest
import torch

pytest.importorskip("transformers")

import transformers

import hexa_fx
from tests.zoo import families, family_table
from tests.zoo.compare import operators_run

if not transformers.__version__.startswith("4."):
    pytest.skip(f"for transformers 4, this is {transformers.__version__}", allow_module_level=True)

FLOAT64 = (
    "mixtral qwen2_moe qwen3_moe qwen3_next olmoe flex_olmo deepseek_v2 phimoe gpt_oss llama4_text granitemoe jamba "
    "switch_transformers hunyuan_v1_moe minimax aria_text".split()
)
FLOAT32 = ("deepseek_v3", "glm4_moe", "longcat_flash")
"""Their own code mixes float32 in, so that it runs in nothing else on the CPU."""


SAME = "qwen3_moe qwen3_next olmoe flex_olmo minimax hunyuan_v1_moe glm4_moe".split()
"""Loops over experts as in a family that stays, line by line."""


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=pytest.mark.slow if f in SAME else ()) for f in (*FLOAT64, *FLOAT32)]
)
def test_rewritten_and_equal(family: str) -> None:
    dtype = torch.float32 if family in FLOAT32 else torch.float64
    model = families.make(family, dtype=dtype)
    optimized = hexa_fx.optimize(model, families.inputs(2, 7))
    report = optimized.report
    assert not report.refused, report
    assert len(report.rewritten) == families.FAMILIES[family].blocks
    for size in ((2, 7), (3, 5)):
        for train in (False, True):
            batch = families.inputs(*size, seed=2)
            reference = families.logits_and_gradients(model, batch, train)
            errors = family_table.errors_of(reference, families.logits_and_gradients(optimized, batch, train))
            # deepseek_v2 and the switch router round to float32 in their own code.
            assert errors.forward <= (1e-4 if dtype == torch.float32 else 1e-6), errors
            assert errors.gradient <= (2e-3 if dtype == torch.float32 else 1e-5), errors
    optimized.eval()
    assert operators_run(optimized, (), families.inputs(3, 5)), "the original code ran"


def test_experts_are_lists() -> None:
    """What this file is for: the library's experts are modules in a list here, and stay so."""
    optimized = hexa_fx.optimize(families.make("mixtral", dtype=torch.float64), families.inputs(2, 7))
    assert any(name.endswith("experts.3.w2.weight") for name in optimized.state_dict())
