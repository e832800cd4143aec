"""Reads of the environment are noted without a change of its class."""

from __future__ import annotations

import os
from typing import Any

import pytest

from hexa_fx.capture.environment_reads import asking_noted

NAME = "HEXA_FX_TEST_VARIABLE"


def noted_reads(monkeypatch: pytest.MonkeyPatch, code: Any) -> list[Any]:
    monkeypatch.delenv(NAME, raising=False)
    found: list[Any] = []
    plain = vars(os._Environ)["__getitem__"]
    with asking_noted(lambda holder, key: found.append(key)):
        assert vars(os._Environ)["__getitem__"] is plain  # Python 3.13 loses track of a class after a thousand changes
        code()
    count = len(found)
    os.environ.get(NAME)
    assert len(found) == count
    return found


@pytest.mark.parametrize(
    "code",
    [lambda: os.getenv(NAME), lambda: NAME in os.environ, lambda: os.environ.get(NAME, "")],
    ids=("getenv", "in", "get"),
)
def test_reads_are_noted(code: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert noted_reads(monkeypatch, code) == ["environ", NAME]


def test_writes_are_no_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert noted_reads(monkeypatch, lambda: os.environ.update({NAME: "1"})) == []


def test_a_dict_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {NAME: "1"})
    with asking_noted(lambda *_: None):
        assert os.environ[NAME] == "1"
