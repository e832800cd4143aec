"""The cases of tests/ops/test_moe_ffn_sources.py on a device, in 16 bits; nothing is read back while they run."""

import pytest
import torch

from benchmarks.launching import run
from hexa_fx.cuda import packed as cuda_packed
from hexa_fx.formats import FORMATS
from hexa_fx.ir import FfnSpec
from tests.gpu.cases import graph_of, no_waiting
from tests.ops import test_moe_ffn_sources as cases

SIZES = [cases.RAGGED, (64, 48, 16)]
"""Rows that kernels read element by element, and rows of whole vectors: model size, inner size, rank."""
RANKS = [(200, 136, 8), (136, 328, 64), (264, 72, 72)]
"""Ragged sizes of whole vectors, ranks of part of a step of the contraction, of one, and of more than one."""

PACKABLE = (256, 128, 16)
"""Sizes that every format takes."""


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spec", cases.SPECS, ids=str)
@pytest.mark.parametrize("adapted", cases.ADAPTED_PROJECTIONS)
def test_result_and_all_gradients(spec: FfnSpec, adapted: str, dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    cases.compare(cases.layer(spec, adapted, dtype=dtype, tokens=200, device="cuda", sizes=sizes), spec)


@pytest.mark.parametrize("spec", cases.SPECS, ids=str)
@pytest.mark.parametrize("frozen", cases.FROZEN, ids=str)
def test_gradients_with_frozen_bases(spec: FfnSpec, frozen: tuple[str, ...]) -> None:
    cases.compare(cases.layer(spec, dtype=torch.bfloat16, tokens=200, device="cuda", sizes=SIZES[1]), spec, frozen)


@pytest.mark.parametrize("sizes", RANKS, ids=str)
@pytest.mark.parametrize("spec", cases.SPECS, ids=str)
def test_ranks(spec: FfnSpec, sizes: tuple[int, int, int]) -> None:
    frozen = tuple(name for name in cases.NAMES if name[0] == "w")
    for tokens in (200, 1500):
        cases.compare(cases.layer(spec, dtype=torch.bfloat16, tokens=tokens, device="cuda", sizes=sizes), spec, frozen)


@pytest.mark.parametrize("tokens", [30, 400])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("routing", cases.ROUTINGS)
def test_ugly_routings(routing: str, sizes: tuple[int, int, int], tokens: int) -> None:
    spec = cases.SPECS[0]
    given = cases.layer(spec, dtype=torch.bfloat16, tokens=tokens, device="cuda", sizes=sizes)
    cases.compare(cases.route(given, routing), spec)


def test_no_host_synchronisation() -> None:
    spec = cases.SPECS[0]
    given = cases.layer(spec, dtype=torch.bfloat16, tokens=200, device="cuda", sizes=SIZES[1])
    leaves = [
        given[name].requires_grad_() for name in ("x", "top_k_weights", *cases.FACTORS) if given[name] is not None
    ]

    def step() -> None:
        torch.autograd.grad(cases.run(given, spec).sum(), leaves)

    step()
    with no_waiting():
        step()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_unpacked_bits_are_those_of_the_reference(format: str, dtype: torch.dtype) -> None:
    f = FORMATS[format]
    packed, *scales = f.pack_all(torch.randn(3, 320, 1088, device="cuda"))
    for first, end in ((0, 3), (1, 2)):
        parts = [scale[first:end] for scale in scales]
        found = torch.empty(end - first, 320, 1088, dtype=dtype, device="cuda")
        run(cuda_packed.unpack, f, packed[first:end], parts, found)
        assert torch.equal(found, f.dense(packed[first:end], parts, dtype))


@pytest.mark.parametrize("most", [1 << 16, 256 << 20], ids=["groups of experts", "all at once"])
@pytest.mark.parametrize("tokens", [6, 300, 3000])
@pytest.mark.parametrize("spec", cases.SPECS, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_packed_weights(format: str, spec: FfnSpec, tokens: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows, for which kernels unpack weights on the way, and many, for which they are unpacked before."""
    monkeypatch.setattr(cuda_packed, "MOST_BYTES", most)
    for adapted in ("", "123"):
        given = cases.layer(spec, adapted, dtype=torch.bfloat16, tokens=tokens, device="cuda", sizes=PACKABLE)
        cases.compare(cases.pack(given, format), spec, cases.NAMES if adapted else ())


@pytest.mark.parametrize("tokens", [30, 900])
@pytest.mark.parametrize("routing", cases.ROUTINGS)
def test_ugly_routings_of_packed_weights(routing: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_packed, "MOST_BYTES", 1 << 16)
    spec = cases.SPECS[0]
    given = cases.layer(spec, dtype=torch.bfloat16, tokens=tokens, device="cuda", sizes=PACKABLE)
    cases.compare(cases.pack(cases.route(given, routing), "nf4"), spec)


@pytest.mark.parametrize("tokens", [30, 900])
@pytest.mark.parametrize("format", ["nf4", "nf4_double", "mxfp4", "fp8_block"])
def test_packed_weights_without_synchronisation_and_in_a_cuda_graph(
    format: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_packed, "MOST_BYTES", 1 << 16)
    torch.utils.deterministic.fill_uninitialized_memory = False
    spec = cases.SPECS[0]
    given = cases.pack(cases.layer(spec, dtype=torch.bfloat16, tokens=tokens, device="cuda", sizes=PACKABLE), format)
    leaves = [given[name].requires_grad_() for name in ("x", *cases.FACTORS) if given[name] is not None]
    dy = torch.randn_like(given["x"])

    def step() -> list[torch.Tensor]:
        y = cases.run(given, spec)
        return [y, *torch.autograd.grad(y, leaves, dy)]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
        step()
    with no_waiting():
        step()
    graph, captured = graph_of(step)
    with torch.no_grad():
        given["x"].copy_(torch.randn_like(given["x"]))
        given["top_k_index"].copy_(torch.randint_like(given["top_k_index"], 0, cases.E))
    graph.replay()
    torch.cuda.synchronize()
    for got, want in zip(captured, step(), strict=True):
        assert torch.equal(got, want)
