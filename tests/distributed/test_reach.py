"""Over how many devices to split experts, and where data parallelism takes over."""

from dataclasses import replace

import pytest

from hexa_fx.errors import PlanError
from hexa_fx.passes.partition.reach import Cluster, best, reaches
from hexa_fx.plan import ExpertShape

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
