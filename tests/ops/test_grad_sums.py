"""Gradients of further micro-batches, which kernels add to ``.grad``: what a backward pass would have, and where it would."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from hexa_fx.ir import FfnSpec
from hexa_fx.ops import grad_sums
from tests.ops.reference import GATED, Layer, layer

F64, BF16 = torch.float64, torch.bfloat16
SPECS = {"concat": GATED, "split": FfnSpec("silu", "split", "kn", "kn"), "none": FfnSpec("gelu", "none")}


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts what kernels added to."""
    found: list[int] = []
    real = grad_sums.beside

    def counted(taken: Any, *rest: Any) -> Any:
        sums = real(taken, *rest)
        found.append(sum(t is not None for t in sums))
        return sums

    monkeypatch.setattr(grad_sums, "beside", counted)
    return found


def weights(one: Layer) -> list[Tensor]:
    return [t for t in one.operands[2:] if t is not None]


def gradients(one: Layer) -> list[Tensor]:
    return [*torch.autograd.grad(one.run().square().sum(), weights(one))]


def assert_sums(one: Layer, want: list[Tensor], times: int) -> None:
    for t, gradient in zip(weights(one), want, strict=True):
        torch.testing.assert_close(t.grad, times * gradient)


@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
@pytest.mark.parametrize("bias", [False, True])
def test_micro_batches_add_up_in_place(spec: FfnSpec, bias: bool, added: list[int]) -> None:
    one = layer(spec, bias=bias)
    want = gradients(one)
    one.run().square().sum().backward()
    first = [t.grad for t in weights(one)]
    versions = [t._version for t in first if t is not None]
    for _ in range(2):
        one.run().square().sum().backward()
    assert added[-3:] == [0, len(first), len(first)]
    assert all(t.grad is kept for t, kept in zip(weights(one), first))
    assert all(t._version > before for t, before in zip(first, versions) if t is not None)
    assert_sums(one, want, 3)


def again(one: Layer) -> None:
    one.run().square().sum().backward()


def of_two_layers(one: Layer) -> None:
    (one.run().square().sum() + one.run().square().sum()).backward()


def kept_graph(one: Layer) -> None:
    loss = one.run().square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def checkpointed(reentrant: bool) -> Callable[[Layer], None]:
    def run(one: Layer) -> None:
        checkpoint(lambda *_: one.run(), *one.leaves(), use_reentrant=reentrant).square().sum().backward()

    return run


def offloaded(one: Layer) -> None:
    with save_on_cpu():
        loss = one.run().square().sum()
    loss.backward()


WAYS = {
    "again": (again, 1),
    "two layers of the same weights": (of_two_layers, 2),
    "a graph that is kept": (kept_graph, 2),
    "checkpoints": (checkpointed(False), 1),
    "reentrant checkpoints": (checkpointed(True), 1),
    "saved elsewhere": (offloaded, 1),
}


@pytest.mark.parametrize(("way", "times"), WAYS.values(), ids=list(WAYS))
def test_whatever_backward_is_made_of(way: Callable[[Layer], None], times: int, added: list[int]) -> None:
    one = layer(bias=True)
    want = gradients(one)
    way(one)
    way(one)
    assert added[-1] == len(want)
    assert_sums(one, want, 2 * times)


def test_a_cast_of_autocast_is_no_obstacle(added: list[int]) -> None:
    """And the gradient is not rounded to 16 bits on its way."""
    one = layer(GATED, tokens=40).to(torch.float32)
    x, *others = one.operands
    first: list[Tensor] = []
    for _ in range(2):
        casts = [None if t is None else t.to(BF16) for t in others]
        Layer(one.index, (x.bfloat16(), *casts), GATED).run().square().sum().backward()
        first = first or [t.grad.clone() for t in weights(one)]
    assert added[-1] == len(first)
    for t, gradient in zip(weights(one), first):
        assert t.grad.dtype == torch.float32
        assert (t.grad - 2 * gradient).norm() < 1e-2 * gradient.norm()
        assert not torch.equal(t.grad, 2 * gradient)


def test_hooks_on_a_cast_see_its_gradient(added: list[int]) -> None:
    one = layer(GATED, dtype=torch.float32)
    x, gates, w1, *others = one.operands
    seen: list[Tensor] = []
    for _ in range(2):
        cast, retained = w1.double(), others[-2].double()
        cast.register_hook(lambda gradient: seen.append(gradient.clone()))
        retained.retain_grad()
        Layer(
            one.index, (x.double(), gates.double(), cast, None, None, None, retained, None), GATED
        ).run().sum().backward()
    torch.testing.assert_close(*seen)
    torch.testing.assert_close(others[-2].grad, 2 * retained.grad.float())
    assert not any(added)


def asked_for(one: Layer) -> None:
    torch.autograd.grad(one.run().square().sum(), weights(one))


def asked_for_of_x(one: Layer) -> None:
    torch.autograd.grad(one.run().square().sum(), one.operands[:1])


def derived_again(one: Layer) -> None:
    one.run().square().sum().backward(create_graph=True)


@pytest.mark.parametrize("way", [asked_for, asked_for_of_x])
def test_what_only_asks_for_gradients_adds_nothing(way: Callable[[Layer], None], added: list[int]) -> None:
    one = layer(bias=True)
    want = gradients(one)
    again(one)
    way(one)
    assert added[-1] == 0
    assert_sums(one, want, 1)


def test_only_what_backward_is_asked_for(added: list[int]) -> None:
    one = layer(bias=True)
    want = gradients(one)
    again(one)
    one.run().square().sum().backward(inputs=weights(one)[:1])
    assert added[-1] == 1
    for place, (t, gradient) in enumerate(zip(weights(one), want, strict=True)):
        torch.testing.assert_close(t.grad, (1 + (place == 0)) * gradient)


def with_another_layout(t: Tensor) -> None:
    assert t.grad is not None
    t.grad = t.grad.mT.contiguous().mT if t.ndim > 2 else torch.stack([t.grad, t.grad], -1)[..., 0]


def with_a_history(t: Tensor) -> None:
    assert t.grad is not None
    t.grad = (t.grad.requires_grad_() * 1).detach().requires_grad_()


@pytest.mark.parametrize("change", [with_another_layout, with_a_history])
def test_other_tensors_are_left_to_torch(change: Callable[[Tensor], None], added: list[int]) -> None:
    one = layer(bias=True)
    want = gradients(one)
    again(one)
    for t in weights(one):
        change(t)
    again(one)
    assert added[-1] == 0
    assert_sums(one, want, 2)


def test_a_second_derivative_adds_as_torch_does(added: list[int]) -> None:
    one = layer(bias=True)
    want = gradients(one)
    again(one)
    derived_again(one)
    assert not any(added[1:])
    assert_sums(one, want, 2)


def test_hooks_see_gradients(added: list[int]) -> None:
    one = layer(bias=True)
    want = gradients(one)
    first, second, *_ = weights(one)
    seen: list[Tensor] = []
    sums: list[Tensor] = []
    first.register_hook(lambda gradient: seen.append(gradient.clone()))
    second.register_post_accumulate_grad_hook(lambda t: sums.append(t.grad.clone()))
    again(one)
    again(one)
    assert added[-1] == len(want) - 2
    torch.testing.assert_close(seen, [want[0]] * 2)
    torch.testing.assert_close(sums, [want[1], 2 * want[1]])
    assert_sums(one, want, 2)


def test_hooks_of_the_node_that_adds_run_once_a_pass() -> None:
    one = layer()
    first, *_ = weights(one)
    node = torch.autograd.graph.get_gradient_edge(first).node
    sums: list[Tensor] = []
    node.register_hook(lambda *_: sums.append(first.grad.clone()))
    again(one)
    again(one)
    torch.testing.assert_close(sums[1], 2 * sums[0])


class Experts(torch.nn.Module):
    def __init__(self, one: Layer) -> None:
        super().__init__()
        self.one, self.held = one, torch.nn.ParameterList([t for t in one.leaves() if t.ndim == 3])

    def forward(self) -> Tensor:
        return self.one.run()


@pytest.mark.parametrize("view", [False, True])
def test_ddp_reduces_the_sums(view: bool, added: list[int], tmp_path: Path) -> None:
    one = layer(spec=GATED)
    want = gradients(one)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(Experts(one), gradient_as_bucket_view=view)
        for step in range(3):
            with model.no_sync() if step < 2 else nullcontext():
                model().square().sum().backward()
        assert added[-1] == len(want)
        assert_sums(one, want, 3)
    finally:
        torch.distributed.destroy_process_group()


def test_threads_on_a_cpu_add_one_at_a_time(added: list[int]) -> None:
    one = layer(tokens=200, bias=True)
    want = gradients(one)
    again(one)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: again(one), range(40)))
    assert not any(added)
    assert_sums(one, want, 41)
