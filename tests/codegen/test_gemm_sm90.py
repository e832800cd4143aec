"""The Hopper family's specs: what fits is rendered, what does not is refused with the reason."""

from dataclasses import replace

import pytest
from cutlass_library import DataType, KernelScheduleType

from hexa_fx.codegen.family import get_family, shared_limit, validate
from hexa_fx.codegen.family_block_sm90 import block_shape
from hexa_fx.codegen.family_gemm_sm90 import (
    ABOUT,
    CHUNK_BYTES,
    CLUSTER_DEPTH,
    CLUSTER_ROWS,
    COOPERATIVE,
    FEW_ROWS,
    NARROW_CANDIDATES,
    NARROW_OPS,
    ROW_OPS,
    STREAMED,
    STREAMED_ROWS,
    SWAPPED,
    WHOLE,
    TileSm90,
    adds_in_staging,
    choose_tile,
    gemm_shape,
    swaps,
)
from hexa_fx.codegen.render import render
from hexa_fx.codegen.spec import KernelSpec, SpecError

OPS = ("esmm", "esmm_act", "esmm_act_backward", "estmm", "esfk")


def spec_of(op: str, rows: int = 131072, experts: int = 128, gather: bool = True, **more: object) -> KernelSpec:
    tile = choose_tile(op, rows, experts, 768)
    spec = KernelSpec(
        family="gather_gemm_sm90", op=op, arch=90, bm=tile.bm, bn=tile.bn, bk=64, stages=tile.stages,
        schedule=tile.kernel_schedule, gather=gather, glu="concat" if "act" in op else "none",
        activation="silu" if "act" in op else "none",
    )  # fmt: skip
    return replace(spec, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("rows", [128 * FEW_ROWS, 131072])
def test_chosen_tiles_fit(op: str, gather: bool, rows: int, cluster: int) -> None:
    spec = spec_of(op, rows, gather=gather).with_options(cluster=cluster)
    shape = validate(get_family(spec.family), spec)
    assert shape.shared_bytes <= shared_limit(90)
    assert shape.cluster == cluster
    assert ("__cluster_dims__" in render(spec).text) == (cluster == 2)


@pytest.mark.parametrize("experts", [8, 256, 1024])
@pytest.mark.parametrize("op", ["esmm", "esmm_act"])
def test_a_product_of_few_rows_streams_by_swapped_tiles_where_there_are(op: str, experts: int) -> None:
    glu = "concat" if op == "esmm_act" else "none"
    assert swaps(op, glu, "nk")
    most = STREAMED_ROWS[op] * experts
    tile = choose_tile(op, most, experts, 768, swapped=True)
    assert tile == STREAMED
    assert choose_tile(op, most, experts, 768, swapped=True, card="NVIDIA H200") == replace(STREAMED, once=True)
    spec = replace(spec_of(op), bm=tile.bm, bn=tile.bn, stages=tile.stages)
    validate(get_family(spec.family), spec.with_options(swapped=True, experts=experts))
    assert choose_tile(op, most + 1, experts, 768, swapped=True) != STREAMED
    assert not any(swaps("esmm_act", *stored) for stored in (("interleaved", "nk"), ("split", "nk"), ("concat", "kn")))


@pytest.mark.parametrize("about", WHOLE)
@pytest.mark.parametrize("experts", [8, 256])
def test_experts_of_a_few_rows_more_than_a_tile_has_are_one_swapped_tile(about: int, experts: int) -> None:
    def chosen(rows: int, op: str = "esmm") -> TileSm90:
        return choose_tile(op, rows * experts, experts, 768, swapped=True)

    tile = WHOLE[about]
    assert tile.bm > about + ABOUT
    assert chosen(about - ABOUT + 1) == chosen(about) == chosen(about + ABOUT) == tile
    assert tile not in (chosen(about - ABOUT), chosen(about + ABOUT + 1), chosen(about, "esmm_act"))
    spec = replace(spec_of("esmm", gather=False), bm=tile.bm, bn=tile.bn, stages=tile.stages)
    assert validate(get_family(spec.family), spec.with_options(swapped=True, experts=experts))


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("op", NARROW_OPS)
def test_tiles_for_narrow_products_fit(op: str, gather: bool) -> None:
    for tile in NARROW_CANDIDATES:
        spec = spec_of(op, gather=gather, bn=tile.bn, stages=tile.stages)
        assert render(spec).launch.shared_bytes <= shared_limit(90)


def test_tiles_share_operands_where_that_is_faster() -> None:
    def chosen(op: str, mean: int, **more: bool | int) -> TileSm90:
        return choose_tile(op, mean * 128, 128, 768, **more)  # type: ignore[arg-type]

    alone, paired = COOPERATIVE, replace(COOPERATIVE, cluster=2)
    assert chosen("esmm", 512, depth=CLUSTER_DEPTH) == chosen("estmm", 512) == chosen("esmm_act", 512) == paired
    assert chosen("esmm", 512, depth=CLUSTER_DEPTH - 1) == chosen("estmm", 512, turned=True) == alone
    assert chosen("esfk", 512) == replace(paired, split=True)
    assert {chosen(op, CLUSTER_ROWS, depth=4096) for op in OPS} == {alone}


@pytest.mark.parametrize(("experts", "chunks"), [(256, 2), (1024, 1)])
def test_results_leave_through_as_many_chunks_as_there_is_room_for(experts: int, chunks: int) -> None:
    spec = spec_of("esmm").with_options(experts=experts)
    assert gemm_shape(spec).staging_bytes == chunks * CHUNK_BYTES
    assert render(spec).launch.shared_bytes <= shared_limit(90)


@pytest.mark.parametrize("op", ROW_OPS)
def test_a_row_product_that_adds_a_second_one_is_another_kernel_of_the_same_size(op: str) -> None:
    spec = spec_of(op)
    adding = render(spec.with_options(low_rank=1))
    assert "LowRank = 1" in adding.text
    assert "LowRank" not in render(spec).text
    assert adding.launch == render(spec).launch


@pytest.mark.parametrize(
    ("op", "options", "beside"),
    [
        *(("esmm", {"low_rank": 1}, True), ("esmm_act", {"low_rank": 1, "cluster": 2}, True)),
        *(("esmm", {"low_rank": 2}, False), ("esmm_act_backward", {"low_rank": 1}, False)),
        *(("esmm", {"low_rank": 1, "swapped": True}, False), ("esmm", {"low_rank": 1, "experts": 1024}, False)),
    ],
    ids=["plain", "activation", "wide", "h lies there", "swapped", "one chunk a warp"],
)
def test_a_second_product_of_a_few_columns_takes_no_stage_where_there_is_room(
    op: str, options: dict[str, object], beside: bool
) -> None:
    spec = spec_of(op, **({"bn": 128} if "swapped" in options else {})).with_options(**options)
    assert gemm_shape(spec).added_in_staging == adds_in_staging(spec) == beside
    assert ("AddedInStaging = true" in render(spec).text) == beside


@pytest.mark.parametrize("op", ["esmm", "estmm"])
@pytest.mark.parametrize("experts", [128, 1024])
def test_narrow_products_have_more_stages(op: str, experts: int) -> None:
    tile = choose_tile(op, 131072, experts, 16)
    assert tile.stages > choose_tile(op, 131072, experts, 768).stages
    spec = spec_of(op, bn=tile.bn, stages=tile.stages).with_options(experts=1024)
    assert render(spec).launch.shared_bytes <= shared_limit(90)


def swapped(op: str, **more: object) -> KernelSpec:
    spec = spec_of(op, bm=SWAPPED.bm, bn=SWAPPED.bn, stages=SWAPPED.stages, **more)
    return spec.with_options(swapped=True)


def test_a_swapped_kernel_has_a_main_loop_for_each_width() -> None:
    spec = swapped("esmm_act")
    shape, source = gemm_shape(spec), render(spec)
    assert shape.widths[-1] == SWAPPED.bm
    assert set(range(144, 257, 16)) < set(shape.wgmma_columns)
    assert max(shape.wgmma_columns) == 256
    assert all(f"Wgmma<{columns}>" in source.text for columns in shape.wgmma_columns)
    assert "Wgmma" not in render(spec_of("esmm_act")).text
    assert source.launch.shared_bytes <= shared_limit(90)


@pytest.mark.parametrize("op", ["estmm", "esfk"])
def test_a_kernel_that_adds_is_another_kernel_of_the_same_size(op: str) -> None:
    spec = spec_of(op)
    adding = render(spec.adding())
    assert "AddGrad = true" in adding.text
    assert "AddGrad" not in render(spec).text
    assert adding.launch == render(spec).launch
    assert adding.key != render(spec).key


def block_spec(op: str = "esmm", **more: object) -> KernelSpec:
    wide = {"esmm_act": None}.get(op, DataType.bf16)
    spec = KernelSpec(
        "block_gemm_sm90", op, 90, dtype=DataType.e4m3, out_dtype=wide, bm=128, bn=256, bk=128, stages=4,
        glu="concat" if op == "esmm_act" else "none", activation="silu" if op == "esmm_act" else "none",
    )  # fmt: skip
    return replace(spec, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("op", ["esmm", "esmm_act", "estmm"])
@pytest.mark.parametrize("experts", [256, 1024])
def test_products_of_fp8_blocks_fit(op: str, experts: int) -> None:
    source = render(block_spec(op).with_options(experts=experts))
    assert source.target == "sm_90a"
    assert source.launch.shared_bytes <= shared_limit(90)


PINGPONG = KernelScheduleType.TmaWarpSpecializedPingpong
REFUSED = [
    (spec_of("esmm", dtype=DataType.f32), "dtype is f32; expected bf16 or f16"),
    (spec_of("esmm", aligned=False), "aligned is False; expected True"),
    (spec_of("esmm", arch=80), "sm_90"),
    (spec_of("esmm", stages=5), "shared memory"),
    (spec_of("esmm", bn=192), "expected 64 or 128 x 64, 128 or 256"),
    (spec_of("esmm", bn=64).with_options(cluster=2), "plain narrow products"),
    (spec_of("esmm_act", bn=64), "plain narrow products"),
    (spec_of("esmm", bm=64), "cooperative tile has 128 rows"),
    (spec_of("esmm", schedule=KernelScheduleType.Multistage), "schedule is Multistage"),
    (spec_of("esmm").adding(), "adds to nothing"),
    (spec_of("estmm").adding(DataType.f16), "bf16 -> f16"),
    (spec_of("estmm", out_dtype=DataType.f32), "bf16 -> f32"),
    *((spec_of(op, bn=128, schedule=PINGPONG), "no ping-pong") for op in ("estmm", "esfk")),
    *((spec_of(op).with_options(low_rank=1), "has no second product") for op in ("estmm", "esfk")),
    (swapped("estmm"), "no swapped tile"),
    (swapped("esmm_act_backward"), "no swapped tile"),
    (replace(swapped("esmm_act"), glu="interleaved"), "interleaved gate and up"),
    (replace(swapped("esmm_act"), glu="split"), "split gate and up"),
    (replace(swapped("esmm_act"), layout="kn"), "an .E, K, N. weight"),
    (replace(swapped("esmm"), bm=352), "expected 32 to 320"),
    (swapped("esmm").with_options(cluster=2), "not gathered ones"),
    (replace(swapped("esmm"), bn=256), "expected 32 to 320"),
    (replace(swapped("esmm"), schedule=PINGPONG), "no ping-pong"),
    (block_spec(dtype=DataType.bf16), "dtype is bf16; expected e4m3"),
    (block_spec(out_dtype=None), "all else does not"),
    (block_spec(bn=128), "bn is 128; expected 256"),
    (block_spec(accumulate=True), "adds to nothing"),
    (block_spec("estmm", gather=True), "turned round already"),
    (block_spec("esmm_act", glu="split"), "glu is split; expected none or concat"),
    (block_spec("esmm_act", activation="odd"), "activation 'odd'"),
    (block_spec(aligned=False), "aligned is False"),
]


@pytest.mark.parametrize(("spec", "reason"), REFUSED, ids=[f"{spec.op}, {reason}" for spec, reason in REFUSED])
def test_refusals(spec: KernelSpec, reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        render(spec)


@pytest.mark.parametrize(("stages", "chunks"), [(3, 4), (4, 1)])
def test_results_of_fp8_blocks_wait_for_the_copy_engine_where_there_is_room(stages: int, chunks: int) -> None:
    spec = block_spec("estmm", stages=stages)
    assert block_shape(spec).staging_bytes == chunks * CHUNK_BYTES
    assert render(spec).launch.shared_bytes <= shared_limit(90)
