"""Two recorded runs that show the same are searched once; whatever differs between them keeps them apart."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import hexa_fx
from hexa_fx.capture import capture, record_of
from hexa_fx.capture.observe import Observation
from hexa_fx.capture.started_functions import told_of_starts, untold
from hexa_fx.passes import analyse
from hexa_fx.passes import detect as detection
from hexa_fx.passes.detect.graph import operation
from hexa_fx.passes.modes.same_run import depends_on_mode, same_run, seen_before
from tests.detect.mixture import D, Mixture


class Plain(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x)[2]


def test_runs_of_one_call_are_the_same_and_share_a_graph() -> None:
    block, x = Plain().eval(), torch.randn(12, D)
    first, second = (capture(block, (x,), {}) for _ in range(2))
    assert same_run(first, second)
    shared = seen_before(second, [first])
    assert shared.graph is first.graph
    assert shared.reads is second.reads


class Uninitialised(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x).copy_(super().forward(x))


def test_what_memory_held_before_does_not_tell_runs_apart() -> None:
    block, x = Uninitialised().eval(), torch.randn(12, D)
    first, second = (capture(block, (x,), {}) for _ in range(2))
    (made,) = (node for node in second.graph.nodes if operation(node) == "empty_like")
    made.meta["hexa"] = replace(record_of(made), value=torch.full_like(record_of(made).value, 7.0))
    assert same_run(first, second)
    made.meta["hexa"] = replace(record_of(made), value=record_of(made).value.double())
    assert not same_run(first, second)


class Changeable(Plain):
    """What one run does and another does not."""

    def __init__(self) -> None:
        super().__init__()
        self.how: Callable[[torch.Tensor], torch.Tensor] = lambda x: x * 1.5
        self.loss: object = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(self.how(x))
        self.loss = out.sum() if self.loss is not None else None
        return out


@pytest.mark.parametrize(
    "how",
    [
        lambda x: x * 2.5,
        lambda x: x + 1.5,
        lambda x: (x * 1.5).detach(),
        lambda x: x.mul_(1.5),
        lambda x: x * torch.tensor(1.5),
        lambda x: x * torch.rand(()),
    ],
    ids=["number", "operation", "detached", "written", "constant", "random"],
)
def test_runs_that_differ_are_kept_apart(how: Callable[[torch.Tensor], torch.Tensor]) -> None:
    block, x = Changeable().eval(), torch.randn(12, D)
    first = capture(block, (x,), {})
    block.how = how
    second = capture(block, (x,), {})
    assert not same_run(first, second)
    assert seen_before(second, [first]) is second


def test_what_a_run_leaves_beside_its_output_counts() -> None:
    block, x = Changeable().eval(), torch.randn(12, D)
    first = capture(block, (x,), {})
    block.loss = 0.0
    assert not same_run(first, capture(block, (x,), {}))


class Dropping(Plain):
    """Asks torch's module for its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.drop(x))


class Copying(Dropping):
    """Asks a copy that it makes meanwhile."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(copy.deepcopy(self.drop)(x))[2]


class Looking(Plain):
    """Asks by way of a dict."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x * 0.5 if vars(self)["training"] else x)[2]


class Setting(Plain):
    """Does something of its own when its mode is set."""

    factor = 1.0

    def train(self, mode: bool = True) -> Setting:
        self.factor = 0.5 if mode else 1.0
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x * self.factor)[2]


class Generated(Plain):
    """Holds a module whose code nobody sees."""

    def __init__(self) -> None:
        super().__init__()
        self.traced = torch.fx.symbolic_trace(nn.Sequential(nn.Dropout(0.5)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.traced(x))


@pytest.mark.parametrize("block", [Dropping, Copying, Looking, Setting, Generated])
def test_code_that_may_ask_for_its_mode_is_recorded_in_both(block: Callable[[], nn.Module]) -> None:
    assert depends_on_mode(capture(block().eval(), (torch.randn(12, D),), {}))


def test_code_that_does_not_is_recorded_and_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    block, x = Plain(), torch.randn(12, D)
    assert not depends_on_mode(capture(block, (x,), {}))
    recorded: list[str] = []
    monkeypatch.setattr("hexa_fx.passes.capture", lambda *a: recorded.append(a[3]) or capture(*a))
    opt = hexa_fx.optimize(block, x, hexa_fx.HexaConfig(own_code_when_small=False))
    assert len(recorded) == 1
    assert opt.report.blocks[0].modes == {"eval": "rewritten", "train": "rewritten"}
    for training in (True, False):
        torch.testing.assert_close(opt.train(training)(x), block.train(training)(x))


def test_what_fails_in_one_mode_is_recorded_in_the_other() -> None:
    class Training(Plain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.training:
                raise RuntimeError("for training only")
            return super().forward(x)

    modes = hexa_fx.optimize(Training().train(), torch.randn(12, D)).report.blocks[0].modes
    assert modes["train"] == "rewritten"
    assert "for training only" in modes["eval"]


class Asking(Plain):
    """Does the same in both modes, which only two runs show."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if self.training in (True, False) else -x)


def test_both_modes_are_searched_once_where_they_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []
    plain = detection.detect
    monkeypatch.setattr("hexa_fx.passes.cover.complete.detect", lambda c, *a: searched.append(c.path) or plain(c, *a))
    opt = hexa_fx.optimize(Asking(), torch.randn(12, D))
    assert len(searched) == 1
    assert opt.report.blocks[0].modes == {"eval": "rewritten", "train": "rewritten"}


class Noisy(Plain):
    """Another function in train mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 0.5 if self.training else x)


def test_modes_that_differ_are_searched_apart_and_both_are_right() -> None:
    block, x = Noisy(), torch.randn(12, D)
    opt = hexa_fx.optimize(block, x, hexa_fx.HexaConfig(own_code_when_small=False))
    for training in (True, False):
        torch.testing.assert_close(opt.train(training)(x), block.train(training)(x))


def test_functions_that_nobody_wants_to_hear_of_are_told_once() -> None:
    def wanted() -> None: ...
    def unwanted() -> None: ...

    heard: list[str] = []

    def hear(frame: object) -> bool:
        heard.append(frame.f_code.co_name)  # type: ignore[attr-defined]
        return heard[-1] == "wanted"

    before = sys.gettrace()
    with told_of_starts(hear):
        for _ in range(3):
            wanted()
            unwanted()
    wanted()
    assert (heard.count("wanted"), heard.count("unwanted")) == (3, 1)
    assert sys.gettrace() is before


def test_a_second_context_hears_of_what_the_first_did_not_want() -> None:
    def called() -> None: ...

    for _ in range(2):
        heard: list[str] = []
        with told_of_starts(lambda frame: bool(heard.append(frame.f_code.co_name))):  # noqa: B023
            called()
        assert "called" in heard


def test_nothing_of_an_experts_module_is_taken_from_another_run() -> None:
    """The rewritten forward of each mode is guarded by what its own run read."""
    block, x = Plain(), torch.randn(12, D)
    opt = hexa_fx.optimize(block, x, hexa_fx.HexaConfig(own_code_when_small=False))
    forward = opt.forward
    modes = {
        mode: {str(r): r.value for r in guards.reads if r.steps[-1] == "training"}
        for mode, guards in forward.attributes.items()
    }
    assert all(value is mode for mode, read in modes.items() for value in read.values())
    assert isinstance(opt, nn.Module)


def test_what_is_called_untold_is_told_to_nobody() -> None:
    def called() -> None: ...

    heard: list[str] = []
    before = sys.gettrace()
    with told_of_starts(lambda frame: bool(heard.append(frame.f_code.co_name))):
        untold(called)()
        after = heard.count("called")
        called()
    assert (after, heard.count("called")) == ((0, 1) if sys.version_info < (3, 12) else (1, 1))
    assert sys.gettrace() is before


def test_a_comparison_of_both_modes_is_reported_once() -> None:
    block, x = Plain(), torch.randn(12, D)
    config = hexa_fx.HexaConfig(own_code_when_small=False)
    checks = analyse(Observation("block", block, (x,), {}), config).checks
    assert checks["eval"] is checks["train"]
    check = hexa_fx.optimize(block, x, config).report.blocks[0].check
    assert check is not None
    assert check.cases == sum(case.outcome != "skipped" for case in checks["eval"].cases)
