"""A block that prints in its calls keeps doing so; one that only may, under a condition that is checked, or logs, is rewritten."""

from __future__ import annotations

import logging
import sys
import warnings

import pytest
import torch
from torch import nn

import hexa_fx
from hexa_fx.capture.output import say_left_out
from tests.detect.mixture import D, E, K, Mixture
from tests.zoo.compare import operators_run

log = logging.getLogger("tests.load")


class Says(Mixture):
    """Tells of itself in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.mix(x)[2]
        if self.way == "print":
            print("expert load")
        elif self.way == "number":
            print(f"largest {out.max().item():.3f}")
        elif self.way == "write":
            sys.stderr.write("expert load")
        elif self.way == "logging":
            log.warning("expert load")
        elif self.way == "warnings":
            warnings.warn("expert load", stacklevel=1)
        log.debug("not shown")
        return out


class SayingRouter(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("routing")
        log.warning("routing")
        return super().forward(x)


class RouterSays(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.router = SayingRouter(D, E)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).topk(K, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(ids == number)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


@pytest.mark.parametrize(("way", "named"), [("print", "print"), ("number", "print"), ("write", "print")])
def test_what_is_written_in_every_call_is_named(way: str, named: str) -> None:
    streams = sys.stdout, sys.stderr
    (report,) = hexa_fx.explain(Says(way).double(), torch.randn(9, D, dtype=torch.float64)).blocks
    assert f"writes to the terminal ({named})" in report.reason
    assert (sys.stdout, sys.stderr) == streams


def test_warnings_that_are_always_shown_are_named() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda *args, **kwargs: sys.stderr.write("shown")
        (report,) = hexa_fx.explain(Says("warnings").double(), torch.randn(9, D, dtype=torch.float64)).blocks
    assert "writes to the terminal" in report.reason


@pytest.mark.parametrize("block", [Says("nothing"), RouterSays()], ids=("nothing", "router"))
def test_what_stays_a_call_or_is_not_reached_may_write(block: nn.Module, capsys: pytest.CaptureFixture[str]) -> None:
    opt = hexa_fx.optimize(block.double(), torch.randn(9, D, dtype=torch.float64))
    assert opt.report.rewritten
    capsys.readouterr()
    opt(torch.randn(9, D, dtype=torch.float64))
    assert capsys.readouterr().out == ("routing\n" if isinstance(block, RouterSays) else "")


class Looks(Mixture):
    """Finds its logger by name in every call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logging.getLogger("tests.looked_up").debug("expert load")
        return self.mix(x)[2]


@pytest.mark.parametrize("level", [logging.WARNING, logging.DEBUG])
@pytest.mark.parametrize(
    ("block", "name"), [(Says("logging"), log.name), (Looks(), "tests.looked_up")], ids=("global", "name")
)
def test_lines_of_logs_are_left_out_and_their_levels_are_no_condition(
    block: nn.Module, name: str, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    opt = hexa_fx.optimize(block.double(), torch.randn(9, D, dtype=torch.float64))
    assert opt.report.rewritten
    caplog.set_level(level, name)
    caplog.clear()
    assert operators_run(opt, (torch.randn(9, D, dtype=torch.float64),))
    assert not caplog.records


def test_that_lines_are_left_out_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    say_left_out.cache_clear()
    for _ in range(2):
        hexa_fx.optimize(Says("logging").double(), torch.randn(9, D, dtype=torch.float64))
    said = [record.message for record in caplog.records if "leaves the line out" in record.message]
    assert len(said) == 1
    assert "test_output.py" in said[0]
