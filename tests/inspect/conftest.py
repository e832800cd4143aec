"""One optimized model for all tests that only look at it."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from torch import nn

import hexa_fx


@pytest.fixture(autouse=True)
def other_modules_stay() -> Iterator[None]:
    """The command line loads this folder's `models.py` under its name, which is also that of a module of `tests/distributed`."""
    before = sys.modules.get("models")
    yield
    sys.modules.pop("models", None)
    if before is not None:
        sys.modules["models"] = before


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
