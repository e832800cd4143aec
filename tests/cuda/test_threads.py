"""Collecting kernels is the affair of one thread: others launch, with the kernels of their own card."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hexa_fx.cuda import choosing, fallback, gemm
from tests.cuda.cards import Cards, arguments, copied


def in_a_thread(run: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(run()))
    thread.start()
    thread.join(60)
    assert found, "the thread failed or waits"
    return found[0]


def specs(cards: Cards) -> list[Any]:
    found = [launch.spec for launch in cards.launches]
    cards.launches.clear()
    return found


@pytest.mark.parametrize("card", [None, choosing.typical_card(90)])
def test_a_model_in_another_thread_launches_while_kernels_are_collected(
    cards: Cards, card: choosing.Card | None
) -> None:
    args = arguments()
    cards.run(args)
    expected = specs(cards)
    with choosing.collect(card) as found:
        for _ in range(4):  # the general path, its recording, replays
            in_a_thread(lambda: cards.run(copied(args)))
            assert specs(cards) == expected
    assert found == []


def test_what_is_collected_neither_launches_nor_is_played_again(cards: Cards) -> None:
    args = arguments()
    for _ in range(3):
        cards.run(args)
    expected = specs(cards)[: len(cards.launches) // 3]
    general = cards.general
    with choosing.collect() as found:
        cards.run(args)
    assert cards.general == general + 1
    assert not cards.launches
    assert found[: len(expected)] == expected
    cards.run(args)
    assert cards.general == general + 1  # the recording is still there


def test_threads_collect_for_cards_of_their_own(cards: Cards) -> None:
    def esmm(arch: int) -> Any:
        with choosing.collect(choosing.typical_card(arch)) as found:
            x, w = (torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((4000, 64), (4, 64, 64)))
            offs = torch.empty(5, dtype=torch.int32, device="meta")
            gemm.esmm(x, w, None, None, offs, 1, "nk")
            inner = None if arch == 90 else in_a_thread(lambda: esmm(90))
            gemm.esmm(x, w, None, None, offs, 1, "nk")
        assert inner is None or [spec.arch for spec in inner] == [90, 90]
        return found

    assert [(spec.arch, spec.family) for spec in esmm(80)] == [(80, "gemm_sm80")] * 2
    assert choosing.collection() is None
    assert not fallback.fallbacks


def test_backward_runs_in_the_thread_that_collects() -> None:
    """Autograd runs the backward of CUDA tensors in threads of its own, which would launch."""
    with choosing.collect():
        assert not torch._C._is_multithreading_enabled()
    assert torch._C._is_multithreading_enabled()
