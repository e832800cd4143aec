"""A layer of few tokens in three launches against float64: tiles, layouts, epilogues, ids of no expert, graphs, two streams."""

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from hexa_fx.codegen import family_decode
from hexa_fx.codegen.family_decode import DecodeTile
from hexa_fx.codegen.family_gemm_sm90 import FAST_MEMORY
from hexa_fx.cuda import calls, decode
from hexa_fx.cuda import choosing as cuda_choosing
from hexa_fx.cuda import layer as cuda_layer
from hexa_fx.ir import FfnSpec
from hexa_fx.jit import kernel as jit_kernel
from hexa_fx.ops.table_layers import MoeFfn
from tests.cuda.cards import any_number_of_rows  # noqa: F401
from tests.gpu.cases import DEVICE, ROUTINGS, graph_of, make_routing, randn, row_error
from tests.ops.reference import in_float64, loop, operands

BF16, F16 = torch.bfloat16, torch.float16
TOLERANCE = {BF16: 8e-3, F16: 1e-3}
"""a, rows and results are rounded, each once."""
EXPERTS = 12
pytestmark = pytest.mark.usefixtures("hopper", "any_number_of_rows")


choose_summed = family_decode.choose_summed


SWIGLU = FfnSpec("silu", "concat")


def layer(hidden: int, inner: int, spec: FfnSpec = SWIGLU, bias: bool = False, dtype: torch.dtype = BF16) -> MoeFfn:
    """Operands of moe_ffn, with a routing that `routed` replaces."""

    def random(shape: tuple[int, ...], depth: int) -> Tensor:
        return randn(*shape, dtype=dtype, scale=depth**-0.5)

    ids = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    return operands(spec, random, ids, experts=EXPERTS, model_size=hidden, inner=inner, bias=bias)


def routed(made: MoeFfn, ids: Tensor) -> MoeFfn:
    """Other tokens; routing weights are NaN where there is no expert."""
    gates = torch.rand(ids.shape, device=DEVICE)
    gates[(ids < 0) | (ids >= EXPERTS)] = float("nan")
    x = randn(ids.shape[0], made.x.shape[1], dtype=made.x.dtype)
    return made._replace(x=x, top_k_index=ids, top_k_weights=gates)


def run(o: MoeFfn) -> Tensor:
    """By the launches of few tokens, or it fails."""
    return cuda_layer.LAYERS["moe_ffn"](_general, *o)  # type: ignore[no-any-return]


def _general(*args: Any) -> Tensor:
    raise AssertionError("operator by operator")


def check(o: MoeFfn) -> None:
    want = loop(in_float64(o._replace(top_k_weights=o.top_k_weights.nan_to_num(0.0))))
    assert row_error(run(o), want) < TOLERANCE[o.x.dtype]


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("layouts", ["nk nk", "kn kn"])
def test_routings(kind: str, layouts: str) -> None:
    made = layer(264, 136, FfnSpec("silu", "concat", *layouts.split()))
    for tokens, top_k in ((1, 4), (7, 3), (20, 4), (64, 2), (256, 1)):
        ids = make_routing(kind, tokens, top_k, EXPERTS).index
        if kind == "sentinels":
            ids[ids == EXPERTS] = torch.tensor([-1, EXPERTS, 1 << 40], device=DEVICE)[
                torch.arange(int((ids == EXPERTS).sum())) % 3
            ]
        check(routed(made, ids))


EPILOGUES: dict[str, dict[str, Any]] = {
    "concat, bias": {"bias": True},
    "split": {"spec": FfnSpec("gelu", "split", "kn", "nk"), "bias": True},
    "interleaved": {"spec": FfnSpec("swiglu_oai", "interleaved", "kn", "kn", params=(1.702, 7.0)), "bias": True},
    "none": {"spec": FfnSpec("relu2", "none", "nk", "kn")},
    "tanh": {"spec": FfnSpec("tanh", "none"), "bias": True},
    "f16": {"dtype": F16},
}


@pytest.mark.parametrize("name", EPILOGUES)
def test_epilogues(name: str) -> None:
    made = layer(1032, 520, **EPILOGUES[name])
    for tokens in (1, 33):
        check(routed(made, make_routing("random", tokens, 4, EXPERTS).index))


@pytest.mark.parametrize("layouts", ["nk nk", "kn kn"])
@pytest.mark.parametrize(
    "tile",
    [DecodeTile(8, 1, 5), DecodeTile(8, 2, 3), DecodeTile(16, 2, 8), DecodeTile(32, 4, 8), DecodeTile(64, 4, 5)],
    ids=str,
)
def test_tiles(tile: DecodeTile, layouts: str) -> None:
    made = layer(1104, 456, FfnSpec("silu", "concat", *layouts.split()))
    with mock.patch.object(calls, "chosen_tile", return_value=tile):
        for kind in ("random", "all_to_one"):
            check(routed(made, make_routing(kind, 90, 3, EXPERTS).index))


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
    monkeypatch.setattr(decode.family, "choose_summed", lambda _, *sizes: choose_summed(card, *sizes))
    made = layer(*SUMS[shape], bias=bias)
    for kind in ROUTINGS:
        for tokens, top_k in ((1, 4), (3, 12), (9, 4), (20, 2)):
            o = routed(made, make_routing(kind, tokens, top_k, EXPERTS).index)
            check(o)
            first = run(o)
            graph, y = graph_of(partial(run, o))
            for _ in range(5):
                y.fill_(float("nan"))
                graph.replay()
                assert torch.equal(y, first)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_ids(dtype: torch.dtype) -> None:
    ids = make_routing("sentinels", 20, 3, EXPERTS).index
    check(routed(layer(136, 72), ids.to(dtype)))


def test_runs_give_the_same_bits_and_so_do_launches_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    o = routed(layer(2048, 768), make_routing("random", 9, 4, EXPERTS).index)
    first = run(o)
    for _ in range(50):
        assert torch.equal(run(o), first)
    monkeypatch.setattr(family_decode, "_depends", lambda spec: False)
    jit_kernel.get_kernel.cache_clear()
    cuda_choosing.forget_choices()
    assert torch.equal(run(o), first)
    jit_kernel.get_kernel.cache_clear()


def test_a_cuda_graph_of_layers_follows_its_operands() -> None:
    """Each layer reads what the one before wrote, and its workspace may lie where that one's was."""
    first = routed(layer(256, 128), make_routing("random", 5, 3, EXPERTS).index)
    x, ids, gates = first.x, first.top_k_index, first.top_k_weights
    layers = [layer(256, 128)._replace(top_k_index=ids, top_k_weights=gates) for _ in range(6)]

    def step() -> Tensor:
        y = x
        for made in layers:
            y = run(made._replace(x=y))
        return y

    step()
    graph, y = graph_of(step)
    for kind in ("random", "sentinels", "none_routed", "duplicates"):
        x.copy_(randn(5, 256, dtype=BF16))
        ids.copy_(make_routing(kind, 5, 3, EXPERTS).index)
        y.fill_(float("nan"))
        for _ in range(3):
            graph.replay()
        assert torch.equal(y, step())


def test_two_streams() -> None:
    made = layer(512, 256)
    calls_of = [routed(made, make_routing("random", t, 3, EXPERTS).index) for t in (3, 40)]
    want = [run(o) for o in calls_of]
    streams = [torch.cuda.Stream() for _ in calls_of]
    torch.cuda.synchronize()
    found: list[list[Tensor]] = [[], []]
    for _ in range(30):
        for stream, o, each in zip(streams, calls_of, found, strict=True):
            with torch.cuda.stream(stream):
                each.append(run(o))
    torch.cuda.synchronize()
    assert all(torch.equal(y, w) for each, w in zip(found, want, strict=True) for y in each)
