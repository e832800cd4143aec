"""Rows that somebody else dispatched: transformers' expert parallelism, and the all-to-all of `examples/`."""

import os
from typing import Any

import pytest
import torch
from harness import run
from models import largest
from torch.distributed.tensor import DTensor

import hexa_fx
from hexa_fx.integrations.experts import hexa_experts_forward

hf = pytest.importorskip("transformers")
pytest.importorskip("transformers.distributed.expert_parallel")

IDS = torch.randint(0, 40, (4, 6), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of a tiny Qwen3-MoE."""
    config = hf.Qwen3MoeConfig(
        vocab_size=40,
        hidden_size=16,
        moe_intermediate_size=12,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=4,
    )
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("qwen3")
    hf.Qwen3MoeForCausalLM(config).save_pretrained(path)
    return str(path)


def expert_parallel(rank: int, world: int, folder: str, how: str) -> Any:
    """Largest difference of loss and gradients to the whole model, how many were compared, and how often our function ran."""
    hexa_fx.patch_transformers()
    calls = []

    def counted(*args: Any) -> Any:
        calls.append(args)
        return hexa_experts_forward(*args)

    hf.integrations.moe.ExpertsInterface.register("hexa", counted)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    shared = how == "all_reduce"  # of one batch; else each rank has its own, and the rest of the model is under FSDP2
    sizes = {"tp_size": world} if shared else {"tp_size": 1, "fsdp_size": world}
    config = hf.distributed.DistributedConfig(**sizes, ep_size=world, ep_implementation=how)
    load = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = hf.AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=config, experts_implementation="hexa", **load
    )
    whole = hf.AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager", **load)
    mine = IDS if shared else IDS.split(4 // world)[rank]
    loss = model(input_ids=mine, labels=mine).loss
    loss.backward()
    whole(input_ids=IDS, labels=IDS).loss.backward()
    pairs = [(loss.detach(), whole(input_ids=mine, labels=mine).loss.detach())]
    wanted = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        pairs.append((grad.full_tensor() if isinstance(grad, DTensor) else grad, wanted[name].grad))
    hexa_fx.patch_transformers()
    return largest(pairs), len(pairs), len(calls)


@pytest.mark.parametrize("how", ["all_reduce", "all_to_all"])
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_expert_parallelism_of_transformers(world: int, how: str, folder: str) -> None:
    for worst, compared, calls in run(world, expert_parallel, folder, how, timeout=60):
        assert worst < 1e-6
        assert compared > 20
        assert calls == 2  # layers
