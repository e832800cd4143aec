"""KernelSpec as a value, and the reasons for which a spec is refused."""

import subprocess
import sys
from dataclasses import replace

import pytest
from cutlass_library import DataType, KernelScheduleType, MathOperation
from hypothesis import given
from hypothesis import strategies as st

from hexa_fx.codegen import KernelSpec, SpecError, get_family, validate
from hexa_fx.codegen.family import shared_limit
from hexa_fx.codegen.family_gemm_sm80 import choose_tile, row_bucket
from hexa_fx.errors import KernelError

GEMM = KernelSpec("gemm_sm80", "esmm", 80, bm=128, bn=128, bk=32, stages=4).with_options(warps_m=2, warps_n=2)
COMBINE = KernelSpec("combine", "combine", 80).with_options(weights="f32", top_k=2, threads=64)
ACTIVATE = KernelSpec("activate", "activate", 80, activation="silu").with_options(weights="f32", warps_per_row=1)
REINDEX = KernelSpec("reindex", "reindex_place", 90).with_options(id="int", warps=16, experts=8)


@pytest.mark.parametrize("spec", [GEMM, COMBINE, ACTIVATE, REINDEX])
def test_json_round_trip_keeps_the_spec_its_hash_and_its_key(spec: KernelSpec) -> None:
    again = KernelSpec.from_json(spec.to_json())
    assert (again, hash(again), again.key) == (spec, hash(spec), spec.key)


def test_options_are_sorted_so_that_equal_specs_are_equal() -> None:
    a = KernelSpec("f", "o", 80).with_options(x=1, a=2)
    assert a == KernelSpec("f", "o", 80).with_options(a=2).with_options(x=1)
    assert (a.option("x"), a.option("missing", 7)) == (1, 7)


def test_unknown_fields_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="has no field colour"):
        KernelSpec.from_json('{"family":"f","op":"o","arch":80,"colour":1}')


def test_every_field_changes_the_key() -> None:
    others = [
        replace(GEMM, arch=90),
        replace(GEMM, bias=True),
        replace(GEMM, gather=True),
        replace(GEMM, layout="kn"),
        replace(GEMM, dtype=DataType.f16),
        replace(GEMM, aligned=False),
        replace(GEMM, op="estmm").adding(),
        GEMM.with_options(warps_m=4),
    ]
    assert len({spec.key for spec in (GEMM, *others)}) == len(others) + 1


REFUSALS = [
    (replace(GEMM, stages=8, bk=64), "bytes of shared memory"),
    (replace(GEMM, arch=75), "needs sm_80"),
    (replace(GEMM, op="ess"), "serves esmm, estmm, not ess"),
    (replace(GEMM, bm=256, bn=128), "accumulators a thread"),
    (replace(GEMM, bm=24), "not a multiple of the warps'"),
    (replace(GEMM, bk=48), "BK 48; expected 32 or 64"),
    (replace(GEMM, dtype=DataType.s8), "dtype is s8; expected bf16, f16, f32 or f64"),
    (replace(GEMM, dtype=DataType.f64, bk=8, bm=64, bn=64), "f64 needs option simt"),
    (GEMM.with_options(simt=True), "option simt is for f32 and f64"),
    (replace(GEMM, math=MathOperation.multiply_add_fast_f32), "is for f32"),
    (
        replace(GEMM, schedule=KernelScheduleType.TmaWarpSpecializedPingpong),
        "expected Multistage",
    ),
    (replace(GEMM, activation="softmax"), "activation 'softmax'"),
    (replace(GEMM, activation="swiglu_oai"), "function of gate and up"),
    (replace(GEMM, op="estmm", bias=True), "estmm has no epilogue"),
    (GEMM.with_options(warps_m=3), "warps_m is 3; expected 1, 2, 4 or 8"),
    (GEMM.adding(), "adds to nothing"),
    (replace(GEMM, op="estmm", accumulate=True, out_dtype=DataType.f16), "sums of launches f32"),
    (replace(GEMM, out_dtype=DataType.f32), "results have the operands' type"),
    (COMBINE.with_options(top_k=7), "top_k is 7; expected 0, 1, 2"),
    (COMBINE.with_options(weights="s8"), "weights is s8"),
    (ACTIVATE.with_options(warps_per_row=3), "warps_per_row is 3; expected 1, 2 or 4"),
    (REINDEX.with_options(id="float"), "id is float; expected long long, int"),
    (REINDEX.with_options(experts=5000), "bytes of shared memory"),
]


@pytest.mark.parametrize(("spec", "reason"), REFUSALS, ids=[reason for _, reason in REFUSALS])
def test_a_spec_that_cannot_work_is_refused_with_the_reason(spec: KernelSpec, reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        validate(get_family(spec.family), spec)


def test_all_reasons_are_given_at_once() -> None:
    with pytest.raises(SpecError, match=r"expected Multistage.*activation 'x'"):
        validate(get_family("gemm_sm80"), replace(GEMM, activation="x", schedule=KernelScheduleType.TmaWarpSpecialized))


def test_an_unknown_family_is_refused_with_the_names_of_all() -> None:
    with pytest.raises(KernelError, match=r"no kernel family 'nope'; there are .*combine.*reindex"):
        get_family("nope")


@given(
    op=st.sampled_from(["esmm", "estmm", "esfk"]),
    arch=st.sampled_from([80, 86, 89, 90]),
    dtype=st.sampled_from([DataType.bf16, DataType.f16, DataType.f32, DataType.f64]),
    exact=st.booleans(),
    rows=st.integers(0, 10**6),
    experts=st.integers(1, 512),
    columns=st.integers(1, 20000),
    layout=st.sampled_from(["nk", "kn"]),
)
def test_every_tile_that_the_heuristics_choose_can_be_built(
    op: str, arch: int, dtype: DataType, exact: bool, rows: int, experts: int, columns: int, layout: str
) -> None:
    math = "simt" if dtype == DataType.f64 else "fast_f32" if exact and dtype == DataType.f32 else "tensor"
    tile, family = choose_tile(op, arch, dtype, math, row_bucket(rows, experts), columns), "gemm_sm80"
    if op == "esfk":
        family = "esfk_sm80"
    spec = KernelSpec(
        *(family, op, arch),
        dtype=dtype,
        math=MathOperation.multiply_add_fast_f32 if math == "fast_f32" else MathOperation.multiply_add,
        bm=tile.bm,
        bn=tile.bn,
        bk=tile.bk,
        stages=tile.stages,
        layout=layout,
    ).with_options(warps_m=tile.warps_m, warps_n=tile.warps_n, simt=math == "simt")
    assert validate(get_family(family), spec).shared_bytes <= shared_limit(arch)


def test_tile_height_follows_rows_per_expert_and_no_token_count() -> None:
    heights = [
        choose_tile("esmm", 80, DataType.bf16, "tensor", row_bucket(n, 8), 1024).bm for n in (0, 8, 128, 512, 10**6)
    ]
    assert heights == [16, 16, 16, 64, 128]
    assert {row_bucket(n, 8) for n in range(8 * 65, 8 * 128)} == {7}


def test_the_programs_command_line_stays_its_own():
    """cutlass_library parses sys.argv when it is imported: --help would print its options and end the user's program."""
    code = "import sys; sys.argv = ['train.py', '--help']; import hexa_fx.codegen, hexa_fx.cuda.register; print(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "--help", done.stderr[-500:]
