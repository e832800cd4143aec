"""Planning without processes: allocation, cost model, plans as values, over how many devices to split experts."""

import dataclasses
import itertools
import json
import math
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexa_fx.allocation import Affine, DeviceCosts, Measured, allocate, even
from hexa_fx.errors import PlanError
from hexa_fx.passes.partition.plan_layers import (
    PartitionConfig,
    batch_shares,
    data_centric_bytes,
    layer_cost,
    model_centric_bytes,
    plan_layers,
)
from hexa_fx.passes.partition.reach import Cluster, best, reaches
from hexa_fx.plan import ExpertShape, LayerPlan, Plan

SHAPE = ExpertShape(num_experts=8, hidden_size=64, intermediate_size=256, matrices=3, top_k=2)
CROSSOVER = 3 * (3 * 8 * 256) // 4
"""Tokens at which both modes move the same bytes, if routing is left out and dtypes are equal: 3/4 n E H."""


def slowest(seconds, shares, step=1):
    return max(t * step * math.ceil(x / step) for t, x in zip(seconds, shares))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.floats(0.5, 5.0), min_size=1, max_size=4),
    st.integers(0, 12),
    st.sampled_from([1, 2, 16]),
    st.sampled_from([1, 2, 3, 24]),
    st.data(),
)
def test_allocation_is_optimal(seconds, units, tile, step, data):
    caps = data.draw(st.lists(st.integers(0, 12), min_size=len(seconds), max_size=len(seconds)))
    splits = [
        split for split in itertools.product(*(range(min(cap, units) + 1) for cap in caps)) if sum(split) == units
    ]
    if not splits:
        with pytest.raises(PlanError, match="cannot hold"):
            allocate(seconds, units * tile, tile=tile, step=step, caps=[cap * tile for cap in caps])
        return
    shares = allocate(seconds, units * tile, tile=tile, step=step, caps=[cap * tile for cap in caps])
    assert sum(shares) == units * tile
    assert all(share % tile == 0 and share <= cap * tile for share, cap in zip(shares, caps))
    best = min(slowest(seconds, [x * tile for x in split], step) for split in splits)
    assert slowest(seconds, shares, step) <= best * (1 + 1e-9)


def test_allocation_of_unequal_devices():
    # largest remainder gives (256, 256, 128, 128), a third slower
    assert allocate([1, 1, 2, 4], 768, tile=128) == (384, 256, 128, 0)
    assert allocate([4.58, 3.06], 64, tile=8) == (24, 40)
    assert allocate([1.0, 1.0], 100, tile=64) == (64, 36)
    assert even(10, 4) == (3, 3, 2, 2)
    assert allocate([1, 1], 10, fixed=[4, 0]) == (3, 7)
    assert allocate([1, 1, 9], 10, least=1) == (5, 4, 1)


def test_measured_devices_all_get_a_sample():
    slow = Affine((0.0, 50.0), (1.0, 1.0))
    given, measured = (DeviceCosts((1.0, 50.0), slow, slow, measured) for measured in (False, True))
    for tokens in (None, 8):  # of 4 samples
        assert [batch_shares(costs, 4, tokens) for costs in (given, measured)] == [(4, 0), (3, 1)]
        assert batch_shares(measured, 1, tokens) == (1, 0)


def test_begun_steps_count_as_whole_ones():
    # the costs of two devices as measured for Swin: 704 channels take as long as 768
    lines = Affine((1.2353e-3, 1.2e-3), (2.82e-6, 5.6e-6))
    assert lines.split(2048, tile=64) == (1344, 704)
    assert lines.split(2048, tile=64, step=256) == (1280, 768)
    # where a step more or less is the same, shares stay as even as tiles let them
    assert allocate([1] * 4, 768, tile=64, step=128) == (192, 192, 192, 192)
    assert allocate([1] * 8, 768, tile=64, step=128) == allocate([1] * 8, 768, tile=64)
    config = PartitionConfig(tile=64, kernel_columns=256)
    for matrices, shards in ((2, (1280, 768)), (3, (1408, 640))):  # a gated expert has two columns a channel
        wide = dataclasses.replace(SHAPE, intermediate_size=2048, matrices=matrices)
        (layer,) = plan_layers({"moe": wide}, DeviceCosts((1.0, 2.0), lines, lines), "model", config).layers
        assert layer.shards == shards
    with pytest.raises(PlanError, match="0 at a time"):
        allocate([1], 1, step=0)


def test_every_rank_gets_channels_where_that_is_asked_for():
    seconds, config = (1.0, 1000.0), PartitionConfig(tile=64, kernel_columns=256)
    assert allocate(seconds, 100, tile=8, least=8) == (92, 8)
    for mode, caps, least, shards in (
        ("model", None, 0, (256, 0)),
        ("model", None, 1, (192, 64)),
        ("model", None, 1000, (128, 128)),
        ("data", (0, 10**9), 0, (0, 256)),
        ("data", None, 1, (128, 128)),
    ):
        given = dataclasses.replace(config, least_channels=least, memory_caps=caps)
        (layer,) = plan_layers({"moe": SHAPE}, seconds, mode, given).layers
        assert layer.shards == shards
    assert plan_layers({"moe": SHAPE}, seconds, "model", config).layers[0].idle == (1,)
    narrow = dataclasses.replace(SHAPE, intermediate_size=1)  # fewer channels than ranks
    assert plan_layers({"moe": narrow}, seconds, "model", dataclasses.replace(config, least_channels=1)).layers[
        0
    ].shards == (1, 0)
    with pytest.raises(PlanError, match="less than the 1 units that every one gets"):
        plan_layers(
            {"moe": SHAPE}, seconds, "data", dataclasses.replace(config, least_channels=1, memory_caps=(0, 10**9))
        )


def test_lines_through_two_sizes():
    lines = Affine.through((100, [1.5, 3.0, 2.0]), (400, [3.0, 12.0, 1.9]), scale=2.0)
    # rank 0 has a fixed second; rank 1 has none; rank 2 grows with nothing, so half of its time counts as fixed
    assert lines.fixed == pytest.approx((2.0, 0.0, 1.9))
    assert lines.each == pytest.approx((0.005, 0.03, 0.5 * 1.9 / 400))


def test_shares_with_fixed_costs():
    costs = DeviceCosts((1.0, 1.0), Affine((0.0, 4e-3), (1e-5, 1e-5)), Affine((0.0, 0.1), (1e-3, 1e-3)))
    config = PartitionConfig(batch=10, tokens=1000, static_tokens=True, tile=4)
    plan = plan_layers({"a": SHAPE, "b": SHAPE}, costs, {"a": "model", "b": "data"}, config)
    assert plan.batch == (7, 3)  # 7 ms and 4 + 3 ms
    assert plan.tokens == (700, 300)
    assert plan.layers[0].shards == (180, 76)  # 180 ms and 100 + 76
    assert plan.layers[1].shards == (128, 128)
    assert plan.capacities == (1.0, 1.0)
    assert plan_layers({"a": SHAPE}, costs, "data", PartitionConfig(batch=10)).batch == (5, 5)  # tokens unknown


@pytest.mark.parametrize("seconds", [[], [0.0, 1.0], [-1.0], [float("inf")], [float("nan")]])
def test_allocation_refuses(seconds):
    with pytest.raises(PlanError):
        allocate(seconds, 8)


def plan(**changes) -> Plan:
    layers = (LayerPlan("a", "model_centric", SHAPE, (128, 128)), LayerPlan("b", "data_centric", SHAPE, (200, 56)))
    return Plan(**{"world": 2, "layers": layers, "batch": (3, 1), "capacities": (1.0, 3.0), **changes})


def test_plan_survives_json():
    made = plan_layers({"x": SHAPE, "y": SHAPE}, [1.0, 2.5], "auto", PartitionConfig(batch=9, tokens=900, tile=16))
    assert Plan.from_json(made.to_json()) == made
    assert Plan.from_json(json.dumps(json.loads(made.to_json()))).fingerprint == made.fingerprint
    assert made.layers[0].cost is not None
    assert re.search(r"\n  x and 1 more: \w+-centric \(.* travel", made.describe())


def test_every_field_changes_the_fingerprint():
    base = plan()
    changes = {
        "batch": (2, 2),
        "tokens": (4, 4),
        "slots": 2,
        "prefetch": False,
        "data_parallel": "mean",
        "capacities": (1.0, 1.0),
    }
    prints = {dataclasses.replace(base, **{k: v}).fingerprint for k, v in changes.items()}
    layer = dataclasses.replace(base.layers[0], shards=(120, 136))
    prints.add(dataclasses.replace(base, layers=(layer, base.layers[1])).fingerprint)
    prints.add(base.fingerprint)
    assert len(prints) == len(changes) + 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"batch": (1, 2, 3)}, "3 entries"),
        ({"batch": (5, -1)}, "negative"),
        ({"slots": 3}, "1 or 2 slots"),
        ({"data_parallel": "average"}, "'sum' or 'mean'"),
        ({"world": 0}, "at least one"),
        ({"layers": (LayerPlan("a", "model_centric", SHAPE, (128, 100)),)}, "sum to 228"),
        ({"layers": (LayerPlan("a", "expert", SHAPE, (128, 128)),)}, "neither"),
        ({"layers": (LayerPlan("a", "model_centric", SHAPE, (128, 128)),) * 2}, "repeat"),
        ({"layers": (LayerPlan("a", "model_centric", SHAPE, (128, 128), bias_owner=2),)}, "no rank"),
        ({"grad_dtype": "half"}, "grad_dtype"),
    ],
)
def test_impossible_plans_are_refused(change, says):
    with pytest.raises(PlanError, match=says):
        plan(**change)


def test_other_versions_are_refused():
    text = plan().to_json()
    with pytest.raises(PlanError, match="version"):
        Plan.from_json(text.replace('"version": 2', '"version": 1'))
    with pytest.raises(PlanError, match="no fields"):
        Plan.from_json(text.replace('"world"', '"worlds"', 1))


def test_crossover_is_where_bytes_are_equal():
    silent = dataclasses.replace(SHAPE, top_k=0)
    by_model = model_centric_bytes(silent, CROSSOVER, 4, dtype_bytes=2)
    assert by_model == data_centric_bytes(silent, 4, gather_bytes=2, reduce_bytes=2)


def test_auto_follows_bytes_and_hidden_time():
    few, many = 64, 64 * CROSSOVER
    sizes = {"dtype_bytes": 2, "reduce_bytes": 2, "slots": 2}
    assert layer_cost(SHAPE, few, 4, **sizes)[0] == "model_centric"
    assert layer_cost(SHAPE, many, 4, **sizes)[0] == "data_centric"
    # The same few tokens, but compute long enough to hide every gather.
    mode, cost = layer_cost(SHAPE, CROSSOVER // 4, 4, **sizes, measured=Measured(1e9, 0.0, attention=1.0, expert=1.0))
    assert cost.seconds_data_centric == 0.0
    assert "1 GB/s" in cost.reason
    assert mode == "data_centric"
    # ... but hidden communication slows compute down by as much as it takes
    busy = Measured(1e9, 0.0, attention=1.0, expert=1.0, contention=1.0)
    mode, cost = layer_cost(SHAPE, CROSSOVER // 4, 4, **sizes, measured=busy)
    assert cost.seconds_data_centric == pytest.approx(3 * 0.75 * SHAPE.weight_numel * 2 / 1e9)
    assert mode == "model_centric"
    # nothing to hide behind: everything is exposed, once
    bare = layer_cost(SHAPE, 64, 4, **sizes, measured=Measured(1e9, contention=1.0))[1]
    assert bare.seconds_data_centric == pytest.approx(3 * 0.75 * SHAPE.weight_numel * 2 / 1e9)
    slow_rows = Measured(1e9, 0.0, 1.0, 1.0, experts_model_centric=0.02, experts_data_centric=0.01)
    mode, cost = layer_cost(SHAPE, CROSSOVER // 4, 4, **sizes, measured=slow_rows)
    assert mode == "data_centric"
    assert cost.seconds_model_centric is not None
    assert cost.seconds_model_centric > 0
    # collectives that were measured count as measured, whatever their bytes
    started = Measured(1e9, 0.0, 1.0, 1.0, 0.01, 0.02, exchange=0.005)
    mode, cost = layer_cost(SHAPE, CROSSOVER // 4, 4, **sizes, measured=started)
    assert (mode, cost.seconds_model_centric) == ("model_centric", pytest.approx(0.015))
    assert "exchange model-centric 5 ms" in cost.reason


def test_auto_weighs_fsdp2_where_it_was_measured():
    sizes = {"dtype_bytes": 2, "reduce_bytes": 2, "slots": 1}
    measured = Measured(1e9, 0.0, 1e-4, 1e-3, 0.1, 0.02, experts_fsdp=0.019)
    mode, cost = layer_cost(SHAPE, CROSSOVER, 4, **sizes, measured=measured)
    assert (mode, "FSDP2 19 ms" in cost.reason) == ("fsdp", True)
    # it gathers one layer ahead, as two slots do
    assert cost.seconds_data_centric - cost.seconds_fsdp > 0.001
    assert layer_cost(SHAPE, CROSSOVER, 4, **sizes, measured=measured.without_fsdp())[0] == "data_centric"
    config = PartitionConfig(tokens=CROSSOVER, memory_caps=(10**9, 64 * SHAPE.weight_numel // 256 * 16))
    (capped,) = plan_layers({"a": SHAPE}, [1.0, 1.0], "auto", config, measured).layers
    assert (capped.mode, capped.shards) == ("data_centric", (192, 64))
    with pytest.raises(PlanError, match="more than memory_caps allow: use 'data'"):
        plan_layers({"a": SHAPE}, [1.0, 1.0], "fsdp", config)
    made = plan_layers({"a": SHAPE}, [1.0, 1.0], "auto", PartitionConfig(tokens=CROSSOVER), measured)
    assert Plan.from_json(made.to_json()) == made
    assert "a: fsdp, every parameter in equal parts" in made.describe()
    assert re.search(
        r"exchange: model-centric \S+ ms, data-centric \S+ ms, fsdp \S+ ms\n +chosen: less", made.describe()
    )


def test_a_host_that_is_the_limit_is_said_with_what_helps():
    sizes = {"dtype_bytes": 2, "reduce_bytes": 2, "slots": 1}
    for host, limit in ((0.004, False), (0.014, True)):
        measured = Measured(
            1e9, 0.0, 0.01, 0.01, 0.01, 0.02, exchange=0.005, host={"model_centric": host, "data_centric": 1.0}
        )
        mode, cost = layer_cost(SHAPE, CROSSOVER // 4, 4, **sizes, measured=measured)
        assert (mode, cost.seconds_host) == ("model_centric", host)
        assert f"the host takes {1e3 * host:.3g} ms" in cost.lines()[-1]
        assert ("model.partition.graphed(step)" in cost.lines()[-1]) == limit
    on_a_cpu = dataclasses.replace(measured, host={"model_centric": 0.0})
    cost = layer_cost(SHAPE, CROSSOVER // 4, 4, **sizes, measured=on_a_cpu)[1]
    assert cost.lines()[-1].startswith("chosen: ")


def test_strategy_by_layer_and_memory_caps():
    config = PartitionConfig(tile=16, batch=8, memory_caps=(10**9, 64 * SHAPE.weight_numel // 256 * 16))
    made = plan_layers({"a": SHAPE, "b": SHAPE}, [1.0, 1.0], {"a": "model", "b": "data"}, config)
    assert [layer.mode for layer in made.layers] == ["model_centric", "data_centric"]
    assert all(layer.shards == (192, 64) for layer in made.layers)
    with pytest.raises(PlanError, match="names layers"):
        plan_layers({"a": SHAPE}, [1.0, 1.0], {"z": "model"})
    with pytest.raises(PlanError, match="expected"):
        plan_layers({"a": SHAPE}, [1.0, 1.0], "expert")


def test_data_centric_storage_is_even_while_batches_are_weighted():
    made = plan_layers({"a": SHAPE}, [1.0, 3.0], "data", PartitionConfig(batch=8))
    assert made.batch == (6, 2)
    assert made.layers[0].shards == (128, 128)


def test_static_tokens():
    config = PartitionConfig(batch=8, tokens=80, static_tokens=True)
    assert plan_layers({"a": SHAPE}, [1.0, 3.0], "model", config).tokens == (60, 20)
    with pytest.raises(PlanError, match="multiple"):
        plan_layers({"a": SHAPE}, [1.0, 3.0], "model", dataclasses.replace(config, tokens=81))


QWEN = {f"layers.{i}": ExpertShape(128, 2048, 768, 3, 8) for i in range(4)}
ONE = {"layer": ExpertShape(8, 64, 32, 3, 2)}
CLUSTER = Cluster(hosts=4, gpus=8, inside=400e9, between=50e9, flops=400e12)


def test_reaches_divide_a_host_or_are_whole_hosts() -> None:
    assert [r.devices for r in reaches(QWEN, 2**20, CLUSTER)] == [1, 2, 4, 8, 16, 32]
    assert all(r.devices * r.replicas == 32 for r in reaches(QWEN, 2**20, CLUSTER))
    six = reaches(QWEN, 2**20, replace(CLUSTER, hosts=6, gpus=4))
    assert [r.devices for r in six] == [1, 2, 4, 8, 12, 24]


def test_the_arithmetic_of_one_layer() -> None:
    cluster = Cluster(hosts=2, gpus=2, inside=100.0, between=10.0, flops=1e4)
    tokens, numel = 64, 3 * 8 * 64 * 32
    one, two, four = reaches(ONE, tokens, cluster)
    forward = 2 * (tokens / 4) * 2 * 3 * 64 * 32 / 1e4
    assert all(reach.experts == pytest.approx(3 * forward) for reach in (one, two, four))
    assert [reach.state for reach in (one, two, four)] == [16 * numel, 8 * numel, 4 * numel]
    assert one.exchange == 0.0
    assert one.gradients == pytest.approx(2 * 3 / 4 * 2 * numel / 20.0 - 2 * forward)  # both of a host take part
    assert two.gradients == pytest.approx(2 * 1 / 2 * 2 * (numel / 2) / 10.0 - 2 * forward)
    assert four.gradients == 0.0
    routing = 2 * (8 + 2) + 2 * 2  # ids and weights there, gradients back
    assert two.modes == {"model_centric": 1}
    assert two.exchange == pytest.approx((1 / 2) * 32 * (4 * 64 * 2 + routing) / 100.0)
    assert four.exchange == pytest.approx((3 / 4) * 64 * (4 * 64 * 2 + routing) / 20.0)


def test_sums_of_replicas_wait_for_gathers_on_the_same_link() -> None:
    """Over 2 of 4 devices: within one host both travel on its link, on hosts of two devices each has its own."""
    tokens, numel = 4096, 3 * 8 * 64 * 32
    gather = (1 / 2) * 2 * numel / 100.0
    sent = 2 * (1 / 2) * 2 * (numel / 2) / 100.0
    forward = gather + sent / 4  # backward has room for half of the sums
    flops = 2 * (tokens / 4) * 2 * 3 * 64 * 32 / forward
    one = Cluster(hosts=1, gpus=4, inside=100.0, between=100.0, flops=flops)
    alone = reaches(ONE, tokens, one)[1]
    assert (alone.devices, alone.modes) == (2, {"data_centric": 1})
    assert (alone.exchange, alone.gradients) == pytest.approx((0.0, sent / 2))
    apart = reaches(ONE, tokens, replace(one, hosts=2, gpus=2))[1]
    assert (apart.devices, apart.gradients) == (2, 0.0)


def test_slow_links_keep_experts_in_a_host_and_fast_ones_let_them_go() -> None:
    tight = replace(CLUSTER, memory=8 * 2**30)  # state of 4 layers is 36 GiB
    assert best(reaches(QWEN, 2**20, tight)).devices == 8
    slow = replace(tight, memory=4 * 2**30)  # no room within a host
    assert best(reaches(QWEN, 2**20, slow)).devices > 8
    assert best(reaches(QWEN, 2**20, CLUSTER)).exchange == 0.0
    slower = [best(reaches(QWEN, 2**20, replace(tight, between=rate))).total for rate in (400e9, 50e9, 5e9)]
    assert slower == sorted(slower)


def test_what_cannot_be() -> None:
    with pytest.raises(PlanError, match="GiB a device even over all"):
        best(reaches(QWEN, 2**20, replace(CLUSTER, memory=2.0**20)))
    with pytest.raises(PlanError, match="fewer than 32 devices"):
        reaches(QWEN, 31, CLUSTER)
    with pytest.raises(PlanError, match="above 0"):
        reaches(QWEN, 2**20, replace(CLUSTER, between=0.0))
