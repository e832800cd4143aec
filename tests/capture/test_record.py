"""Recording: the graph says what the code did, sizes stay symbolic, and nothing of the block is changed or copied."""

import functools
import gc
import pathlib
import sys
import threading
import types

import pytest
import torch
from torch import nn

from hexa_fx.capture import capture, record_of
from hexa_fx.capture.calls import raised_at
from hexa_fx.capture.records import memory_of
from hexa_fx.capture.replay import Replay
from hexa_fx.errors import CaptureError
from tests.capture.run import run


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        tokens = x.view(-1, x.shape[-1])
        choice = self.router(tokens).argmax(-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            chosen = (choice == number).nonzero().squeeze(1)
            if chosen.numel() == 0:
                continue
            out[chosen] += expert(tokens[chosen])
        return out.view(x.shape)


@pytest.fixture
def block() -> Block:
    torch.manual_seed(0)
    return Block()


def test_recording_leaves_buffers_random_state_and_gradients_alone(block):
    x = torch.randn(2, 5, 6, requires_grad=True)
    state = torch.get_rng_state()
    capture(block, (x,), {})
    assert block.calls == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert x.grad is None
    assert not x.grad_fn


def test_a_tensor_compared_with_none_writes_no_weights_into_errors(block, monkeypatch):
    """torch raises an error then, and catches it, whose text has the active mode in it: all parameters were written out."""
    block.router.register_forward_hook(lambda module, args, output: output if output == None else None)  # noqa: E711
    monkeypatch.setattr(nn.Parameter, "__repr__", lambda parameter: pytest.fail("a parameter is written out"))
    capture(block, (torch.randn(2, 5, 6),), {})


def test_a_recording_says_what_the_code_did_and_where(block):
    """Sizes are nodes and not numbers; what is asked of values that code reads is in no node."""
    x = torch.randn(2, 5, 6)
    captured = capture(block, (x,), {})
    torch.testing.assert_close(run(captured, x), block(x))
    nodes = list(captured.graph.nodes)
    assert not [node for node in nodes if any(map(callable, node.args))]
    view = next(node for node in nodes if node.target == "view")
    assert any(isinstance(argument, torch.fx.Node) and argument.target == "size" for argument in view.args)
    products = [node for node in nodes if "linear" in str(node.target)]
    assert record_of(products[0]).scope == "router"
    assert record_of(products[1]).scope.startswith("experts.")
    choice = next(node for node in nodes if node.target == "argmax")
    assert record_of(choice).location.file == __file__
    assert record_of(choice).value.shape == (10,)
    assert any("eq" in str(node.target) for node in nodes if record_of(node).decision), "a branch is a decision"
    router = next(call for call in captured.calls if call.path == "router")
    assert router.args[0].target == "view"
    assert router.output.meta["hexa"].value.shape == (10, 3)


def test_the_blocks_own_error_is_in_the_message(block):
    with pytest.raises(CaptureError, match=r"could not record 'here'.*RuntimeError"):
        capture(block, (torch.randn(2, 5, 7),), {}, path="here")


def test_numbers_of_tensors_as_keys_are_named_with_the_place():
    class Keyed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            places = {number: place for place, number in enumerate(x.argmax(-1).tolist())}
            return x * len(places)

    with pytest.raises(
        CaptureError, match=r"could not record 'Keyed': it looks numbers up .* leave what is chosen"
    ) as found:
        capture(Keyed(), (torch.randn(3, 4),), {})
    place = raised_at(found.value.__cause__)
    assert place is not None
    assert place.file == __file__


def test_wrong_arguments_are_named(block):
    with pytest.raises(CaptureError, match="missing a required argument"):
        capture(block, (), {})


def test_builtins_are_put_back(block):
    capture(block, (torch.randn(1, 2, 6),), {})
    assert "int" not in globals()
    assert "len" not in globals()
    assert nn.Module.__call__.__module__ == "torch.nn.modules.module"


def test_replay_recomputes_only_downstream_in_float64(block):
    x = torch.randn(2, 5, 6)
    captured = capture(block, (x,), {})
    replay = Replay(captured)
    product = next(n for n in captured.graph.nodes if "linear" in str(n.target) and record_of(n).scope == "experts.0")
    replaced = torch.zeros_like(replay.value(product))
    (result,) = captured.graph.output_node().all_input_nodes
    answer = replay.run({product: replaced}, [result])[result]
    torch.testing.assert_close(replay.run({}, [result])[result].float(), record_of(result).value)
    expected = block(x)
    chosen = (block.router(x.view(-1, 6)).argmax(-1) == 0).view(2, 5)
    expected[chosen] = 0
    assert answer.dtype == torch.float64
    torch.testing.assert_close(answer.float(), expected.detach())


def test_a_recording_does_not_outlive_its_use():
    """Nothing global holds the recorder, which holds the block's parameters."""
    from hexa_fx.capture.recorder import Recorder

    def recorders():
        gc.collect()
        return sum(type(thing) is Recorder for thing in gc.get_objects())

    before, block = recorders(), nn.Linear(4, 4)
    captured = capture(block, (torch.randn(2, 4),), {}, "")
    assert captured.graph
    del captured
    assert recorders() == before


def test_memory_that_is_given_again_after_a_run_is_no_recorded_memory():
    """Weights that were laid there before the other mode ran made two runs that are the same look different."""
    captured = capture(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), (torch.randn(8, 64),), {})
    gc.collect()
    computed = [record_of(node) for node in captured.graph.nodes if node.op.startswith("call")]
    later = [torch.empty_like(record.value) for record in computed for _ in range(20)]
    assert {record.storage for record in computed}.isdisjoint(map(memory_of, later))
    assert len({record.storage for record in computed}) == 2


def test_functions_of_einops_called_by_its_name_are_one_call_each(monkeypatch):
    """It caches what it works out for a shape, so that sizes would be those of the example."""

    @functools.cache
    def worked_out(*shape: int) -> tuple[int, int]:
        return shape[0] * shape[1], shape[2]

    def rearrange(x: torch.Tensor, pattern: str) -> torch.Tensor:
        return x.reshape(worked_out(*x.shape))

    rearrange.__module__ = "einops.einops"
    einops = types.ModuleType("einops")
    einops.rearrange = rearrange
    monkeypatch.setitem(sys.modules, "einops", einops)

    class Flat(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(einops.rearrange(x, "b s d -> (b s) d"))

    recorded = capture(Flat(), (torch.randn(2, 5, 6),), {})
    assert rearrange in [node.target for node in recorded.graph.nodes]
    assert run(recorded, torch.randn(3, 7, 6)).shape == (21, 6)
    assert einops.rearrange is rearrange


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
