"""Where memory ends the analysis goes on with less or says what to do; blocks that raise; calls under other people's modes."""

import copy
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import hexa_fx
from hexa_fx.config import HexaConfig
from hexa_fx.isolation.size import is_out_of_memory
from tests.runtime.handmade import D, E, ListMoE
from tests.zoo.compare import operators_run

HOST = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate {} bytes. "
X = torch.randn(12, D, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError(HOST.format(64)), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def fails(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Makes the first ``times`` analyses of a block end as on a host without memory."""
    from hexa_fx.passes import _analyse

    left = [times]

    def analyse(*args: object) -> object:
        left[0] -= 1
        if left[0] >= 0:
            raise RuntimeError(HOST.format(64 << 20))
        return _analyse(*args)

    monkeypatch.setattr("hexa_fx.passes._analyse", analyse)


def test_it_says_what_was_needed_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    fails(monkeypatch, 99)
    report = hexa_fx.explain(ListMoE(), X)
    (block,) = report.refused
    assert "which takes up to 2.0 GiB beside the model (the last attempt asked for 64.0 MiB more)" in block.reason
    assert "free as much, or set HexaConfig(analysis_bytes=...)" in block.reason
    assert "report" not in str(report)
    assert block.advice == ""


def test_with_less_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    fails(monkeypatch, 2)
    assert hexa_fx.explain(ListMoE(), X, HexaConfig(verify=False)).rewritten


def test_no_memory_to_measure_costs_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def snapshots(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("hexa_fx.inspection.inspector.snapshots", snapshots)
    (block,) = hexa_fx.explain(ListMoE(), X, HexaConfig(verify=False)).rewritten
    assert block.costs is None
    assert "no memory left to measure what it costs" in caplog.text
    assert "report" not in caplog.text


SENTENCES = torch.randn(2, 9, D, generator=torch.Generator().manual_seed(0))


def listed(tie: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(ListMoE(), ListMoE()).eval()
    first, second = (layer.experts for layer in model)
    if tie == "objects":
        second[2].w1.weight = first[1].w1.weight
    elif tie == "data of two layers":
        second[2].w1.weight.data = first[1].w1.weight.data
    elif tie == "data of two experts":
        second[2].w1.weight.data = second[0].w1.weight.data
    elif tie == "a part of a larger one":
        first[0].w2.weight.data = first[1].w1.weight.data.view(-1)[: first[0].w2.weight.numel()].view(D, -1)
    elif tie == "one buffer":
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        for parameter, view in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()])):
            parameter.data = view.view_as(parameter)
    return model


def trained(model: nn.Module) -> torch.Tensor:
    """What it gives after a step of gradient descent."""
    model(SENTENCES).square().sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.01 * parameter.grad)
    return model(SENTENCES).detach()


TIES = ("none", "objects", "one buffer", "data of two layers", "data of two experts", "a part of a larger one")


@pytest.mark.parametrize("tie", TIES)
def test_listed_experts(tie: str) -> None:
    """They are read where they lie, so that what is written to one reaches the other."""
    expected = trained(listed(tie))
    optimized = hexa_fx.optimize_(listed(tie), SENTENCES)
    assert len(optimized.report.rewritten) == 2
    torch.testing.assert_close(trained(optimized), expected, rtol=1e-4, atol=1e-5)


def tokens(count: int = 12) -> torch.Tensor:
    return torch.randn(count, D)


def optimized(block: nn.Module, *given: Any) -> tuple[nn.Module, nn.Module]:
    return copy.deepcopy(block), hexa_fx.optimize(block.eval(), given)


class AtMost(ListMoE):
    """Asserts by a function of torch, which returns nothing."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        torch._assert(hidden.shape[0] <= 40, "too many tokens")
        torch._assert_async(hidden.isfinite().all())
        return super().forward(hidden)


def test_assertions_of_torch_still_raise() -> None:
    _, opt = optimized(AtMost(), tokens())
    assert operators_run(opt, (tokens(),))
    with pytest.raises(AssertionError, match="too many tokens"):
        opt(tokens(41))
    with pytest.raises((AssertionError, RuntimeError)):
        opt(tokens() / 0)


class Alive(nn.Module):
    """Runs the experts of a list that the mask gives; of no expert there is no weight either."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(D, E), nn.ModuleList(nn.Linear(D, D) for _ in range(E))
        self.out = nn.ModuleList(nn.Linear(D, D) for _ in range(E))

    def forward(self, x: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
        weights, index = self.gate(x).masked_fill(~alive, -torch.inf).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for expert in alive.nonzero().flatten().tolist():
            token, slot = torch.where(index == expert)
            y = self.out[expert](self.experts[expert](x[token]).relu())
            out.index_add_(0, token, y * weights[token, slot, None])
        return out


def test_a_mask_that_leaves_nothing() -> None:
    alive = torch.ones(E, dtype=torch.bool)
    original, opt = optimized(Alive(), tokens(), alive)
    given = tokens()
    for mask in (alive, ~alive, torch.arange(E) == 1):
        torch.testing.assert_close(opt(given, mask), original(given, mask))


class IfImported(ListMoE):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * (2.0 if "a_library" in sys.modules else 1.0)


def test_what_no_condition_watches_is_refused() -> None:
    _, opt = optimized(IfImported(), tokens())
    assert not opt.report.rewritten
    assert "sys.modules" in opt.report.blocks[0].reason


class Halved(TorchFunctionMode):
    """Halves what silu gives."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found / 2 if func is F.silu else found


def test_a_function_mode_sees_the_functions_of_the_block() -> None:
    original, opt = optimized(ListMoE(), tokens())
    given = tokens()
    assert operators_run(opt, (given,))
    with Halved():
        torch.testing.assert_close(opt(given), original(given))
        assert not operators_run(opt, (given,))


class Dense(nn.Module):
    """Runs every expert on all tokens, so that `torch.vmap` takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(D, 2 * D), nn.ReLU(), nn.Linear(2 * D, D)) for _ in range(E)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.gate(x).softmax(-1).topk(2)
        gates = torch.zeros(*x.shape[:-1], E).scatter(-1, index, weights)
        return torch.stack([gates[..., n, None] * e(x) for n, e in enumerate(self.experts)]).sum(0)


@pytest.mark.parametrize("batch", [3, 0])
def test_vmap_goes_through_the_original(batch: int) -> None:
    original, opt = optimized(Dense(), tokens())
    assert operators_run(opt, (tokens(),))
    given = torch.randn(batch, 5, D)
    torch.testing.assert_close(torch.vmap(opt)(given), torch.vmap(original)(given))
