"""What the analysis of a list of experts does not do for each of them, or not twice."""

import logging
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hexa_fx
from hexa_fx.capture import capture
from hexa_fx.capture.python_reads import PythonReads
from hexa_fx.inspection import block_report
from hexa_fx.ir import Refusal
from hexa_fx.isolation.lookup import MODULE_STATE
from hexa_fx.isolation.module_state import ModuleState
from hexa_fx.lora.traced import _is_changed
from hexa_fx.passes.canonicalize import canonicalize_block
from hexa_fx.passes.detect import detect_block
from hexa_fx.runtime.install import installed_forward
from tests.zoo.common import SwiGLU, TopKGate, looped


class Listed(nn.Module):
    def __init__(self, dropout: float | None = None, experts: int = 4) -> None:
        super().__init__()
        self.gate = TopKGate(8, experts, 2)
        self.dropout = dropout
        self.experts = nn.ModuleList(SwiGLU(8, 6) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.gate(x)
        out = looped(x, weights, ids, self.experts)
        return out if self.dropout is None else F.dropout(out, self.dropout, self.training)


def test_what_torch_asks_of_its_dicts_of_hooks_is_not_even_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    noted, plain = Counter[str](), PythonReads._note

    def counted(self: PythonReads, holder: Any, name: str, frame: Any) -> None:
        noted[name] += 1
        plain(self, holder, name, frame)

    monkeypatch.setattr(PythonReads, "_note", counted)
    hexa_fx.explain(Listed(), torch.randn(12, 8), hexa_fx.HexaConfig(verify=False))
    assert noted["experts"]
    assert not {name for name in noted if "hooks" in name} & MODULE_STATE


def test_a_block_is_put_back_once_for_each_run_and_once_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, calls = Listed().eval(), torch.randn(12, 8), Counter[str]()
    restore, now = ModuleState.restore, ModuleState.now
    monkeypatch.setattr(ModuleState, "restore", lambda self: (calls.update(["restore"]), restore(self))[1])
    monkeypatch.setattr(ModuleState, "now", lambda self: (calls.update(["now"]), now(self))[1])
    monkeypatch.setattr(
        "hexa_fx.optimizing.find_sites", lambda *_: None
    )  # whose trials of routers put back what they ran
    hexa_fx.optimize(model, x, hexa_fx.HexaConfig(strict=True))
    assert calls["now"] < calls["restore"] <= calls["now"] + 16  # each search for a router begins with what was there


@pytest.mark.parametrize("heard", [False, True])
def test_conditions_are_checked_for_the_log_only_where_it_is_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, heard: bool
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(block_report, "why_original", lambda forward: asked.append(forward) or "")
    with caplog.at_level(logging.INFO if heard else logging.WARNING, logger="hexa_fx"):
        hexa_fx.optimize(Listed(), torch.randn(12, 8), hexa_fx.HexaConfig(verify=False))
    assert len(asked) == heard
    assert ("1 of 1 MoE blocks rewritten" in caplog.text) is heard


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def test_what_a_tracer_asks_of_every_adapter_it_asks_without_walking_into_any() -> None:
    plain = nn.Linear(2, 2)
    assert not _is_changed(plain)
    assert (
        "any" not in _is_changed.__code__.co_names
    )  # a polyfill, which dynamo traces step by step: a tenth of its time
    for hooks in HOOKS:
        changed = nn.Linear(2, 2)
        getattr(changed, hooks)[0] = print
        assert _is_changed(changed)
    plain.forward = lambda x: x
    assert _is_changed(plain)


def waits_and_calls(listed: int, dtype: torch.dtype) -> tuple[int, int]:
    """Of detection on a list of so many experts: looks at numbers on the host, and operators of torch in all."""
    torch.manual_seed(0)
    model = Listed(experts=listed).to(dtype).eval()
    captured = canonicalize_block(capture(model, (torch.randn(16, 8, dtype=dtype),), {}, "block"))
    counter = Operators()
    with counter:
        assert not isinstance(detect_block(captured), Refusal)
    return counter.waits, counter.calls


class Operators(TorchDispatchMode):
    """Counts what reaches torch's kernels, and what waits for a device there."""

    waits = calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        self.waits += any(name in str(func) for name in ("_local_scalar_dense", "aten.equal", "nonzero", "unique"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_detection_of_more_experts_waits_no_more_often_for_a_device(dtype: torch.dtype) -> None:
    few, many = waits_and_calls(8, dtype), waits_and_calls(24, dtype)
    assert many[0] <= few[0] + 16
    assert many[1] <= few[1] + 16 * 100


@pytest.mark.parametrize(("dropout", "shared"), [(None, True), (0.5, False)])
def test_both_modes_share_program_and_guards_where_the_code_asks_for_none(dropout: float | None, shared: bool) -> None:
    model, x = Listed(dropout).eval(), torch.randn(12, 8)
    opt = hexa_fx.optimize(model, x, hexa_fx.HexaConfig(strict=True, verify=False))
    forward = installed_forward(opt)
    assert forward is not None
    for training in (True, False):
        model.train(training)
        opt.train(training)
        torch.manual_seed(1)
        expected = model(x)
        torch.manual_seed(1)
        torch.testing.assert_close(opt(x), expected)
        assert not forward.own
    assert len(forward.specialisations) == (1 if shared else 2)
