"""Reads of the environment are noted without a change of its class, and code that changes what holds for all is refused."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

import hexa_fx
from hexa_fx.capture.environment_reads import asking_noted
from tests.detect.mixture import D, Mixture

NAME = "HEXA_FX_TEST_VARIABLE"
WRITTEN: list[str] = []


def noted_reads(monkeypatch: pytest.MonkeyPatch, code: Any) -> list[Any]:
    monkeypatch.delenv(NAME, raising=False)
    found: list[Any] = []
    plain = vars(os._Environ)["__getitem__"]
    with asking_noted(lambda holder, key: found.append(key), WRITTEN.append):
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
    WRITTEN.clear()
    assert noted_reads(monkeypatch, lambda: os.environ.update({NAME: "1"})) == []
    assert [f"os.environ['{NAME}']"] == WRITTEN


def test_a_dict_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {NAME: "1"})
    with asking_noted(lambda *_: None, WRITTEN.append):
        assert os.environ[NAME] == "1"


class Switching(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.switch()
        return self.mix(x)[2]

    def switch(self) -> None:
        with torch.no_grad(), torch.random.fork_rng():
            torch.rand(())


class Gradients(Switching):
    def switch(self) -> None:
        torch.set_grad_enabled(False)


class Threads(Switching):
    def switch(self) -> None:
        torch.set_num_threads(torch.get_num_threads())


class Backend(Switching):
    def switch(self) -> None:
        torch.backends.cudnn.benchmark = False


class Calls(Switching):
    def switch(self) -> None:
        nn.calls += 1


class Variable(Switching):
    def switch(self) -> None:
        os.environ[NAME] = "1"


@pytest.mark.parametrize(
    ("block", "named"),
    [
        (Gradients, "set_grad_enabled"),
        (Threads, "set_num_threads"),
        (Backend, "torch.backends.cudnn.benchmark"),
        (Calls, "nn.calls"),
        (Variable, f"os.environ['{NAME}']"),
    ],
)
def test_what_holds_for_all_code_once_a_call_has_set_it(
    block: type[nn.Module], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAME, "0")
    monkeypatch.setattr(nn, "calls", 0, raising=False)
    report = hexa_fx.explain(block().double(), torch.randn(9, D, dtype=torch.float64))
    assert f"the code switches what holds for all code after it ({named})" in report.blocks[0].reason
    assert torch.is_grad_enabled()


def test_a_context_holds_for_nothing_after_it() -> None:
    assert hexa_fx.explain(Switching().double(), torch.randn(9, D, dtype=torch.float64)).rewritten
