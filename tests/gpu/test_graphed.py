"""`hexa_fx.graphed`: whole training steps of a rewritten model as a CUDA graph, against the same steps launched by the host."""

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hexa_fx

WIDTH, CHANNELS, EXPERTS, LAYERS, TOKENS = 128, 256, 4, 2, 320
Step = Callable[[Tensor], Tensor]


class Experts(nn.Module):
    """A router, and a loop over experts in one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.first = nn.Parameter(torch.randn(EXPERTS, CHANNELS, WIDTH) * 0.05)
        self.second = nn.Parameter(torch.randn(EXPERTS, WIDTH, CHANNELS) * 0.05)

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            token, slot = torch.where(index == e)
            y = nn.functional.gelu(x[token] @ self.first[e].t()) @ self.second[e].t()
            out.index_add_(0, token, y * weights[token, slot, None])
        return x + out


def data(seed: int, rows: int = TOKENS) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(rows, WIDTH, device="cuda", generator=generator)


@pytest.fixture
def pair() -> tuple[nn.Module, nn.Module]:
    """A rewritten model, and one just like it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Experts() for _ in range(LAYERS))).cuda()
    hexa_fx.optimize_(model, data(0))
    assert len(model.report.rewritten) == LAYERS
    return model, copy.deepcopy(model)


def step_of(model: nn.Module, inside: bool, dropout: float = 0.0) -> tuple[Step, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.dropout(model(x), dropout).square().mean()
        loss.backward()
        if inside:
            optimizer.step()
        return loss.detach()

    return step, optimizer


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


@pytest.mark.parametrize("inside", [False, True])
def test_replays_have_the_bits_of_steps(pair: tuple[nn.Module, nn.Module], inside: bool) -> None:
    model, same = pair
    (step, ours), (plain, theirs) = step_of(model, inside), step_of(same, inside)
    run = hexa_fx.graphed(step, model)
    for number in range(10):
        x = data(number, TOKENS if number != 7 else TOKENS // 2)
        assert torch.equal(run(x), plain(x)), number
        if not inside:
            ours.step(), theirs.step()
        assert equal(model, same), number
    assert run.replays >= 4, run.reason


def test_random_numbers_go_on(pair: tuple[nn.Module, nn.Module]) -> None:
    model, same = pair
    (step, _), (plain, _) = step_of(model, True, 0.5), step_of(same, True, 0.5)
    run, losses = hexa_fx.graphed(step, model), []
    for each in (run, plain):
        torch.manual_seed(7)
        losses.append([float(each(data(1))) for _ in range(8)])
    assert run.replays >= 3, run.reason
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 8


def test_a_step_that_reads_back_goes_on_as_it_is(pair: tuple[nn.Module, nn.Module]) -> None:
    model, same = pair
    (step, _), (plain, _) = step_of(model, True), step_of(same, True)
    seen: list[float] = []

    def reads(x: Tensor) -> Tensor:
        loss = step(x)
        seen.append(float(loss))
        return loss

    run = hexa_fx.graphed(reads, model)
    for number in range(7):
        assert torch.equal(run(data(number)), plain(data(number))), number
    assert equal(model, same)
    assert run.replays == 0
    assert "cannot be recorded" in run.reason
    assert len(seen) == 7
    assert torch.randn(3, device="cuda").isfinite().all(), "random numbers go on"


def test_a_recording_that_fails_gives_its_memory_back(pair: tuple[nn.Module, nn.Module]) -> None:
    model, _ = pair
    step, _ = step_of(model, True)

    def reads(x: Tensor) -> float:
        large = torch.ones(1 << 26, device="cuda", requires_grad=True)
        return float(step(x) + (large.exp() * 0).sum())

    run = hexa_fx.graphed(reads, model)
    pool = run._recorder._pool
    for number in range(5):
        run(data(number))
    assert "cannot be recorded" in run.reason
    torch.cuda.empty_cache()
    assert pool not in {part["segment_pool_id"] for part in torch.cuda.memory_snapshot()}


def test_a_batch_on_the_host_is_said(pair: tuple[nn.Module, nn.Module]) -> None:
    model, _ = pair
    step, _ = step_of(model, True)
    run = hexa_fx.graphed(lambda x: step(x.cuda()), model)
    for number in range(6):
        run(data(number).cpu())
    assert run.replays == 0
    assert "move it there before the call" in run.reason


def test_the_host_is_free_sooner(pair: tuple[nn.Module, nn.Module]) -> None:
    model, same = pair
    x, (step, _), (plain, _) = data(0), step_of(model, True), step_of(same, True)
    run = hexa_fx.graphed(step, model)
    for each in (run, plain):
        for _ in range(8):
            each(x)

    def host_ms(each: Step) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(5):
            each(x)
        taken = time.perf_counter() - begin
        torch.cuda.synchronize()
        return 200 * taken

    replayed, launched = host_ms(run), host_ms(plain)
    print(f"host ms a step: {launched:.2f} launched, {replayed:.2f} replayed")
    assert run.replays >= 5, run.reason
    assert replayed < launched
