"""`hexa::moe_ffn_fp8` on a device: the cases of tests/ops/test_moe_ffn_fp8.py in 16 bits, and steps as CUDA graphs."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from hexa_fx.ir import FfnSpec
from hexa_fx.ops import fp8_weights, moe_ffn_fp8
from hexa_fx.ops.table_fp8 import MoeFfnFp8
from tests.gpu.cases import graph_of
from tests.ops import test_moe_ffn_fp8 as cases

SIZES = [(136, 72), (256, 128), (512, 384)]
Given = dict[str, Tensor | None]


@pytest.fixture(autouse=True)
def on_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Skips where the layer would run in 16 bits. Few tokens run in FP8, too."""
    monkeypatch.setitem(moe_ffn_fp8.is_few_on, "cuda", lambda o, captured: False)
    given = on_cuda(cases.layer(cases.SPECS[0], dtype=torch.bfloat16))
    arguments = MoeFfnFp8(*(given[name] for name in cases.OPERANDS), *cases.static(cases.SPECS[0]), True)  # type: ignore[arg-type]
    if reason := moe_ffn_fp8.why_not(arguments):
        pytest.skip(reason)
    yield
    fp8_weights.clear()


def on_cuda(given: Given) -> Given:
    return {name: t if t is None else t.to("cuda") for name, t in given.items()}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("spec", cases.SPECS, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_result_and_gradients(spec: FfnSpec, bias: bool, sizes: tuple[int, int]) -> None:
    given = cases.layer(spec, bias, torch.bfloat16, tokens=600, sizes=sizes)
    cases.compare(on_cuda(given), spec, 0.996)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    cases.compare(on_cuda(cases.layer(cases.SPECS[0], dtype=dtype, tokens=600, sizes=SIZES[1])), cases.SPECS[0])


@pytest.mark.parametrize("routing", cases.ROUTINGS)
def test_ugly_routings(routing: str) -> None:
    given = cases.route(cases.layer(cases.SPECS[0], dtype=torch.bfloat16, tokens=600, sizes=SIZES[1]), routing)
    cases.compare(on_cuda(given), cases.SPECS[0], 0.99 if routing == "one token" else 0.996)


def test_gradients_go_to_main_grad() -> None:
    cases.check_main_grad(on_cuda(cases.layer(cases.SPECS[0], sizes=SIZES[1])), cases.SPECS[0])


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The graph of a call, after one outside it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    return graph_of(run)[0]


@pytest.mark.parametrize("training", [True, False])
def test_a_graph_computes_with_the_weights_of_its_replay(training: bool) -> None:
    """Of a training step as it is; for inference after a call outside the graph."""
    given = on_cuda(cases.layer(cases.SPECS[0], dtype=torch.bfloat16, tokens=600, sizes=SIZES[1]))
    weight = given["w2"]
    assert weight is not None
    weight.requires_grad_(training)
    made: dict[str, Tensor] = {}

    def call() -> None:
        made["y"] = cases.fp8(given, cases.SPECS[0])
        if training:
            (made["grad"],) = torch.autograd.grad(made["y"].sum(), weight)

    with torch.set_grad_enabled(training):
        graph = captured(call)
        graph.replay()
        in_graph = dict(made)
        before = made["y"].clone()
        with torch.no_grad():
            weight.mul_(2)
        if not training:
            call()
        graph.replay()
        after = in_graph["y"].clone()
        call()
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, made["y"])
