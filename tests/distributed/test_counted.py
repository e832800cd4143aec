"""Reports count the calls of blocks that are spread: how many ran rewritten, how many their own code, also after a new plan."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import test_transformers
import torch
from harness import run
from test_mesh import build, data
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.overrides import TorchFunctionMode

import hexa_fx
from hexa_fx.distributed.gradients import sync_gradients
from hexa_fx.errors import PlanError
from hexa_fx.runtime import forward

IDS = torch.arange(24).view(4, 6)


def saved(folder: Path) -> str:
    test_transformers.build("mixtral").float().save_pretrained(folder)
    return str(folder)


def loaded(folder: str, world: int, **given: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    mesh = init_device_mesh("cpu", (world,))
    return hexa_fx.optimize_(model, {"input_ids": IDS}, mesh=mesh, capacities=None, **given)


def mine(model: nn.Module, rank: int) -> torch.Tensor:
    return IDS.split(model.partition.plan.batch)[rank]


def said(model: nn.Module, folder: str) -> tuple[Any, ...]:
    """The counts of both blocks, and the report in its three forms."""
    page = model.report.to_html(Path(folder) / f"report{torch.distributed.get_rank()}.html").read_text()
    calls = [block["calls"] for block in json.loads(model.report.to_json())["blocks"]]
    assert [[*block.calls] for block in model.report.blocks] == [[*each.values()] for each in calls]
    return [(each["rewritten"], each["own"]) for each in calls], str(model.report), page


def counted(rank: int, world: int, folder: str, strategy: str) -> list[Any]:
    model = loaded(folder, world, strategy=strategy)
    first, found = model.report, [said(model, folder)]
    model.train()
    loss = model(input_ids=mine(model, rank), labels=mine(model, rank)).loss
    found.append(said(model, folder))
    loss.backward()
    sync_gradients(model, model.partition)
    found.append(said(model, folder))
    model.eval()
    with torch.no_grad():
        model(input_ids=mine(model, rank))
    found.append(said(model, folder))
    model.partition.replan(capacities=(1.0, 3.0))
    found.append(said(model, folder))
    for _ in range(2):
        model(input_ids=mine(model, rank))
    found.append(said(model, folder))
    assert [block.calls for block in first.blocks] == [block.calls for block in model.report.blocks]
    assert not any(block.now for block in (*first.blocks, *model.report.blocks))
    model.partition.close()
    return found


@pytest.mark.parametrize("strategy", ["data", "model"])
def test_calls_are_counted_through_a_new_plan(strategy: str, tmp_path: Path) -> None:
    for found in run(2, counted, saved(tmp_path), strategy):
        calls, texts, pages = zip(*found)
        assert calls == tuple([(times, {})] * 2 for times in (0, 1, 1, 2, 2, 4))
        assert [text.count("calls:") for text in texts] == [0, 1, 1, 1, 1, 1]  # of two blocks that are alike
        for told in (texts[-1], pages[-1]):
            assert "calls: 4 rewritten" in told
            assert "own code" not in told


SEEN = "a TorchFunctionMode is active, which is to see the functions that its own code calls"


class Seen(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def by_themselves(rank: int, world: int, folder: str) -> Any:
    """Blocks that FSDP2 keeps whole can run their own code, and say so."""
    model, told = loaded(folder, world, strategy="fsdp"), []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    forward.logger.addHandler(handler)
    try:
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(forward, "_WARN_AFTER", 3)
            model(input_ids=mine(model, rank))
            with Seen():
                for _ in range(4):
                    model(input_ids=mine(model, rank))
    finally:
        forward.logger.removeHandler(handler)
    found = said(model, folder)
    model.partition.close()
    return *found, told


def test_own_code_is_counted_with_its_reason(tmp_path: Path) -> None:
    for calls, text, page, told in run(2, by_themselves, saved(tmp_path)):
        assert calls == [(1, {SEEN: 4})] * 2
        for written in (text, page):
            assert f"calls: 1 rewritten, 4 by its own code ({SEEN})" in written
        assert len(told) == 4
        assert sum("ran its own code in 3 of 4 calls" in line for line in told) == 2


def not_at_all(rank: int, world: int) -> Any:
    """On cut weights own code does not run: what raises is no call, and is said before it raises."""
    model, x = build("listed"), data(6)
    config = hexa_fx.PartitionConfig(tile=2)
    mesh = init_device_mesh("cpu", (world,))
    hexa_fx.optimize_(model, x, mesh=mesh, strategy="model", capacities=None, partition=config)
    rows = x.split(model.partition.plan.batch)[rank]
    model(rows)
    next(module for module in model[1].moe.experts.modules() if isinstance(module, nn.Linear)).register_forward_hook(
        lambda *_: None
    )
    text = str(model.report)
    with pytest.raises(PlanError, match=r"an expert has hooks.*so its original forward cannot run"):
        model(rows)
    calls = [block.calls[:3] for block in model.report.blocks]
    model.partition.close()
    with pytest.raises(PlanError, match="cannot run"):  # nor when there is no session any more
        model[1].moe(rows)
    return text, calls


def test_a_call_that_cut_weights_refuse_is_none() -> None:
    for text, calls in run(2, not_at_all):
        assert "1 of them cannot be called now" in text
        assert "1.moe: cannot be called now: an expert has hooks" in text
        assert calls == [(2, 0, {}), (1, 0, {})]
