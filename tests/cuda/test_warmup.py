"""What asking a block for its kernels does to a model: nothing. On the CPU, with the launches left out by hand."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from hexa_fx import jit
from hexa_fx.codegen import KernelSpec
from hexa_fx.cuda import choosing as cuda_choosing
from hexa_fx.runtime import warmup as cuda_warmup

forwards: list[bool] = []
"""Of every forward, whether its input wanted a gradient."""


class Block(nn.Module):
    """Keeps a buffer and an attribute, draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.last: Tensor | None = None
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        self.last = self.linear(x) * scale + torch.rand(4)
        self.losses.append(self.last.sum())
        forwards.append(torch.is_grad_enabled() and x.requires_grad)
        return self.last, x.argmax()


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pretends that the CPU is a device with kernels; counts the runs."""
    runs: list[int] = []

    specs = [KernelSpec("combine", "combine", arch) for arch in (80, 89, 90)]

    @contextmanager
    def collect() -> Iterator[list[KernelSpec]]:
        yield specs
        runs.append(1)

    def request(found: list[KernelSpec]) -> None:
        assert found == specs

    monkeypatch.setattr(cuda_choosing, "collect", collect)
    monkeypatch.setattr(jit, "builder", lambda: SimpleNamespace(request=request))
    monkeypatch.setattr(cuda_warmup, "device_of", lambda block: torch.device("cpu"))
    return runs


@pytest.mark.parametrize("training", [True, False])
def test_a_block_is_as_it_was(ran: list[int], training: bool) -> None:
    forwards.clear()
    model = nn.Sequential(Block().train(training))
    state, example = torch.get_rng_state(), ((torch.randn(3, 4),), {"scale": torch.ones(())})
    state = torch.get_rng_state()
    assert cuda_warmup.request_kernels_of_steps(model, {"0": example}) == 3
    block = model[0]
    assert ran == [1]
    assert forwards == [training]
    assert block.losses == []
    assert block.calls == 0
    assert block.last is None
    assert block.linear.weight.grad is None
    assert torch.equal(torch.get_rng_state(), state)


def test_a_gradient_buffer_is_not_written_to(ran: list[int]) -> None:
    model, met = nn.Sequential(Block()), []
    weight = model[0].linear.weight
    weight.main_grad = held = torch.ones(4, 4)
    model[0].register_forward_pre_hook(lambda *_: met.append(weight.main_grad.fill_(2)))
    assert cuda_warmup.request_kernels_of_steps(model, {"0": ((torch.randn(3, 4),), {"scale": torch.ones(())})}) == 3
    assert len(met) == 1
    assert weight.main_grad is held
    assert (held == 1).all()


def test_nothing_happens_off_cuda() -> None:
    assert cuda_warmup.request_kernels_of_steps(nn.Sequential(Block()), {"0": ((torch.randn(3, 4),), {})}) == 0


def test_a_failure_is_logged_and_not_raised(ran: list[int], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert cuda_warmup.request_kernels_of_steps(nn.Sequential(Block()), {"0": ((torch.randn(3, 5),), {})}) == 0
    assert "when they are needed" in caplog.text
