"""A layer of few tokens in three launches against float64: tiles, layouts, epilogues, ids of no expert, graphs, two streams."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from hexa_fx.codegen import family_decode
from hexa_fx.codegen.family_decode import DecodeTile
from hexa_fx.codegen.family_gemm_sm90 import FAST_MEMORY
from hexa_fx.cuda import calls, decode, layer
from hexa_fx.cuda import choosing as cuda_choosing
from hexa_fx.jit import kernel as jit_kernel
from hexa_fx.ops.activations import activation_forward
from tests.cuda.cards import any_number_of_rows  # noqa: F401
from tests.gpu.cases import DEVICE, ROUTINGS, make_routing, randn, row_error

BF16, F16 = torch.bfloat16, torch.float16
TOLERANCE = {BF16: 8e-3, F16: 1e-3}
"""a, rows and results are rounded, each once."""
EXPERTS = 12
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an sm_90 device"
)
pytestmark = [hopper, pytest.mark.usefixtures("any_number_of_rows")]


choose_summed = decode.choose_summed


class Layer:
    """Weights of moe_ffn, and its reference."""

    def __init__(
        self,
        hidden: int,
        inner: int,
        glu: str = "concat",
        activation: str = "silu",
        params: tuple[float, ...] = (),
        layouts: str = "nk nk",
        bias: bool = False,
        dtype: torch.dtype = BF16,
    ) -> None:
        self.layouts, self.static = layouts.split(), (activation, glu, params)
        n = 2 * inner if glu in ("concat", "interleaved") else inner
        split = glu == "split"

        def weight(columns: int, k: int, layout: str) -> Tensor:
            return randn(EXPERTS, *((columns, k) if layout == "nk" else (k, columns)), dtype=dtype, scale=k**-0.5)

        def bias_of(columns: int, there: bool = True) -> Tensor | None:
            return randn(EXPERTS, columns, dtype=dtype) if bias and there else None

        first = [weight(n, hidden, self.layouts[0]), bias_of(n)]
        up = [weight(n, hidden, self.layouts[0]) if split else None, bias_of(n, split)]
        self.weights = [*first, *up, weight(hidden, inner, self.layouts[1]), bias_of(hidden)]

    def args(self, x: Tensor, ids: Tensor, gates: Tensor | None) -> list[Any]:
        activation, glu, params = self.static
        return [x, ids, gates, *self.weights, activation, glu, list(params), *self.layouts, False]

    def __call__(self, x: Tensor, ids: Tensor, gates: Tensor | None) -> Tensor:
        """By the three launches, or it fails."""
        out: Tensor = layer.LAYERS["moe_ffn"](_general, *self.args(x, ids, gates))
        return out

    def reference(self, x: Tensor, ids: Tensor, gates: Tensor | None) -> Tensor:
        w1, b1, w3, b3, w2, b2 = (None if t is None else t.double() for t in self.weights)
        out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        for e in range(EXPERTS):
            t, s = torch.where(ids == e)
            h = [
                _product(x[t].double(), w[e], None if b is None else b[e], self.layouts[0])
                for w, b in ((w1, b1), (w3, b3))
                if w is not None
            ]
            a = activation_forward(torch.cat(h, 1), *self.static)
            y = _product(a, w2[e], None if b2 is None else b2[e], self.layouts[1])
            out.index_add_(0, t, y if gates is None else y * gates[t, s, None].double())
        return out


def _product(x: Tensor, w: Tensor, b: Tensor | None, layout: str) -> Tensor:
    y = x @ (w.t() if layout == "nk" else w)
    return y if b is None else y + b


def _general(*args: Any) -> Tensor:
    raise AssertionError("operator by operator")


def operands(ids: Tensor, hidden: int, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids and gates; NaN where there is no expert."""
    gates = torch.rand(ids.shape, device=DEVICE)
    gates[(ids < 0) | (ids >= EXPERTS)] = float("nan")
    return randn(ids.shape[0], hidden, dtype=dtype), ids, gates


def check(made: Layer, c: tuple[Tensor, Tensor, Tensor]) -> None:
    want = made.reference(c[0], c[1], c[2].nan_to_num(0.0))
    assert row_error(made(*c), want) < TOLERANCE[c[0].dtype]


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("layouts", ["nk nk", "kn kn"])
def test_routings(kind: str, layouts: str) -> None:
    made = Layer(264, 136, layouts=layouts)
    for tokens, top_k in ((1, 4), (7, 3), (20, 4), (64, 2), (256, 1)):
        ids = make_routing(kind, tokens, top_k, EXPERTS).index
        if kind == "sentinels":
            ids[ids == EXPERTS] = torch.tensor([-1, EXPERTS, 1 << 40], device=DEVICE)[
                torch.arange(int((ids == EXPERTS).sum())) % 3
            ]
        check(made, operands(ids, 264))


EPILOGUES: dict[str, dict[str, Any]] = {
    "concat, bias": {"bias": True},
    "split": {"glu": "split", "activation": "gelu", "layouts": "kn nk", "bias": True},
    "interleaved": {
        "glu": "interleaved",
        "activation": "swiglu_oai",
        "params": (1.702, 7.0),
        "layouts": "kn kn",
        "bias": True,
    },
    "none": {"glu": "none", "activation": "relu2", "layouts": "nk kn"},
    "tanh": {"glu": "none", "activation": "tanh", "bias": True},
    "f16": {"dtype": F16},
}


@pytest.mark.parametrize("name", EPILOGUES)
def test_epilogues(name: str) -> None:
    made = Layer(1032, 520, **EPILOGUES[name])
    for tokens in (1, 33):
        ids = make_routing("random", tokens, 4, EXPERTS).index
        check(made, operands(ids, 1032, made.weights[0].dtype))


@pytest.mark.parametrize("layouts", ["nk nk", "kn kn"])
@pytest.mark.parametrize(
    "tile",
    [DecodeTile(8, 1, 5), DecodeTile(8, 2, 3), DecodeTile(16, 2, 8), DecodeTile(32, 4, 8), DecodeTile(64, 4, 5)],
    ids=str,
)
def test_tiles(tile: DecodeTile, layouts: str) -> None:
    made = Layer(1104, 456, layouts=layouts)
    with mock.patch.object(calls, "chosen_tile", return_value=tile):
        for kind in ("random", "all_to_one"):
            check(made, operands(make_routing(kind, 90, 3, EXPERTS).index, 1104))


SUMS = {
    "short": (2048, 776),
    "short, wide": (4096, 264),
    "long": (4096, 4104),
    "long, parts of 16 rows": (4096, 4104),
    "k ends in a stage": (2112, 1000),
}


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", SUMS)
def test_sums(monkeypatch: pytest.MonkeyPatch, shape: str, bias: bool) -> None:
    """The second product weights and sums rows; each run gives the same bits, in a graph too."""
    card = FAST_MEMORY if "16" in shape else "any"
    monkeypatch.setattr(decode, "choose_summed", lambda _, *sizes: choose_summed(card, *sizes))
    made, hidden = Layer(*SUMS[shape], bias=bias), SUMS[shape][0]
    for kind in ROUTINGS:
        for tokens, top_k in ((1, 4), (3, 12), (9, 4), (20, 2)):
            c = operands(make_routing(kind, tokens, top_k, EXPERTS).index, hidden)
            check(made, c)
            first = made(*c)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = made(*c)
            for _ in range(5):
                y.fill_(float("nan"))
                graph.replay()
                assert torch.equal(y, first)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_ids(dtype: torch.dtype) -> None:
    ids = make_routing("sentinels", 20, 3, EXPERTS).index
    check(Layer(136, 72), operands(ids.to(dtype), 136))


def test_runs_give_the_same_bits_and_so_do_launches_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Layer(2048, 768)
    c = operands(make_routing("random", 9, 4, EXPERTS).index, 2048)
    first = made(*c)
    for _ in range(50):
        assert torch.equal(made(*c), first)
    monkeypatch.setattr(family_decode, "_depends", lambda spec: False)
    jit_kernel.get_kernel.cache_clear()
    cuda_choosing.forget_choices()
    assert torch.equal(made(*c), first)
    jit_kernel.get_kernel.cache_clear()


def test_a_cuda_graph_of_layers_follows_its_operands() -> None:
    """Each layer reads what the one before wrote, and its workspace may lie where that one's was."""
    layers = [Layer(256, 128) for _ in range(6)]
    x, ids, gates = operands(make_routing("random", 5, 3, EXPERTS).index, 256)

    def step() -> Tensor:
        y = x
        for made in layers:
            y = made(y, ids, gates)
        return y

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    for kind in ("random", "sentinels", "none_routed", "duplicates"):
        x.copy_(randn(5, 256, dtype=BF16))
        ids.copy_(make_routing(kind, 5, 3, EXPERTS).index)
        y.fill_(float("nan"))
        for _ in range(3):
            graph.replay()
        assert torch.equal(y, step())


def test_two_streams() -> None:
    made = Layer(512, 256)
    calls_of = [operands(make_routing("random", t, 3, EXPERTS).index, 512) for t in (3, 40)]
    want = [made(*c) for c in calls_of]
    streams = [torch.cuda.Stream() for _ in calls_of]
    torch.cuda.synchronize()
    found: list[list[Tensor]] = [[], []]
    for _ in range(30):
        for stream, c, each in zip(streams, calls_of, found, strict=True):
            with torch.cuda.stream(stream):
                each.append(made(*c))
    torch.cuda.synchronize()
    assert all(torch.equal(y, w) for each, w in zip(found, want, strict=True) for y in each)
