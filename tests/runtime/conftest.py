"""The card that `tests.runtime.cards` stands in for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hexa_fx.runtime import cuda_gemm, cuda_launch, cuda_plans_sm80, cuda_plans_sm90, cuda_replay, cuda_rows
from tests.runtime.cards import MAP, Cards


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Cards]:
    cards = Cards()
    monkeypatch.setattr(cuda_launch, "get_kernel", cards.get_kernel)
    monkeypatch.setattr(cuda_launch, "fallbacks", {})
    monkeypatch.setattr(cuda_launch, "_permanent", set())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setenv("HEXA_FX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: cards.stream, raising=False)
    for module in (cuda_rows, cuda_plans_sm80):
        monkeypatch.setattr(module, "arch", lambda device: 90)
    for module in (cuda_gemm, cuda_plans_sm80):
        monkeypatch.setattr(module, "family_arch", lambda device: 80)
    monkeypatch.setattr(cuda_replay, "_empty_strided", torch._C._dynamo.guards._empty_strided_cpu)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    cuda_launch.forget_plans()
    yield cards
    cuda_launch.forget_plans()


@pytest.fixture
def hopper(cards: Cards, monkeypatch: pytest.MonkeyPatch) -> Cards:
    """The same of the Hopper family: tensor maps begin with their address, queues lie in a ring."""
    turns = iter(range(0x10000, 0x10000 + 8 * 4096, 8))
    for module in (cuda_gemm, cuda_plans_sm80):
        monkeypatch.setattr(module, "family_arch", lambda device: 90)
    monkeypatch.setattr(cuda_gemm, "arch", lambda device: 90)
    monkeypatch.setattr(cuda_plans_sm90, "multiprocessors", lambda device: 4)
    for module in (cuda_plans_sm90, cuda_replay):
        monkeypatch.setattr(module, "queue", lambda device: next(turns))
    monkeypatch.setattr(cuda_replay, "in_ring", lambda device, address: 0x10000 <= address < 0x18000)
    monkeypatch.setattr(cuda_replay, "address_offset", lambda: 0)

    def tensor_map(pointer: int, *rest: object) -> bytes:
        return pointer.to_bytes(8, "little") + repr(rest).encode()[-100:].ljust(MAP - 8)

    monkeypatch.setattr(cuda_plans_sm90, "tensor_map", tensor_map)
    return cards
