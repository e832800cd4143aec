"""Forward and backward of a layer as they are planned as a whole, against the general path: the same bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hexa_fx.cuda import choosing as cuda_choosing
from hexa_fx.ops import moe_ffn_autograd
from hexa_fx.passes.options import moe_ffn_without_esfk
from tests.gpu.cases import graph_of
from tests.gpu.test_layer import BF16, F32, Layer, replays

SMALL = (400, 2, 4, 256, 128)
DECODE = (9, 3, 7, 256, 96)
FIRST = 2
"""The first forward and backward of a kind run operator by operator."""


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    cuda_choosing.forget_choices()


class Training(Layer):
    """A layer whose operands want gradients."""

    def __init__(self, sizes: tuple[int, ...] = SMALL, recompute_h: bool = False, **rest: Any) -> None:
        super().__init__(sizes, **rest)  # type: ignore[arg-type]
        self.static = (*self.static[:5], recompute_h)
        self.function: Callable[..., Tensor] = torch.ops.hexa.moe_ffn.default
        for t in self.weights:
            if t is not None:
                t.requires_grad_()

    def step(self, dy: Tensor) -> list[Tensor]:
        """The result and the gradients of all operands that have one."""
        x, index, gates = self.inputs
        x = x.detach().requires_grad_()
        gates = gates if gates is None else gates.detach().requires_grad_()
        y = self.function(x, index, gates, *self.weights, *self.static)
        wanted = [t for t in (x, gates, *self.weights) if t is not None and t.requires_grad]
        return [y.detach(), *torch.autograd.grad(y, wanted, dy)]

    def general_step(self, dy: Tensor) -> list[Tensor]:
        """The same, launched kernel by kernel."""
        kept = dict(moe_ffn_autograd._on_cuda)
        moe_ffn_autograd._on_cuda.clear()
        try:
            return self.step(dy)
        finally:
            moe_ffn_autograd._on_cuda.update(kept)


CASES: dict[str, dict[str, Any]] = {
    "concat": {},
    "none bias": {"glu": "none", "bias": True},
    "split bias": {"glu": "split", "bias": True},
    "interleaved kn nk": {"glu": "interleaved", "layouts": ("kn", "nk"), "bias": True},
    "kn": {"glu": "split", "layouts": ("kn", "kn")},
    "no gates": {"gates": None},
    "float gates": {"gates": F32},
    "int32": {"ids": torch.int32},
    "f16": {"dtype": torch.float16, "gates": torch.float16},
    "recomputed": {"recompute_h": True},
    "few rows": {"sizes": DECODE},
    "ragged": {"sizes": (60, 2, 3, 72, 40), "bias": True},
    "no alignment": {"sizes": (60, 2, 3, 71, 39)},
    "float32": {"dtype": F32, "gates": F32, "bias": True},
    "float64": {"dtype": torch.float64, "gates": torch.float64},
    "many slots": {"sizes": (3000, 4, 8, 512, 704)},
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_as_the_general_path(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Training(**CASES[case])
    dy = torch.randn_like(layer.inputs[0])
    for _ in range(2):
        layer.step(dy)
    calls = replays(monkeypatch)
    for turn, kind in enumerate(("random", "duplicates", "sentinels", "all_to_one", "empty_experts"), 1):
        layer.route(kind)
        if turn % 2:
            layer.move()
        dy = torch.randn_like(dy)
        want = layer.general_step(dy)
        got = layer.step(dy)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert len(calls) == 2 * turn
        assert not any(t.isnan().any() for t in want)


@pytest.mark.parametrize("glu", ["concat", "split"])
def test_the_unfused_backward_of_ablations_gives_the_same(glu: str) -> None:
    layer = Training(glu=glu, bias=True)
    dy = torch.randn_like(layer.inputs[0])
    want = layer.step(dy)
    layer.function = moe_ffn_without_esfk
    for got, wanted in zip(layer.step(dy), want, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2 * float(wanted.abs().max()))


@pytest.mark.parametrize("frozen", [(0,), (4,), (0, 4), ()])
def test_frozen_weights(frozen: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Training()
    for i in frozen:
        layer.weights[i].requires_grad_(False)
    dy = torch.randn_like(layer.inputs[0])
    want = layer.general_step(dy)
    calls = replays(monkeypatch)
    for _ in range(4):
        assert all(torch.equal(a, b) for a, b in zip(layer.step(dy), want, strict=True))
    assert len(calls) == 2 * 4 - FIRST


def test_gradients_are_added_to_main_grad(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Training(bias=True)
    leaves = [t for t in layer.weights if t is not None]
    for t in leaves:
        t.main_grad = torch.zeros(t.shape, device="cuda")  # type: ignore[attr-defined]
    x, index, gates = layer.inputs
    calls = replays(monkeypatch)
    sums = []
    for turn in range(1, 7):
        y = torch.ops.hexa.moe_ffn.default(x, index, gates, *layer.weights, *layer.static)
        y.backward(torch.ones_like(y))
        sums.append([t.main_grad.clone() for t in leaves])  # type: ignore[attr-defined]
        assert all(t.grad is None for t in leaves)
        for now, first in zip(sums[-1], sums[0], strict=True):
            torch.testing.assert_close(now, turn * first, rtol=1e-4, atol=1e-4)
    assert len(calls) == 2 * 6 - FIRST


def test_a_retained_graph_and_a_stride_that_sum_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """backward of a sum is an expanded number; a second backward needs h again."""
    layer = Training()
    x, index, gates = layer.inputs
    calls, found = replays(monkeypatch), []
    for _ in range(4):
        y = torch.ops.hexa.moe_ffn.default(x, index, gates, *layer.weights, *layer.static)
        for keep in (True, False):
            found.append(torch.autograd.grad(y.sum(), layer.weights[0], retain_graph=keep)[0])
    assert all(torch.equal(found[0], t) for t in found)
    assert len(calls) == 3 * 4 - FIRST


@pytest.mark.parametrize("recorded", [True, False])
def test_a_step_in_a_graph_sees_other_inputs(recorded: bool) -> None:
    """Captured when it is played again already, or before it was written down."""
    layer = Training(gates=BF16)
    dy = torch.randn_like(layer.inputs[0])
    with torch.cuda.stream(torch.cuda.Stream()):  # a leaf's gradient waits for the stream where it was first asked for
        for _ in range(3 if recorded else 1):
            layer.step(dy)
    graph, captured = graph_of(lambda: layer.step(dy))
    for kind in ("random", "sentinels", "none_routed", "duplicates"):
        layer.route(kind)
        dy.normal_()
        for t in captured:
            t.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, layer.general_step(dy), strict=True))


def test_large_layers_give_memory_back_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Training((8192, 4, 4, 1024, 2048))
    dy = torch.randn_like(layer.inputs[0])
    calls = replays(monkeypatch)
    for _ in range(3):
        layer.step(dy)
    assert not calls
