"""Set-ups of `bench_mesh.py`: routers that choose as real ones do, adapters, and steps that transformers' Trainer takes."""

from __future__ import annotations

import statistics
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.kept_rows import Row, synchronize, wait_for_kernels

LENGTH, TRAINED_ON = 256, 4096
"""Tokens of a text, and of a step of `train_on_text`."""
_trained: dict[str, list[Tensor]] = {}


def skew(model: nn.Module, exponent: float) -> None:
    """Has every router draw experts by Zipf's law: the first channel carries each one's popularity, the others the draw.

    Embeddings are made so large that layers hardly change their direction.
    """
    embedded = model.get_input_embeddings().weight
    draw = torch.Generator(embedded.device).manual_seed(2)
    embedded.data.normal_(0.0, 8.0, generator=draw)
    embedded.data[:, 0] = 0.8 * embedded.shape[1] ** 0.5
    first = 0.1 * embedded.shape[1] ** 0.5  # of a normalised row, nearly
    for router in routers(model):
        experts, width = router.weight.shape
        popular = torch.arange(1.0, experts + 1, device=embedded.device) ** -exponent
        router.weight.data.normal_(0.0, 1.3 / width**0.5, generator=draw)
        places = torch.randperm(experts, generator=draw, device=embedded.device)
        router.weight.data[:, 0] = (popular.log()[places] / first).to(router.weight.dtype)


def train_on_text(model: nn.Module, name: str, steps: int) -> None:
    """Trains the model by AdamW on text, no loss balancing its routers; ranks get the first one's weights.

    The next model of this name gets the same ones.
    """
    weights = list(model.parameters())
    if name not in _trained:
        before = model.config._experts_implementation
        model.set_experts_implementation("grouped_mm")
        optimizer = torch.optim.AdamW(weights, lr=5e-4)
        for ids in text(TRAINED_ON, steps):
            ids = ids.to(weights[0].device)
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        model.set_experts_implementation(before)
        _trained.clear()
        _trained[name] = [weight.detach().cpu() for weight in weights]
    for weight, value in zip(weights, _trained[name], strict=True):
        weight.data.copy_(value)
        dist.broadcast(weight.data, src=0)


def text(tokens: int, steps: int, seed: int = 0) -> list[Tensor]:
    """Bytes of Python's standard library as ids (tokens / length, length) of every step."""
    files, length = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")), min(LENGTH, tokens)
    found = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    starts = torch.randint(
        len(found) - length, (steps, tokens // length, 1), generator=torch.Generator().manual_seed(seed)
    )
    return [found[each + torch.arange(length)].long() for each in starts]


def fullest(model: nn.Module, ids: Tensor) -> float:
    """What the fullest rank computes under expert parallelism, over the mean; the mean of all layers."""
    chosen: list[Tensor] = []

    def note(_: nn.Module, __: Any, output: Any) -> None:
        chosen.append(next(each for each in output if not each.is_floating_point()))

    found = routers(model)
    hooks = [router.register_forward_hook(note) for router in found]
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    ranks, experts = dist.get_world_size(), len(found[0].weight)
    loads = [torch.bincount(ids.flatten(), minlength=experts).view(ranks, -1).sum(1) for ids in chosen]
    return round(statistics.mean(float(load.max() * ranks / load.sum()) for load in loads), 2)


def routers(model: nn.Module) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith(".mlp.gate")]


def adapt(model: nn.Module, rank: int) -> None:
    """PEFT's LoRA of this rank on stacked experts and queries; everything else is frozen."""
    from peft import LoraConfig, get_peft_model

    stacked = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(r=rank, target_modules=["q_proj"], target_parameters=stacked)
    get_peft_model(model, config, autocast_adapter_dtype=False)  # FSDP2 wants one dtype


def by_trainer(model: nn.Module, tokens: int, steps: int, device: str) -> Row:
    """Losses of all steps of transformers' Trainer, which uses DDP, and the median time of the last half of them."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    ended: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            wait_for_kernels()
            synchronize()
            ended.append(time.perf_counter())

    rows = [{"input_ids": row, "labels": row} for step in text(tokens, steps) for row in step]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=max(1, tokens // LENGTH // dist.get_world_size()),
            learning_rate=1e-4,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=device == "cpu",
            disable_tqdm=True,
            seed=1,
        )
        trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[Clock()])
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    last = [after - before for before, after in zip(ended[steps // 2 - 1 :], ended[steps // 2 :])]
    return {"ms": round(1e3 * statistics.median(last), 2), "losses": losses}
