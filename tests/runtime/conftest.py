"""A process group."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def process_group() -> Iterator[None]:
    """Of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
