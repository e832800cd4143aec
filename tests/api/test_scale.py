"""Identical blocks are worked out once, so a deep model costs little more than one layer."""

import pytest
import torch

import hexa_fx
from hexa_fx import analysis
from hexa_fx.integrations.tiny_models import built, default_config, tiny_config


def test_of_48_layers_one_is_analysed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    config, seen, analyse = tiny_config(default_config("qwen3_moe")), list[str](), analysis.analyse
    config.num_hidden_layers, config._experts_implementation = 48, "eager"
    model, _ = built(config, "qwen3_moe")
    inputs = {"input_ids": torch.randint(3, 64, (2, 16))}
    monkeypatch.setattr(analysis, "analyse", lambda one, other: (seen.append(one.path), analyse(one, other))[1])
    for report in (hexa_fx.optimize(model, inputs).report, hexa_fx.explain(model, inputs)):
        assert len(report.rewritten) == 48
        assert sum(block.same_as is not None for block in report.blocks) == 47
    assert seen == ["model.layers.0.mlp.experts"] * 2
