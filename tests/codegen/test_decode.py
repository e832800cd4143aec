"""decode_gemm's and decode_combine's own text, run on the host: a layer of few tokens against float64."""

import ctypes
import shutil
import struct
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from hexa_fx.cli.model_layers import layer_of
from hexa_fx.codegen import render
from hexa_fx.codegen.family import shared_limit
from hexa_fx.codegen.family_decode import (
    DecodeTile,
    DownTile,
    candidates,
    choose_summed,
    choose_tile,
    down_bytes,
    shared_bytes,
    slots_of,
)
from hexa_fx.cuda import calls, decode
from hexa_fx.cuda import choosing as cuda_choosing
from hexa_fx.cuda.choosing import typical_card
from hexa_fx.cuda.kernel_set import kernel_set
from hexa_fx.cuda.kernel_set import launched as launched_by
from hexa_fx.cuda.layer import LAYERS, PROGRAMS
from hexa_fx.errors import InputError
from hexa_fx.ir import FfnSpec
from hexa_fx.jit import BuiltKernel, KernelHandle
from hexa_fx.jit.driver import Driver
from hexa_fx.ops.fixed_order import fixed_order
from hexa_fx.ops.table_layers import MoeFfn
from tests.codegen.emulated import emulated  # noqa: F401
from tests.cuda.cards import HOPPER, any_number_of_rows  # noqa: F401
from tests.gpu.cases import row_error
from tests.jit.test_driver import FakeLibrary
from tests.ops.reference import in_float64, loop, operands

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++"),
    pytest.mark.usefixtures("any_number_of_rows"),
]
BF16, F16 = torch.bfloat16, torch.float16
TOLERANCE = {BF16: 8e-3, F16: 1e-3}
"""a, rows and results are rounded, each once."""
CARD = HOPPER._replace(multiprocessors=3)
IDS = {
    "random": [[0, 3], [3, 4], [4, 0], [1, 3], [3, 0]],
    "all to one": [[2, 2]] * 10,
    "no expert": [[5, 3], [-1, 0], [7, 5]],
    "none": [[5, -1]] * 2,
    "one token": [[4, 1]],
    "many": [[t * 7 % 5, t * t % 6] for t in range(40)],
}


SWIGLU = FfnSpec("silu", "concat")


def layer(
    ids: Tensor,
    spec: FfnSpec = SWIGLU,
    dtype: torch.dtype = BF16,
    hidden: int = 72,
    inner: int = 40,
    bias: bool = False,
    experts: int = 5,
) -> MoeFfn:
    """Operands of moe_ffn."""

    def random(shape: tuple[int, ...], depth: int) -> Tensor:
        return (torch.randn(shape) * depth**-0.5).to(dtype)

    made = operands(spec, random, ids, experts=experts, model_size=hidden, inner=inner, bias=bias)
    return made._replace(top_k_weights=torch.rand(ids.shape))


def error_of(o: MoeFfn, tile: Any = None, launches: list[str] | None = None) -> float:
    """Of the launches on this machine; what nobody writes is NaN, and so are weights of slots without an expert."""
    want = loop(in_float64(o))
    o.top_k_weights[(o.top_k_index < 0) | (o.top_k_index >= o.experts)] = float("nan")
    plan = calls.planned(PROGRAMS["moe_ffn"], [*o], CARD, (lambda key: tile) if tile else calls.chosen())
    assert [kernel.spec.family for kernel in plan.kernels] == (launches or APART)
    plan.load()
    tensors = [t for t in o if isinstance(t, Tensor)]
    return row_error(plan(tensors, [t.data_ptr() for t in tensors], o.x.device), want)


@pytest.fixture(autouse=True)
def poisoned():
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


APART = ["decode_gemm", "decode_gemm", "decode_combine"]
LONG, SHORT = ["decode_gemm", "decode_gemm"], ["decode_gemm", "decode_down"]


OAI = {"params": (1.702, 1.0)}
CASES: dict[str, tuple[dict[str, Any], DecodeTile | None]] = {
    "f16, more steps than stages": ({"dtype": F16, "hidden": 392, "inner": 136}, DecodeTile(8, 1, 3)),
    "split, kn nk": ({"spec": FfnSpec("gelu", "split", "kn", "nk"), "bias": True}, DecodeTile(8, 2, 5)),
    "interleaved, kn kn": (
        {"spec": FfnSpec("swiglu_oai", "interleaved", "kn", "kn", **OAI), "hidden": 136, "inner": 72, "bias": True},
        DecodeTile(16, 2, 4),
    ),
    "none, nk kn": ({"spec": FfnSpec("tanh", "none", "nk", "kn")}, DecodeTile(64, 4, 3)),
}
MORE: dict[str, tuple[dict[str, Any], DecodeTile | None]] = {
    "concat": ({}, None),
    "interleaved, nk kn": ({"spec": FfnSpec("silu", "interleaved", "nk", "kn")}, DecodeTile(8, 4, 2)),
    "concat, kn": (
        {"spec": FfnSpec("silu", "concat", "kn", "kn"), "hidden": 136, "inner": 72, "bias": True},
        DecodeTile(32, 4, 3),
    ),
    "none, kn nk": ({"spec": FfnSpec("relu2", "none", "kn", "nk"), "bias": True}, DecodeTile(16, 8, 3)),
    "wide": ({"hidden": 264, "inner": 136}, DecodeTile(8, 2, 5)),
}


def check(
    case: tuple[dict[str, Any], DecodeTile | None],
    ids_dtype: torch.dtype = torch.int64,
    launches: list[str] | None = None,
) -> None:
    options, tile = case
    for kind, index in IDS.items():
        made = layer(torch.tensor(index).to(ids_dtype), **options)
        error = error_of(made, tile, launches)
        assert error < TOLERANCE[made.x.dtype], (kind, error)


@pytest.mark.parametrize("case", CASES)
def test_a_layer(emulated, case):  # noqa: F811
    check(CASES[case])


def test_each_warp_sorts_many_slots(emulated):  # noqa: F811
    ids = torch.randint(-1, 10, (140, 2))
    ids[:80, 0] = 3
    assert error_of(layer(ids, dtype=F16, experts=9), DecodeTile(8, 1, 3)) < TOLERANCE[F16]


SUMS: dict[str, tuple[dict[str, Any], DecodeTile | DownTile]] = {
    "long lines": ({"hidden": 88, "inner": 520, "bias": True}, DecodeTile(8, 1, 4)),
    "long lines, f16": ({"hidden": 72, "inner": 264, "dtype": F16}, DecodeTile(16, 1, 3)),
    "short lines": ({"hidden": 40, "inner": 200, "bias": True}, DownTile(1, 3)),
    "short lines, f16": ({"hidden": 88, "inner": 40, "dtype": F16}, DownTile(2, 3)),
}


@pytest.mark.parametrize("case", SUMS)
def test_sums(emulated, monkeypatch, case):  # noqa: F811
    """Parts that several warps share, blocks with fewer columns, k that ends inside a stage."""
    options, tile = SUMS[case]
    short = isinstance(tile, DownTile)
    monkeypatch.setattr(decode.family, "choose_summed", lambda *sizes: tile)
    monkeypatch.setattr(calls, "chosen_tile", lambda key: tile if key.tiles.summed else DecodeTile(8, 1, 3))
    check((options, None), launches=SHORT if short else LONG)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE)
def test_more_layers(emulated, case):  # noqa: F811
    check(MORE[case], torch.int32)


def test_a_tile_is_there_for_every_size_and_holds_its_tables():
    for arch, bucket, experts, slots in product((80, 86, 90), range(6), (8, 512), (512, 2048)):
        tile = choose_tile(arch, bucket, experts, slots, True)
        if arch == 90:
            assert tile is not None
        if tile is not None:
            assert shared_bytes(tile, experts, slots) <= shared_limit(arch)
    tile = choose_tile(90, 0, 128, 512, True)
    assert tile is not None
    assert 2 * (shared_bytes(tile, 128, 512) + 1024) <= 228 * 1024  # of two launches at a time


def test_tables_of_small_tiles_hold_all_slots():
    for tile in candidates():
        assert slots_of(tile, 513) == 2048
        assert slots_of(tile, 1) >= 512


def given(**changes: Any) -> list[Any]:
    return [*layer(torch.zeros(3, 2, dtype=torch.int64))._replace(**changes)]


def launched(args: list[Any], card: Any = CARD) -> set[str]:
    return {kernel.spec.family for kernel in calls.planned(PROGRAMS["moe_ffn"], args, card, calls.chosen()).kernels}


FEW = {"decode_gemm", "decode_combine"}


def test_what_takes_this_way(monkeypatch):
    assert launched(given()) == FEW
    w = torch.randn(5, 72, 80).to(BF16)
    assert launched(given(w1=w.transpose(1, 2))) == FEW  # stored as (E, K, N)
    apart = torch.randn(3, 144).to(BF16)[:, :72]
    assert launched(given(x=apart)) == FEW
    others = {
        "an older card": given(),
        "float32": given(**{n: t.float() for n, t in zip(("x", "w1", "w2"), (given()[0], given()[3], given()[7]))}),
        "many tokens": given(
            x=torch.randn(257, 72).to(BF16), top_k_index=torch.zeros(257, 2, dtype=torch.int64), top_k_weights=None
        ),
        "rows at odd addresses": given(x=torch.randn(3, 73).to(BF16)[:, 1:]),
        "odd widths": given(w1=torch.randn(5, 84, 72).to(BF16), w2=torch.randn(5, 72, 42).to(BF16)),
    }
    for reason, args in others.items():
        card = CARD._replace(family_arch=80) if reason == "an older card" else CARD
        assert not launched(args, card) & FEW, reason
    with fixed_order():
        assert not launched(given()) & FEW
    monkeypatch.setenv("HEXA_FX_FEW_TOKENS", "0")
    cuda_choosing.forget_choices()
    assert not launched(given()) & FEW


def test_the_set_of_kernels_has_those_of_every_number_of_tokens():
    card = typical_card(90)
    small = layer_of(FfnSpec("silu", "concat"), experts=16, top_k=4, hidden=64, inner=64)
    found = set(kernel_set(small, card, training=False, most=700))
    every = set.union(*(set(launched_by(small, card, tokens, training=False)) for tokens in range(1, 700)))
    assert found == every
    assert sum(spec.family == "decode_gemm" for spec in found) == 2 * 4
    for spec in found:
        render(spec)
    (combine,) = (spec for spec in found if spec.family == "decode_combine")
    assert render(combine).launch.dependent
    gemms = [render(spec) for spec in found if spec.family == "decode_gemm"]
    assert all(source.launch.dependent != source.spec.option("first") for source in gemms)


@pytest.mark.parametrize("name", ["NVIDIA H100", "NVIDIA H200"])
@pytest.mark.parametrize(("hidden", "inner", "second"), [(2048, 768, "decode_down"), (4096, 14336, "decode_gemm")])
def test_second_products_that_sum_by_the_length_of_lines(monkeypatch, hidden, inner, second, name):
    monkeypatch.undo()
    cuda_choosing.forget_choices()
    card = typical_card(90)._replace(name=name)
    experts, top_k = (128, 8) if hidden == 2048 else (8, 2)
    made = layer_of(FfnSpec("silu", "concat"), experts=experts, top_k=top_k, hidden=hidden, inner=inner)
    assert [spec.family for spec in launched_by(made, card, 1, training=False)] == ["decode_gemm", second]
    found = set(kernel_set(made, card, training=False, most=300))
    for tokens in (1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257):
        specs = launched_by(made, card, tokens, training=False)
        assert set(specs) <= found
        few = tokens <= (64 if hidden == 2048 else 16 if "H200" in name else 8)
        assert (specs[-1].family == second) == few
    for spec in found:
        source = render(spec)
        assert source.launch.shared_bytes <= shared_limit(90)


def test_a_summing_block_has_room_beside_one_of_the_first_product():
    for slots, columns, k in ((8, 16, 768), (64, 16, 768), (16, 32, 14336)):
        tile, first = choose_summed("", 90, 0, 128, slots, columns, k), choose_tile(90, 0, 128, slots, True)
        assert tile is not None
        assert first is not None
        short = isinstance(tile, DownTile)
        size = down_bytes(tile, 128, slots) if short else shared_bytes(tile, 128, slots, summed=True)
        assert size + shared_bytes(first, 128, slots) + 2 * 1024 <= 228 * 1024


def test_launches_that_begin_early_say_so_to_the_driver(tmp_path):
    small = layer_of(FfnSpec("silu", "concat"), experts=16, top_k=4, hidden=64, inner=64)
    for number, spec in enumerate(launched_by(small, typical_card(90), 1, training=False)):
        library = FakeLibrary()
        handle = KernelHandle(render(spec), BuiltKernel("k", tmp_path, b"cubin"), Driver(library))
        *_, attributes, count = struct.unpack("7IPPI0P", handle.config((1, 1, 1), 0))
        assert count == (number > 0)
        if count:  # CUlaunchAttribute: programmatic stream serialization is on
            assert struct.unpack("I4xi60x", ctypes.string_at(attributes, 72)) == (6, 1)
        library.calls.clear()
        handle.blocks_per_sm(0)
        asked = [args[:2] for args in library.named("cuKernelSetAttribute")]
        assert (9, 100) in asked  # all of them split a multiprocessor's memory alike


def test_the_first_call_is_checked_and_gives_the_bits_of_the_second(emulated, monkeypatch):  # noqa: F811
    monkeypatch.setattr(cuda_choosing, "device_card", lambda device: CARD)
    cuda_choosing.forget_choices()
    args = given()

    def general(*args: Any) -> Any:
        raise AssertionError("operator by operator")

    first = LAYERS["moe_ffn"](general, *args)
    assert torch.equal(LAYERS["moe_ffn"](general, *args), first)
    with pytest.raises(InputError, match="top_k_index"):
        LAYERS["moe_ffn"](general, *given(top_k_index=torch.zeros(4, 2, dtype=torch.int64)))
