"""What an analysis leaves behind while a device is in use."""

import weakref

import pytest
import torch

from hexa_fx.isolation.size import collected_after


class Graph:
    """Refers to itself, as graphs do."""

    def __init__(self) -> None:
        self.owner = self


@pytest.mark.parametrize("in_use", [True, False])
def test_garbage_is_collected_where_a_device_is_in_use(in_use: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    with collected_after():
        left = weakref.ref(Graph())
    assert (left() is None) == in_use
