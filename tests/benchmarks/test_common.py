"""How the GPU benchmarks take times, on a simulated card whose clock swings."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks import common

MS, SWING, PERIOD = 7.0, 0.05, 0.8


class Card:
    """Calls take MS milliseconds, more or less as the clock swings; the host waits for them."""

    def __init__(self, phase: float) -> None:
        self.now, self.phase = 0.0, phase
        self.order: list[str] = []

    def call(self, name: str, ms: float = MS) -> Callable[[], None]:
        def run() -> None:
            self.order.append(name)
            self.now += ms / 1000 * (1 + SWING * math.sin(2 * math.pi * (self.now / PERIOD + self.phase)))

        return run


@pytest.fixture(params=[0.0, 0.3, 0.55, 0.8])
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card(request.param)

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = card.now

        def synchronize(self) -> None: ...

        def elapsed_time(self, other: Any) -> float:
            return float((other.at - self.at) * 1000)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(common.time, "perf_counter", lambda: card.now)
    return card


def test_a_clock_that_swings_does_not_show_in_steady_times(card: Card) -> None:
    found = common.steady({"a": card.call("a"), "b": card.call("b", 2 * MS), "c": card.call("c")})
    assert found["a"] == pytest.approx(MS, rel=0.01)
    assert found["b"] == pytest.approx(2 * MS, rel=0.01)
    assert found["c"] / found["a"] == pytest.approx(1, rel=0.01)


def test_every_other_turn_is_in_the_opposite_order(card: Card) -> None:
    common.steady({"a": card.call("a"), "b": card.call("b")}, turns=3)
    changes = [name for name, before in zip(card.order, ["", *card.order]) if name != before]
    assert changes == ["a", "b", "a", "b", "a", "b"]  # once each; then a b, b a, a b


def test_a_call_that_takes_longer_than_the_time_is_made_once(card: Card) -> None:
    found = common.steady({"a": card.call("a", 5000.0)}, turns=1)
    assert card.order == ["a"] * 3
    assert found["a"] == pytest.approx(5000, rel=SWING)


def test_medians_are_of_the_calls_behind_the_warm_up(card: Card) -> None:
    found = common.medians({"a": card.call("a"), "b": card.call("b", 2 * MS)}, rounds=4, turns=2)
    assert found["a"] == pytest.approx(MS, rel=2 * SWING)
    assert found["b"] == pytest.approx(2 * MS, rel=2 * SWING)
