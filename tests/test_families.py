"""Whole transformers models of every family: all blocks rewritten but for stated reasons, and equal to the original."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import hexa_fx
from tests.zoo import families, family_table
from tests.zoo.families import FAMILIES


def _marked(family: str, implementation: str) -> Any:
    """One way of transformers to run experts for every family, and all for some; the others share its code, and are slow."""
    if implementation == "eager":
        return pytest.param(family, implementation)
    some = family in ("mixtral", "deepseek_v3", "gpt_oss")
    return pytest.param(family, implementation, marks=pytest.mark.more if some else pytest.mark.slow)


@pytest.mark.parametrize(("family", "implementation"), [_marked(*case) for case in family_table.cases()])
def test_family(family: str, implementation: str) -> None:
    row = family_table.judge(family, implementation)
    expected = FAMILIES[family]
    assert not row.own_code, "the original was compared with itself"
    if expected.expect == "rewritten":
        assert row.refused == 0, row.reasons
        assert row.rewritten == expected.blocks
    elif row.refused:
        assert all(len(reason.split()) > 3 for reason in row.reasons)
    for dtype, errors in row.errors.items():
        assert errors.forward <= (1e-4 if dtype == torch.float32 else 1e-9), (dtype, errors)
        assert errors.gradient <= (2e-3 if dtype == torch.float32 else 1e-9), (dtype, errors)
    assert row.errors, "ran in no dtype"


def test_the_command_of_the_page_compares_nothing_with_itself() -> None:
    """In a process of its own, without what tests set."""
    code = "from tests.zoo import family_table as t; t.cases = lambda: [('mixtral', 'eager')]; t.main()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False
    )
    assert "| mixtral | eager | 2 | 2 | 0 |" in done.stdout, done.stderr[-2000:]


def pair(family: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Two models with equal but separate weights, the second optimized in place."""
    original = families.make(family, dtype=dtype, seed=seed)
    optimized = hexa_fx.optimize_(families.make(family, dtype=dtype, seed=seed), families.inputs(2, 7))
    assert optimized.report.rewritten
    return original, optimized


def same(original: torch.nn.Module, optimized: torch.nn.Module, tolerance: float = 1e-9, train: bool = True) -> None:
    batch = families.inputs(3, 5, seed=2)
    reference = families.logits_and_gradients(original, batch, train)
    errors = family_table.errors_of(reference, families.logits_and_gradients(optimized, batch, train))
    assert errors.forward <= tolerance, errors
    assert errors.gradient <= tolerance, errors


ROUTERS = {"mixtral": "gate.weight", "olmoe": "gate.weight", "deepseek_v3": "gate.weight", "gpt_oss": "router.weight"}


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss", "olmoe"])
def test_router_sends_all_to_the_first_experts(family: str) -> None:
    """After the rewrite the router is mutated so that every token picks the same experts: the others stay empty."""
    models = pair(family)
    for model in models:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(ROUTERS[family]):
                    parameter.zero_()  # every score is equal: top-k takes the same experts for every token
    same(*models)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_bf16_autocast(family: str) -> None:
    original, optimized = pair(family, torch.float32)
    batch = families.inputs(3, 5)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        reference, value = original(**batch).logits, optimized(**batch).logits
    plain = original(**batch).logits.detach()
    assert value.dtype == reference.dtype
    rounding = (reference.float() - plain).abs().max()
    assert (value.float() - plain).abs().max() <= 2 * rounding, (
        "autocast of the optimized model loses more than the original's"
    )
    original.train(), optimized.train()
    for model in (original, optimized):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(**batch).loss.backward()
    for (name, a), b in zip(original.named_parameters(), optimized.parameters()):
        if a.grad is not None:
            assert b.grad is not None, name
            assert b.grad.dtype == a.grad.dtype, name
            assert torch.isfinite(b.grad).all(), name


@pytest.mark.parametrize("optimizer_first", [True, False], ids=["optimizer before", "optimizer after"])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_three_adamw_steps(family: str, optimizer_first: bool) -> None:
    """Three steps with weight decay follow the original, whether the optimizer was built before or after the rewrite."""
    original = families.make(family, dtype=torch.float64)
    other = families.make(family, dtype=torch.float64)
    steps = [torch.optim.AdamW(original.parameters(), lr=1e-2, weight_decay=0.1)]
    if optimizer_first:
        steps.append(torch.optim.AdamW(other.parameters(), lr=1e-2, weight_decay=0.1))
    hexa_fx.optimize_(other, families.inputs(2, 7))
    if not optimizer_first:
        steps.append(torch.optim.AdamW(other.parameters(), lr=1e-2, weight_decay=0.1))
    losses = []
    for model, optimizer in zip((original, other), steps):
        model.train()
        for step in range(3):
            optimizer.zero_grad()
            loss = model(**families.inputs(2, 7, seed=step)).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    torch.testing.assert_close(losses[3:], losses[:3], rtol=1e-8, atol=1e-9)
    for (name, a), b in zip(original.named_parameters(), other.named_parameters()):
        torch.testing.assert_close(b[1], a, rtol=1e-7, atol=1e-9, msg=name)
