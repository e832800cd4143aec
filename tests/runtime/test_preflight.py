"""Models that have to be prepared differently get a sentence that says how."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hexa_fx.errors import InputError
from hexa_fx.runtime.install import install
from hexa_fx.runtime.preflight import check_model
from tests.runtime.handmade import ListMoE, list_rewritten


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), ListMoE())


def refusal(bad: object) -> str:
    with pytest.raises(InputError) as error:
        check_model(bad)  # type: ignore[arg-type]
    return str(error.value)


def test_an_ordinary_model_passes():
    check_model(model())
    check_model(model().half())
    check_model(nn.Identity())


def test_not_a_module():
    assert "expected an nn.Module, got function" in refusal(lambda x: x)


def test_meta_device():
    sentence = refusal(model().to("meta"))
    assert "0.weight is on the meta device" in sentence
    assert "to_empty" in sentence


def test_already_optimized():
    once = model()
    install(once[1], list_rewritten(), None)
    assert "already optimized (1 has a rewritten forward)" in refusal(once)


def test_compiled():
    assert "optimize the model first, then compile" in refusal(torch.compile(model()))


def test_data_parallel():
    assert "DataParallel" in refusal(nn.DataParallel(model()))


def test_distributed_data_parallel(process_group):
    sentence = refusal(nn.parallel.DistributedDataParallel(model()))
    assert "the model is already wrapped by DistributedDataParallel; optimize the model first" in sentence


def test_fsdp1(process_group):
    from torch.distributed.fsdp import FullyShardedDataParallel

    try:
        wrapped = FullyShardedDataParallel(model(), device_id=torch.device("cpu"))
    except (RuntimeError, ValueError) as error:
        pytest.skip(f"FSDP on CPU: {error}")
    assert "FSDP" in refusal(wrapped)


def test_fsdp2(process_group):
    from torch.distributed.fsdp import fully_shard

    wrapped = model()
    fully_shard(wrapped[1], mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))
    assert "1 is already wrapped by fully_shard (FSDP2)" in refusal(wrapped)


def test_sharded_parameters(process_group):
    from torch.distributed.tensor import Shard, distribute_tensor

    sharded = model()
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    sharded[0].weight = nn.Parameter(distribute_tensor(sharded[0].weight.detach(), mesh, [Shard(0)]))
    assert "0.weight is a distributed tensor" in refusal(sharded)
