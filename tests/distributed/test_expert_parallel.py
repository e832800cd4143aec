"""Expert parallelism of transformers: slices of every expert by ``ep_implementation="hexa"``, and rows that it dispatched."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run, start
from models import largest
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import hexa_fx
from hexa_fx.integrations.experts import hexa_experts_forward
from hexa_fx.integrations.tiny_models import tiny_model

pytest.importorskip("transformers.distributed.expert_parallel")

LAYOUTS: dict[str, dict[str, Any]] = {
    "shared batch": {"tp_size": 2, "ep_size": 2},
    "own batches": {"fsdp_size": 2, "ep_size": 2},
}


def loaded(folder: str, **config: Any) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    logging.disable(logging.WARNING)
    hexa_fx.patch_transformers()
    given = {} if not config else {"distributed_config": DistributedConfig(**config, ep_implementation="hexa")}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager", **given)


def ids_of(rows: int, length: int, seed: int) -> Tensor:
    return torch.randint(0, 100, (rows, length), generator=torch.Generator().manual_seed(seed))


def sliced(rank: int, world: int, folder: str, layout: str) -> Any:
    """Largest differences of logits and gradients, and the shapes of what this rank has of the experts."""
    model, whole = loaded(folder, **LAYOUTS[layout]).eval(), loaded(folder).eval()
    shared = layout == "shared batch"
    batches = [ids_of(2, 7, 0)] * 2 if shared else [ids_of(2, 7, 0), ids_of(1, 5, 1)]
    logits = model(input_ids=batches[rank], use_cache=False).logits
    (logits.float() ** 2).mean().backward()
    expected = [whole(input_ids=ids, use_cache=False).logits for ids in batches]
    # FSDP2 averages the gradients of the two batches
    losses = [(e.float() ** 2).mean() for e in expected]
    (losses[0] if shared else sum(losses) / 2).backward()
    names, worst, shapes = dict(whole.named_parameters()), [float((logits - expected[rank]).abs().max())], {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and ".experts." in name:
            shapes[name.rpartition(".")[2]] = tuple(parameter.to_local().shape)
        grad = parameter.grad
        if grad is not None:
            held = grad.full_tensor() if isinstance(grad, DTensor) else grad
            worst.append(float((held - names[name].grad).abs().max()))
    return worst, shapes


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_slices_equal_one_process(family: str, layout: str, tmp_path: Path) -> None:
    model, _ = tiny_model(family)
    model.save_pretrained(tmp_path)
    whole = {name.rpartition(".")[2]: p.shape for name, p in model.named_parameters() if ".experts." in name}
    for kind, found in start(2, sliced, str(tmp_path), layout, timeout=60):
        assert kind == "ok", found
        worst, shapes = found
        assert max(worst) < 2e-5, worst
        for name in ("gate_up_proj", "down_proj"):
            assert shapes[name][0] == whole[name][0]  # every expert
            assert 2 * torch.Size(shapes[name]).numel() == whole[name].numel()


def refused(rank: int, world: int) -> list[str]:
    """What is said of experts whose channels are not apart, and of what is not going to be loaded."""
    from torch.distributed.device_mesh import init_device_mesh

    from hexa_fx.integrations.expert_parallel import SlicedExperts

    model, _ = tiny_model("qwen3_moe")
    experts, mesh, said = model.model.layers[0].mlp.experts, init_device_mesh("cpu", (world,)), []

    def attempt(change: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            change(patch)
            with pytest.raises(ValueError, match="ep_implementation") as error:
                SlicedExperts(experts, mesh, mesh)
        said.append(str(error.value))

    attempt(lambda patch: None)
    attempt(lambda patch: patch.setattr(experts, "has_post_expert_norm", True))
    attempt(lambda patch: patch.setattr(experts, "_apply_gate", lambda h: torch.softmax(h.chunk(2, -1)[0], -1)))
    attempt(lambda patch: patch.setattr(experts, "down_proj", nn.Parameter(torch.empty(4, 32, 3, device="meta"))))
    return said


def test_what_cannot_be_sliced() -> None:
    for loaded_already, norm, gate, channels in run(2, refused):
        assert "is there already" in loaded_already
        assert "none of hexa_fx's activations" in norm
        assert norm == gate
        assert "3 channels of an expert do not divide by 2 ranks" in channels


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
