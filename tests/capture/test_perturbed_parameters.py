"""Recording: parameters of one number are replaced for its time, the code's own no_grad is seen, weights are not copied."""

import pathlib
import threading

import torch
from torch import nn

from hexa_fx.capture import capture, record_of


def node_of(block: nn.Module, x: torch.Tensor, name: str) -> torch.fx.Node:
    nodes = [n for n in capture(block, (x,), {}).graph.nodes if name in n.name]
    return nodes[0]


def test_parameters_of_one_number_are_replaced_and_put_back() -> None:
    norm = nn.LayerNorm(4)
    before = {name: (p, p.data_ptr()) for name, p in norm.named_parameters()}
    captured = capture(norm, (torch.randn(3, 4),), {})
    assert set(captured.replaced) == {"weight", "bias"}
    assert captured.tensor_of("weight").unique().numel() == 4
    for name, parameter in norm.named_parameters():
        assert parameter is before[name][0]
        assert parameter.data_ptr() == before[name][1]
    assert bool((norm.weight == 1).all())
    assert bool((norm.bias == 0).all())


class OfALibrary(nn.Parameter):
    pass


def test_parameters_that_show_or_hold_no_numbers_of_their_own_stay() -> None:
    """A number other than 0 and 1 has an effect, a library's class may hold codes, and a meta tensor nothing."""
    block = nn.ReLU()
    given = {"scale": torch.ones(()), "temperature": torch.tensor(0.5), "away": torch.ones(3, device="meta")}
    for name, value in given.items():
        block.register_parameter(name, nn.Parameter(value))
    block.codes = OfALibrary(torch.ones(3))
    assert set(capture(block, (torch.randn(3, 4),), {}).replaced) == {"scale"}


def test_code_that_wants_its_ones_is_run_as_it_is() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not bool((self.scale == 1).all()):
                raise ValueError("only ones")
            return x * self.scale

    assert not capture(Picky(), (torch.randn(2, 3),), {}).replaced


def test_the_codes_own_no_grad_is_seen() -> None:
    class Partly(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                y = x.sin()
            return y + x.cos()

    x = torch.randn(2, 3)
    assert not record_of(node_of(Partly(), x, "sin")).gradient
    assert record_of(node_of(Partly(), x, "cos")).gradient


def test_tracing_makes_no_copy_of_the_weights() -> None:
    """96 MiB of experts, a few tokens: the process grows by less than a quarter of that while it records."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(24))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([expert(x) for expert in self.experts]).sum(0)

    block, x = Experts(), torch.randn(4, 1024)
    capture(block, (x,), {})
    done, grown, before = threading.Event(), [0], _resident()

    def watch() -> None:
        while not done.wait(0.001):
            grown[0] = max(grown[0], _resident() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    captured = capture(block, (x,), {})
    done.set()
    thread.join()
    assert grown[0] < 24 << 20
    assert captured.tensor_of("experts.3.weight").data_ptr() == block.experts[3].weight.data_ptr()


def _resident() -> int:
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096
