"""transformers' Trainer on a model whose experts are spread over its processes; losses and weights are those of one process.

    torchrun --nproc-per-node 2 examples/trainer_on_a_mesh.py

Runs on CPUs over Gloo; on GPUs leave out ``use_cpu`` and ``ddp_backend``. Trainer wraps the model in DDP, which averages gradients
and is told to leave the experts alone. It gives every process batches of one size, so that shares are equal (``capacities=None``).
"""

from __future__ import annotations

import copy
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import Trainer, TrainerCallback, TrainingArguments

import hexa_fx
from hexa_fx.distributed import checkpoint
from hexa_fx.distributed.gradients import clip_grad_norm_, ignore_in_ddp
from hexa_fx.integrations.tiny_models import tiny_model

SAMPLES, STEPS, RATE, NORM = 8, 4, 1e-2, 0.5


class Counting(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences s, s+1, s+2, ..., of which some count less than others for the loss."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (7 * index + torch.arange(16)) % 128
        return {"input_ids": ids, "labels": ids.where(ids % (index + 2) > 0, -100)}


class Clip(TrainerCallback):
    """Clips by the norm of all gradients. Trainer's own clipping takes each process's slices of the experts alone."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        clip_grad_norm_(self.model, self.model.partition, NORM)


def main() -> None:
    if not dist.is_torchelastic_launched():
        sys.exit("several processes are needed: torchrun --nproc-per-node 2 examples/trainer_on_a_mesh.py")
    with tempfile.TemporaryDirectory() as folder:
        train(folder)


def train(folder: str) -> None:
    """Trains, saves, and compares."""
    arguments = TrainingArguments(  # makes the process group
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=SAMPLES // int(os.environ["WORLD_SIZE"]),
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,  # `Clip` does it
        logging_steps=1,
        save_strategy="no",  # slices; `checkpoint.save` below writes whole weights
        report_to=[],
        use_cpu=True,
        ddp_backend="gloo",
        disable_tqdm=True,
    )
    model, inputs = tiny_model("qwen3_moe")
    alone = copy.deepcopy(model.train())
    mesh = init_device_mesh(arguments.device.type, (arguments.world_size,))
    config = hexa_fx.PartitionConfig(data_parallel="mean", batch=SAMPLES, tile=16)
    hexa_fx.optimize_(model, inputs, mesh=mesh, strategy="model", capacities=None, partition=config)
    ignore_in_ddp(model, model.partition)

    trainer = Trainer(model, arguments, train_dataset=Counting(), callbacks=[Clip(model)])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    of_first = [folder]
    dist.broadcast_object_list(of_first)
    checkpoint.save(Path(of_first[0]) / "whole", model, model.partition)
    if trainer.is_world_process_zero():
        compare(losses, Path(folder) / "whole", alone)
    dist.barrier()
    model.partition.close()


def compare(losses: list[float], saved: Path, alone: nn.Module) -> None:
    """With a loop on one process, which takes all samples at once."""
    batch = torch.utils.data.default_collate([Counting()[number] for number in range(SAMPLES)])
    optimizer = torch.optim.AdamW(alone.parameters(), lr=RATE, weight_decay=0.0)
    for loss in losses:
        expected = alone(**batch).loss
        expected.backward()
        nn.utils.clip_grad_norm_(alone.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad()
        assert abs(loss - expected.item()) < 1e-4, (loss, expected)
    spread = copy.deepcopy(alone)
    checkpoint.load(saved, spread, None)  # into a plain model of transformers
    theirs = alone.state_dict()
    apart = max(float((value - theirs[name]).abs().max()) for name, value in spread.state_dict().items())
    assert apart < 2e-4, apart
    print(f"losses {', '.join(f'{loss:.3f}' for loss in losses)}, as of one process; weights differ by {apart:.0e}")


if __name__ == "__main__":
    main()
