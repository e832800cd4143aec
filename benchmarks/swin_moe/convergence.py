"""Training on scikit-learn's digits, scaled up: does a rewritten model follow its original, and what do dropped tokens do?

One device, the same seeds and batches for all. `eager` in float32 beside `eager` in the AMP type says how far rounding alone
moves the loss of a step; `hexa_fx` may move it as far. The model routes by top-k, so rounding can send a token to another
expert; from there on curves part slowly, those of two roundings of the same model too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.swin_moe.bench import Bench
from benchmarks.swin_moe.contestants import Contestant, Setting
from benchmarks.swin_moe.model import SwinConfig, swin_config

VARIANTS = {
    "eager": ("eager", torch.bfloat16),
    "hexa_fx": ("data", torch.bfloat16),
    "eager, float32": ("eager", None),
    "hexa_fx, float32": ("data", None),
    "padded, capacity 1.25": ("padded", torch.bfloat16),
    "padded, capacity 1.0": ("padded-cf1", torch.bfloat16),
}


def convergence(bench: Bench) -> None:
    """Records the loss of every step and the accuracy on held-out digits, variant by variant."""
    model = swin_config("tiny", experts=4, top_k=2, router="linear")
    if not bench.tiny:
        model = SwinConfig(32, 2, 8, 3, 48, (2, 2, 4), (2, 4, 8), experts=8, top_k=2, router="linear", classes=10)
    steps, batch = (6, 16) if bench.tiny else (300, 64)
    data = digits(model.image, bench.device)
    for variant, (name, amp) in VARIANTS.items():
        setting = Setting(name, model, batch, amp=amp, lr=1e-3)
        about = {"name": variant, "experts": model.experts, "top_k": model.top_k, "batch": batch}
        bench.case("convergence", about, lambda s=setting: _train(bench, s, data, steps))  # type: ignore[misc]


def digits(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """1797 images (3, size, size) around zero, and their labels."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 8 - 1
    images = F.interpolate(images, size=(size, size), mode="bilinear").repeat(1, 3, 1, 1)
    return images.to(device), torch.tensor(bunch.target, device=device)


def _train(bench: Bench, setting: Setting, data: tuple[Tensor, Tensor], steps: int) -> dict[str, Any]:
    images, labels = data
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).to(bench.device)
    held, rest = order[:297], order[297:]
    entrant = Contestant(replace(setting, name=setting.name), bench.device)
    picks = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        chosen = rest[torch.randperm(len(rest), generator=picks)[: setting.batch].to(bench.device)]
        losses.append(entrant.step(images[chosen], labels[chosen]))
    entrant.model.eval()
    with torch.no_grad(), entrant.autocast():
        guesses = entrant.model(images[held])[0].argmax(-1)
    accuracy = float((guesses == labels[held]).float().mean())
    return {"losses": [round(float(loss), 6) for loss in losses], "accuracy": round(accuracy, 4)}
