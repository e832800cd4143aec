"""Models that have to be prepared differently get a sentence that says how."""

import pytest
import torch
from torch import nn

from hexa_fx.errors import InputError
from hexa_fx.runtime.install import install
from hexa_fx.runtime.preflight import check_model
from tests.runtime.handmade import ListMoE, list_rewritten


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), ListMoE())


def refusal(bad: object) -> str:
    with pytest.raises(InputError) as error:
        check_model(bad)  # type: ignore[arg-type]
    return str(error.value)


def test_an_ordinary_model_passes():
    check_model(model())
    check_model(model().half())
    check_model(nn.Identity())


def test_not_a_module():
    assert "expected an nn.Module, got function" in refusal(lambda x: x)


def test_already_optimized():
    once = model()
    install(once[1], list_rewritten(), None)
    assert "already optimized (1 has a rewritten forward)" in refusal(once)


def test_compiled():
    assert "optimize the model first, then compile" in refusal(torch.compile(model()))
