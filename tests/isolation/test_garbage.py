"""What an analysis leaves behind while a device is in use."""

import gc

import pytest
import torch

from hexa_fx.sources.packed_parameters import collected_after


@pytest.mark.parametrize("in_use", [True, False])
@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_where_a_device_is_in_use(
    in_use: bool, enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    monkeypatch.setattr(gc, "isenabled", lambda: enabled)
    monkeypatch.setattr(gc, "collect", lambda: collected.append(True))
    with pytest.raises(ZeroDivisionError), collected_after(torch.nn.Linear(1, 1)):
        _ = 1 / 0
    assert collected == [True] * (in_use and enabled)
