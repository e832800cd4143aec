"""The card that `tests.cuda.cards` stands in for."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hexa_fx.cuda import choosing as cuda_choosing
from hexa_fx.cuda import plan as cuda_plan
from tests.cuda.cards import Cards


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Cards]:
    cards = Cards()
    cards.stand_in(monkeypatch, tmp_path)
    yield cards
    cuda_choosing.forget_choices()


@pytest.fixture
def hopper(cards: Cards, monkeypatch: pytest.MonkeyPatch) -> Cards:
    """The same of the Hopper family."""
    cards.be_hopper(monkeypatch)
    return cards


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part of a workspace has a place of its own, so that its address tells which it is."""
    monkeypatch.setattr(cuda_plan.Part, "meets", lambda part, other: True)
