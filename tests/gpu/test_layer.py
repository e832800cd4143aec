"""A layer of few tokens played again from its plan, against the first call of its kind: the same bits."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from hexa_fx.cuda import choosing as cuda_choosing
from hexa_fx.cuda import layer as cuda_layer
from hexa_fx.ir import FfnSpec
from hexa_fx.ops import direct
from hexa_fx.ops.table_layers import parameters, static_of
from tests.gpu.cases import graph_of, make_routing, randn
from tests.ops.reference import operands

BF16, F32 = torch.bfloat16, torch.float32
FEW = (9, 3, 7, 256, 96)
QWEN = (8, 8, 128, 2048, 768)
"""Tokens, experts per token, experts, model size, intermediate size."""


class Layer:
    """Operands of one layer, and the ways to run it."""

    def __init__(
        self,
        sizes: tuple[int, int, int, int, int] = FEW,
        glu: str = "concat",
        layouts: tuple[str, str] = ("nk", "nk"),
        dtype: torch.dtype = BF16,
        bias: bool = False,
        gates: torch.dtype | None = BF16,
        ids: torch.dtype = torch.int64,
    ) -> None:
        tokens, self.top_k, self.experts, d, inner = sizes

        def random(shape: tuple[int, ...], depth: int) -> Tensor:
            return randn(*shape, dtype=dtype, scale=depth**-0.5)

        index = torch.zeros(tokens, self.top_k, device="cuda", dtype=ids)
        spec = FfnSpec("silu", glu, *layouts)  # type: ignore[arg-type]
        made = operands(spec, random, index, experts=self.experts, model_size=d, inner=inner, bias=bias)
        self.weights, self.static = parameters(made), static_of(spec)
        weights = None if gates is None else torch.rand(tokens, self.top_k, device="cuda").to(gates)
        self.inputs: tuple[Tensor, Tensor, Tensor | None] = (made.x, index, weights)
        self.route("random")

    def route(self, kind: str) -> None:
        """Other numbers where the old ones lie."""
        x, index, gates = self.inputs
        with torch.no_grad():
            x.normal_()
            index.copy_(make_routing(kind, index.shape[0], self.top_k, self.experts).index)
            if gates is not None:
                gates.uniform_()

    def move(self) -> None:
        """The inputs lie elsewhere."""
        self.inputs = tuple(None if t is None else t.clone() for t in self.inputs)  # type: ignore[assignment]

    def args(self) -> tuple[Any, ...]:
        return (*self.inputs, *self.weights, *self.static)

    def run(self) -> Tensor:
        return direct.moe_ffn(*self.args())  # type: ignore[no-any-return]

    def first(self) -> Tensor:
        """As the first call of its kind: operator by operator, or where tokens are few by a plan made for it."""
        known = dict(cuda_layer._known)
        cuda_layer._known.clear()
        try:
            with torch.no_grad():
                return self.run()
        finally:
            cuda_layer._known.clear()
            cuda_layer._known.update(known)

    def record(self) -> None:
        """The two calls before the first that is played again."""
        with torch.no_grad():
            for _ in range(2):
                self.run()


@pytest.fixture(autouse=True)
def forgotten() -> None:
    cuda_choosing.forget_choices()


def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the calls of layers that ran as they were planned as a whole."""
    calls: list[int] = []
    plain = cuda_layer.on_device
    monkeypatch.setattr(cuda_layer, "on_device", lambda *args: calls.append(1) or plain(*args))
    return calls


CASES: dict[str, dict[str, Any]] = {
    "qwen3": {"sizes": QWEN},
    "one token": {"sizes": (1, *QWEN[1:])},
    "64 tokens": {"sizes": (64, *QWEN[1:])},
    "all experts": {"sizes": (5, 7, 7, 256, 96)},
    "ragged": {"sizes": (6, 2, 3, 72, 40), "bias": True},
    "no alignment": {"sizes": (6, 2, 3, 71, 39)},
    "split bias": {"glu": "split", "bias": True},
    "kn": {"glu": "split", "layouts": ("kn", "kn")},
    "interleaved kn nk": {"glu": "interleaved", "layouts": ("kn", "nk"), "bias": True},
    "none": {"glu": "none", "bias": True},
    "int32": {"ids": torch.int32},
    "no gates": {"gates": None},
    "float gates": {"gates": F32},
    "float32": {"dtype": F32, "gates": F32, "bias": True},
    "float64": {"dtype": torch.float64, "gates": torch.float64},
}


@pytest.mark.parametrize("poison", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_as_the_first_call(case: str, poison: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.utils.deterministic.fill_uninitialized_memory = poison
    layer = Layer(**CASES[case])
    layer.record()
    calls = replays(monkeypatch)
    for turn, kind in enumerate(("random", "duplicates", "sentinels", "all_to_one", "empty_experts")):
        layer.route(kind)
        if turn % 2 == 0:
            layer.move()
        want, before = layer.first(), len(calls)
        with torch.no_grad():
            assert torch.equal(layer.run(), want)
        assert len(calls) == before + 1
        assert not want.isnan().any()


@pytest.mark.parametrize("poison", [True, False])
def test_grad_modes_decide_as_ever(poison: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.utils.deterministic.fill_uninitialized_memory = poison
    layer = Layer()
    layer.record()
    want, calls = layer.first(), replays(monkeypatch)
    assert torch.equal(layer.run(), want)  # gradients are on, and nothing wants one
    with torch.inference_mode():
        assert layer.run().is_inference()
    assert len(calls) == 2
    layer.weights[4].requires_grad_()
    y = layer.run()
    assert len(calls) == 2
    assert torch.equal(y, want)
    (dw,) = torch.autograd.grad(y.float().sum(), layer.weights[4])
    assert float(dw.float().norm()) > 0
    with torch.no_grad():
        y = layer.run()
    assert (len(calls), y.requires_grad) == (3, False)
    assert torch.equal(y, want)


@pytest.mark.parametrize("recorded", [True, False])
def test_replays_of_a_graph_see_other_inputs(recorded: bool) -> None:
    """Captured when it is played again already, or while it is written down."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    layer = Layer(QWEN)
    with torch.no_grad():
        layer.run()
        if recorded:
            layer.run()
        graph, captured = graph_of(lambda: [layer.run() for _ in range(2)])
        for kind in ("random", "sentinels", "none_routed", "duplicates"):
            layer.route(kind)
            for y in captured:
                y.fill_(float("nan"))
            graph.replay()
            want = layer.first()
            assert all(torch.equal(y, want) for y in captured)
            assert torch.equal(layer.run(), want)


def test_threads_on_streams_of_their_own_do_not_meet() -> None:
    torch.utils.deterministic.fill_uninitialized_memory = False
    layers = [Layer(QWEN) for _ in range(3)]
    want = [layer.first() for layer in layers]
    layers[0].record()
    torch.cuda.synchronize()
    wrong: list[int] = []

    def run(n: int) -> None:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            found = [layers[n].run() for _ in range(200)]
            wrong.append(sum(not torch.equal(y, want[n]) for y in found))

    threads = [threading.Thread(target=run, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0, 0, 0]


def test_results_outlive_later_calls_and_workspaces_are_given_back() -> None:
    torch.utils.deterministic.fill_uninitialized_memory = False
    layer = Layer(QWEN)
    layer.record()
    with torch.no_grad():
        first, want = layer.run(), layer.first()
        before = torch.cuda.memory_allocated()
        for _ in range(20):
            layer.run()
        assert torch.cuda.memory_allocated() == before
    assert torch.equal(first, want)


def test_many_rows_an_expert_are_played_again_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper their kernels have tensor maps and queues."""
    layer = Layer((400, 2, 4, 256, 128))
    layer.record()
    calls = replays(monkeypatch)
    with torch.no_grad():
        for turn in range(1, 4):
            layer.route("random")
            layer.move()
            assert torch.equal(layer.run(), layer.first())
            assert len(calls) == turn
    assert len(cuda_layer._known) == 1
