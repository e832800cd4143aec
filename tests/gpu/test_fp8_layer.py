"""Layers in FP8 as they are planned as a whole, against the general path: the same bits, also once weights have changed."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hexa_fx.cuda import choosing as cuda_choosing
from hexa_fx.cuda import layer as cuda_layer
from hexa_fx.ir import FfnSpec
from hexa_fx.ops import direct, fp8_weights, moe_ffn_autograd, moe_ffn_fp8
from hexa_fx.ops.listed import Listed
from hexa_fx.ops.table_fp8 import MoeFfnFp8
from tests.gpu.cases import graph_of, make_routing
from tests.gpu.test_layer import replays
from tests.ops import test_moe_ffn_fp8 as cases

GATED, PLAIN, INTERLEAVED, _, SPLIT, AGAIN = cases.SPECS
TOKENS, WHOLE, RAGGED = 600, (256, 128), (136, 72)
Results = dict[str, Tensor]


@pytest.fixture(autouse=True)
def on_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Skips where the layer would run in 16 bits. Few tokens run in FP8, too."""
    monkeypatch.setitem(moe_ffn_fp8.is_few_on, "cuda", lambda o, captured: False)
    layer = Layer(GATED)
    if reason := moe_ffn_fp8.why_not(MoeFfnFp8(*layer.args())):
        pytest.skip(reason)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    cuda_choosing.forget_choices()
    fp8_weights.clear()
    yield
    fp8_weights.clear()


class Layer:
    """Operands of a layer, which all want gradients but for those that are frozen, and the ways to run it."""

    def __init__(
        self,
        spec: FfnSpec,
        bias: bool = False,
        sizes: tuple[int, int] = WHOLE,
        dtype: torch.dtype = torch.bfloat16,
        frozen: tuple[str, ...] = (),
        **changed: Any,
    ) -> None:
        given = cases.layer(spec, bias, dtype, tokens=TOKENS, sizes=sizes)
        self.spec = spec
        self.given = {n: None if t is None else t.to("cuda").contiguous() for n, t in (given | changed).items()}
        self.wanted = [n for n, t in self.given.items() if t is not None and t.is_floating_point() and n not in frozen]
        for name in self.wanted:
            self.given[name] = torch.nn.Parameter(self.given[name])
        weights = [self.given[name] for name in self.wanted if name in cases.NAMES]
        self.optimizer = torch.optim.SGD(weights, lr=1e-3, fused=True) if weights else None

    def args(self) -> tuple[Any, ...]:
        return *(self.given[name] for name in cases.OPERANDS), *cases.static(self.spec), True

    def call(self) -> Tensor:
        return direct.moe_ffn_fp8(*self.args())  # type: ignore[no-any-return]

    def step(self, dy: Tensor) -> Results:
        """The result and all gradients."""
        y = self.call()
        return {"y": y.detach(), **dict(zip(self.wanted, torch.autograd.grad(y, self.leaves(), dy), strict=True))}

    def leaves(self) -> list[Tensor]:
        return [self.given[name] for name in self.wanted]  # type: ignore[misc]

    def move(self) -> None:
        """What changes from call to call lies elsewhere."""
        for name in ("x", "top_k_index", "top_k_weights"):
            t = self.given[name]
            if t is not None:
                moved = t.detach().clone()
                self.given[name] = torch.nn.Parameter(moved) if name in self.wanted else moved

    def route(self, kind: str) -> None:
        index = self.given["top_k_index"]
        assert index is not None
        index.copy_(make_routing(kind, *index.shape, cases.E).index)

    def learn(self, results: Results) -> None:
        """A step of an optimizer that torch's version counters do not see."""
        if self.optimizer is not None:
            for name in set(self.wanted) & set(cases.NAMES):
                self.given[name].grad = results[name]  # type: ignore[union-attr]
            self.optimizer.step()


def by_operators(run: Callable[[], Results]) -> Results:
    kept = dict(moe_ffn_autograd._on_cuda)
    moe_ffn_autograd._on_cuda.clear()
    try:
        return run()
    finally:
        moe_ffn_autograd._on_cuda.update(kept)


def assert_equal(got: Results, want: Results) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert not value.isnan().any(), name
        assert torch.equal(got[name], value), name
        assert got[name].stride() == value.stride(), name


CASES: dict[str, dict[str, Any]] = {
    **{f"{spec.glu} {spec.layout1} {spec.layout2}": {"spec": spec} for spec in cases.SPECS[:5]},
    **{f"{spec.glu} {spec.layout1} {spec.layout2} bias": {"spec": spec, "bias": True} for spec in cases.SPECS[:5]},
    "widths that are filled up": {"spec": GATED, "bias": True, "sizes": RAGGED},
    "split widths that are filled up": {"spec": SPLIT, "bias": True, "sizes": RAGGED},
    "h again": {"spec": AGAIN, "bias": True},
    "no gates": {"spec": GATED, "bias": True, "top_k_weights": None},
    "16 bits otherwise": {"spec": GATED, "dtype": torch.float16},
    "32 bits": {"spec": GATED, "bias": True, "dtype": torch.float32},
    "frozen weights": {"spec": GATED, "bias": True, "frozen": ("w1", "w2")},
    "frozen tokens": {"spec": GATED, "frozen": ("x", "top_k_weights")},
    "one frozen weight": {"spec": INTERLEAVED, "frozen": ("w1",)},
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_as_the_general_path(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(**CASES[case])
    dy = torch.randn_like(layer.call().detach())
    for _ in range(2):
        layer.step(dy)
    calls = replays(monkeypatch)
    for turn, kind in enumerate(("random", "duplicates", "sentinels", "all_to_one", "empty_experts"), 1):
        layer.route(kind)
        if turn % 2:
            layer.move()
        dy = torch.randn_like(dy)
        want = by_operators(lambda dy=dy: layer.step(dy))  # type: ignore[misc]
        got = layer.step(dy)
        assert_equal(got, want)
        assert len(calls) == 2 * turn
        layer.learn(got)


@pytest.mark.parametrize("poison", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_without_gradients(bias: bool, poison: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.utils.deterministic.fill_uninitialized_memory = poison
    layer = Layer(GATED, bias)
    calls = replays(monkeypatch)
    for turn in range(6):
        layer.move()
        with torch.inference_mode() if turn % 2 else torch.no_grad():
            want = by_operators(lambda: {"y": layer.call()})
            assert_equal({"y": layer.call()}, want)
        layer.learn(
            {name: torch.randn_like(layer.given[name]) for name in cases.NAMES if layer.given[name] is not None}
        )
    assert len(calls) == 5


def test_a_graph_of_few_tokens_reads_what_calls_outside_made(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(GATED)
    with torch.no_grad():
        in_fp8 = layer.call()
        fp8_weights.clear()
        monkeypatch.setitem(moe_ffn_fp8.is_few_on, "cuda", lambda o, captured: not captured)
        exact = direct.moe_ffn(*layer.args()[:-1])
        for call in (layer.call, lambda: torch.ops.hexa.moe_ffn_fp8(*layer.args())):
            assert torch.equal(call(), exact)
        graph, y = graph_of(layer.call)
        graph.replay()
        assert torch.equal(y, in_fp8)
        assert torch.equal(layer.call(), exact)


def test_weights_that_are_quantised_already(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(GATED)
    w1, s1, *_ = fp8_weights.quantized(layer.given["w1"], None, "nk", "concat", transposed=False, cached=False)
    w2, s2, *_ = fp8_weights.quantized(layer.given["w2"], None, "nk", "none", transposed=False, cached=False)
    layer.given |= {"w1": w1, "w2": w2}
    calls = replays(monkeypatch)

    def run() -> Results:
        return {"y": torch.ops.hexa.moe_ffn_fp8(*layer.args(), s1, s2)}

    with torch.no_grad():
        for _ in range(4):
            layer.move()
            want = by_operators(run)
            assert_equal(run(), want)
    assert len(calls) == 3


@pytest.mark.parametrize("spec", [GATED, SPLIT, AGAIN], ids=str)
def test_lists_of_experts(spec: FfnSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantised where they lie; their gradients are theirs."""
    layer = Layer(spec if spec.glu == "split" else FfnSpec(spec.activation, spec.glu, "nk", "nk", (), spec.recompute_h))
    tensors: list[Tensor] = []
    for name in ("w1", "w3", "w2"):
        stack = layer.given[name]
        if stack is not None:
            parts = stack.detach().chunk(2, 1) if name == "w1" and spec.glu == "concat" else [stack.detach()]
            lists = [[t.clone().requires_grad_() for t in part] for part in parts]
            layer.given[name] = Listed(lists)  # type: ignore[assignment]
            tensors += [t for part in lists for t in part]
    x = layer.given["x"]
    assert x is not None
    dy = torch.randn_like(x)

    def run() -> Results:
        y = layer.call()
        found = torch.autograd.grad(y, [x, *tensors], dy)
        return {"y": y.detach(), **{str(number): t for number, t in enumerate(found)}}

    for _ in range(2):
        run()
    calls = replays(monkeypatch)
    for turn in range(1, 4):
        want = by_operators(run)
        assert_equal(run(), want)
        assert len(calls) == 2 * turn
        with torch.no_grad():
            for t in tensors:
                t.mul_(0.5)


def test_gradients_are_added_to_main_grad(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(GATED, bias=True)
    leaves = [t for name in cases.NAMES if (t := layer.given[name]) is not None]
    calls = replays(monkeypatch)

    def run() -> Results:
        for t in leaves:
            t.main_grad = torch.ones(t.shape, device="cuda")  # type: ignore[attr-defined]
        y = layer.call()
        y.backward(torch.ones_like(y))
        assert all(t.grad is None for t in leaves)
        return {str(number): t.main_grad for number, t in enumerate(leaves)}  # type: ignore[attr-defined]

    for _ in range(4):
        want = by_operators(run)
        assert_equal(run(), want)
    assert len(calls) == 2 * 3


def test_gradients_are_added_to_grad() -> None:
    """As a second micro-batch's, of weights in bf16 and in float32."""
    for dtype in (torch.bfloat16, torch.float32):
        layer = Layer(GATED, bias=True)
        leaves = {name: t for name in cases.NAMES if (t := layer.given[name]) is not None}
        held = {name: t.detach().to(dtype).requires_grad_() for name, t in leaves.items()}
        layer.given.update(held)
        y = layer.call()
        dy = torch.randn_like(y)
        y.backward(dy)
        first = {name: t.grad.double() for name, t in held.items() if t.grad is not None}
        layer.call().backward(dy)
        for name, t in held.items():
            assert t.grad is not None
            assert t.grad.dtype == dtype
            assert float((t.grad.double() - 2 * first[name]).norm() / first[name].norm()) < 1e-2


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("spec", [GATED, AGAIN], ids=["h kept", "h again"])
def test_a_step_in_a_graph_sees_other_inputs_and_weights(spec: FfnSpec, recorded: bool) -> None:
    """Captured when it is played again already, or before it was planned; weights are quantised as a part of it."""
    layer = Layer(spec, bias=True)
    dy = torch.randn_like(layer.call().detach())
    torch.cuda.synchronize()  # another stream reads the copies next
    with torch.cuda.stream(torch.cuda.Stream()):  # a leaf's gradient waits for the stream where it was first asked for
        for _ in range(3 if recorded else 1):
            layer.step(dy)
    graph, captured = graph_of(lambda: layer.step(dy))
    for kind in ("random", "sentinels", "duplicates"):
        layer.route(kind)
        dy.normal_()
        layer.learn({name: torch.randn_like(layer.given[name]) for name in layer.wanted})
        for t in captured.values():
            t.fill_(float("nan"))
        graph.replay()
        assert_equal(captured, by_operators(lambda: layer.step(dy)))


def test_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(GATED, bias=True, dtype=torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        dy = torch.randn_like(layer.call().detach())
        layer.step(dy)
        calls = replays(monkeypatch)
        for _ in range(3):
            want = by_operators(lambda: layer.step(dy))
            assert_equal(layer.step(dy), want)
    assert len(calls) == 2 * 3
    assert want["y"].dtype == torch.bfloat16


def test_large_layers_give_memory_back_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_layer, "MOST_BYTES", 0)
    layer = Layer(GATED)
    dy = torch.randn_like(layer.call().detach())
    calls = replays(monkeypatch)
    for _ in range(3):
        layer.step(dy)
    assert not calls
