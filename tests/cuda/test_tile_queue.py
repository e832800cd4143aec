"""Where persistent kernels take their tiles: zeros that launches share, and zeros of a CUDA graph's own."""

from functools import partial

import pytest
import torch

from hexa_fx.cuda import plan as cuda_plan

GPU = torch.device("cuda", 0)


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether a capture is on its way, as the module sees it; its zeros are the host's."""
    state = [False]
    zeros = partial(torch.zeros, dtype=torch.int32)
    monkeypatch.setattr(torch, "zeros", lambda size, dtype, device: zeros(size))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state[0])
    monkeypatch.setattr(cuda_plan, "CAPTURED", 3)
    for name, empty in (("_rings", {}), ("_turns", {}), ("_captured", {}), ("_kept", [])):
        monkeypatch.setattr(cuda_plan, name, empty)
    return state


def _taken(count: int) -> list[int]:
    return [cuda_plan.next_queue(GPU) for _ in range(count)]


def test_launches_share_a_ring_and_graphs_have_queues_of_their_own(capturing: list[bool]) -> None:
    first = _taken(cuda_plan.QUEUES)
    capturing[0] = True
    in_graphs = _taken(3)
    capturing[0] = False
    assert _taken(cuda_plan.QUEUES) == first
    assert len({*first, *in_graphs}) == cuda_plan.QUEUES + 3
    begin = cuda_plan._kept[0].data_ptr()
    assert all(begin <= at < begin + cuda_plan._kept[0].nbytes and at % 8 == begin % 8 for at in (*first, *in_graphs))


def test_a_capture_without_a_queue_left_writes_one_and_the_next_has_some_again(capturing: list[bool]) -> None:
    capturing[0] = True
    _taken(1)  # before any other launch
    assert not cuda_plan._kept
    capturing[0] = False
    _taken(1)
    capturing[0] = True
    _taken(4)
    assert len(cuda_plan._kept) == 1
    capturing[0] = False
    _taken(1)
    capturing[0] = True
    at = _taken(1)[0]
    held = cuda_plan._kept
    assert len(held) == 2
    assert held[1].data_ptr() <= at < held[1].data_ptr() + held[1].nbytes
