"""What holds for every test."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start: they are several at once
os.environ.setdefault("CI", "1")  # where torch only warns of operators whose results share memory, it raises then


def pytest_collection_finish() -> None:
    """What was imported so far stays, so the garbage collector need not look at it in every test."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def rewritten_code_at_any_size() -> Iterator[None]:
    """Test inputs are small: blocks whose own code is the quicker there would be compared with themselves."""
    from hexa_fx.ir import NEVER_SMALL  # imports torch, after its environment is set

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("hexa_fx.passes.rewrite"), "own_code_limit", lambda *_: NEVER_SMALL)
        yield
