"""One optimized model for all tests that only look at it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import hexa_fx

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def models() -> ModuleType:
    """`models.py` of this folder, which is no package."""
    spec = importlib.util.spec_from_file_location("inspect_models", Path(__file__).with_name("models.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def optimized(models: ModuleType) -> nn.Module:
    """Two alike blocks."""
    model, inputs = models.factory()
    return hexa_fx.optimize(model, inputs)
