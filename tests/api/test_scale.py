"""Identical blocks are worked out once, so a deep model costs little more than one layer."""

from __future__ import annotations

import time

import torch
from torch import nn

import hexa_fx


def deep_qwen3_moe(layers: int, experts: int) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        moe_intermediate_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=experts,
        num_experts_per_tok=8,
    )
    config._experts_implementation = "eager"
    return Qwen3MoeForCausalLM(config).eval()


def test_48_layers_of_128_experts_in_seconds():
    model = deep_qwen3_moe(48, 128)
    inputs = {"input_ids": torch.randint(64, (2, 16))}
    started = time.process_time()
    optimized = hexa_fx.optimize(model, inputs)
    optimizing = time.process_time()
    report = hexa_fx.explain(model, inputs)
    explaining = time.process_time()

    assert len(optimized.report.rewritten) == len(report.rewritten) == 48
    assert sum(block.same_as is not None for block in optimized.report.blocks) == 47
    assert optimizing - started < 20
    assert explaining - optimizing < 10
    torch.testing.assert_close(optimized(**inputs).logits, model(**inputs).logits)
