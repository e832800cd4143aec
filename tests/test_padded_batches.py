"""Language models that were optimized on a batch without padding, on padded ones: an example shows no mask at work.

The mask of the example is all ones, or there is none; then rows are padded on the left or on the right. Logits at the tokens that
are there, and all gradients, have to be the original's.
"""

import copy
import itertools

import pytest
import torch

import hexa_fx
from hexa_fx.runtime.forward import HexaForward
from tests.zoo import families

NAMES = (
    "mixtral qwen2_moe qwen3_moe qwen3_next olmoe deepseek_v2 deepseek_v3 gpt_oss granitemoe jamba phimoe ernie4_5_moe"
).split()
LENGTHS = (9, 4, 1, 7)
"""Tokens of each row; one row has a single one."""


def padded(side: str) -> dict[str, torch.Tensor]:
    """Rows of different lengths, with position ids, and labels at the tokens that are there."""
    longest = max(LENGTHS)
    batch = families.inputs(len(LENGTHS), longest, seed=3)
    place = torch.arange(longest).expand(len(LENGTHS), -1)
    length = torch.tensor(LENGTHS)[:, None]
    mask = (place < length) if side == "right" else (place >= longest - length)
    ids = batch["input_ids"].masked_fill(~mask, 0)
    return {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "labels": batch["labels"].masked_fill(~mask, -100),
        "position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0),
    }


@pytest.mark.parametrize(
    ("family", "example_mask"), [*((name, True) for name in NAMES), *((name, False) for name in NAMES[:3])]
)
def test_padding_after_an_unpadded_example(family, example_mask, monkeypatch):
    model = families.make(family, dtype=torch.float64)
    if family != "gpt_oss":  # eager attention gives NaN to a row of padding that may look at nothing
        model.set_attn_implementation("sdpa")
    example = families.inputs(2, 7)
    if example_mask:
        example["attention_mask"] = torch.ones(2, 7, dtype=torch.long)
    original = copy.deepcopy(model)
    optimized = hexa_fx.optimize(model, example, hexa_fx.HexaConfig(own_code_when_small=False))
    assert optimized.report.rewritten, optimized.report
    fell_back = []
    monkeypatch.setattr(HexaForward, "original", lambda forward, *args, **kwargs: fell_back.append(forward.module))
    for side, train in itertools.product(("left", "right"), (False, True)):
        batch = padded(side)
        there = batch["attention_mask"].bool()
        expected = families.logits_and_gradients(original, batch, train)
        found = families.logits_and_gradients(optimized, batch, train)
        torch.testing.assert_close(found.logits[there], expected.logits[there], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-9, atol=1e-9)
        for name, gradient in expected.gradients.items():
            other = found.gradients[name]
            if gradient is None:
                assert other is None or not other.any(), name
            else:
                torch.testing.assert_close(
                    other, gradient, rtol=1e-8, atol=1e-8, msg=lambda m, name=name: f"{name}: {m}"
                )
    assert not fell_back, "the operators have to run, not the blocks' own code"
