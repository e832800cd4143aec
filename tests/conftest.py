"""What holds for every test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from hexa_fx.runtime import install

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start: they are several at once


@pytest.fixture(autouse=True)
def rewritten_code_at_any_size() -> Iterator[None]:
    """Test inputs are small: blocks whose own code is the quicker there would be compared with themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(install, "OWN_CODE_WHEN_SMALL", False)
        yield
